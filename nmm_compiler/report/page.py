"""Parts as HTML: a fragment for a notebook, or one self-contained file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence

from nmm_compiler.report.parts import Code, Drawing, Grid, Line, Part, Section

STYLE = """
.nmm { --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #ffffff; --shade: #f6f8fa;
  --a: #0969da; --b: #bc4c00; --c: #1a7f37; --d: #8250df; --e: #bf3989; --f: #1b7c83;
  --g: #7d6b00; --h: #6e7781; --warn: #9a6700;
  color: var(--ink); background: var(--paper); max-width: 75rem;
  font: 15px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .nmm { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --shade: #151b23; --a: #4493f8; --b: #f0883e; --c: #3fb950; --d: #ab7df8;
  --e: #db61a2; --f: #39c5cf; --g: #c9b458; --h: #848d97; --warn: #d29922; } }
@media print { .nmm { --ink: #000; --soft: #444; --paper: #fff; --shade: #fff; } }
.nmm .headline { font-size: 1.2em; font-weight: 600; }
.nmm h1 { font-size: 1.2em; color: var(--soft); } .nmm h1 + .headline { font-size: 1.8em;
  line-height: 1.3; margin: .4em 0; }
.nmm .note { color: var(--soft); } .nmm .warning { color: var(--warn); }
.nmm .wide { overflow-x: auto; } .nmm { overflow-wrap: break-word; }
.nmm table { border-collapse: collapse; margin: .75em 0; }
.nmm th, .nmm td { text-align: left; padding: .2em .8em .2em 0; vertical-align: top;
  border-bottom: 1px solid var(--line); color: var(--ink); background: none; }
.nmm .right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.nmm pre { background: var(--shade); padding: .8em; overflow-x: auto; font-size: 13px;
  line-height: 1.4; }
.nmm svg { max-width: 100%; height: auto; } .nmm svg text { fill: var(--ink); }
.nmm .listing { font: 13px/1.4 ui-monospace, monospace; } .nmm .listing td { border: 0;
  padding: 0 .8em 0 0; } .nmm .listing td:last-child { white-space: pre; padding: 0 .4em; }
.nmm .listing td:last-child { background: linear-gradient(to right,
  color-mix(in srgb, var(--b) 30%, transparent) calc(var(--share) * 100%), transparent 0); }
.nmm .tools button { font: inherit; padding: .2em .7em; margin-right: .3em; color: var(--ink);
  background: var(--shade); border: 1px solid var(--line); border-radius: .3em; }
.nmm :focus-visible { outline: 2px solid var(--a); outline-offset: 2px; }
@media print { .nmm .tools { display: none; } .nmm .wide, .nmm pre { overflow: visible; }
  .nmm pre { white-space: pre-wrap; } .nmm figure, .nmm tr { break-inside: avoid; } }
@media (max-width: 40rem) { .nmm { font-size: 14px; } .nmm figure svg { min-width: 34rem; }
  .nmm .grid thead { display: none; } .nmm .grid tr { display: block; padding: .4em 0;
  border-bottom: 1px solid var(--line); } .nmm .grid td { display: flex; border: 0; padding: 0;
  gap: .8em; justify-content: space-between; text-align: right; white-space: normal; }
  .nmm .grid { width: 100%; } .nmm .grid td:first-child { font-weight: 600; text-align: left; }
  .nmm .grid td::before { content: attr(data-name); color: var(--soft); text-align: left; }
  .nmm .grid td:empty, .nmm .grid td:first-child::before { display: none; } }
.nmm figcaption { color: var(--soft); } .nmm figure { margin: 1em 0; }
.nmm summary { cursor: pointer; font-size: 1.1em; font-weight: 600; margin-top: 1em; }
"""

OPENER = """
(() => {
  const folded = [...document.querySelectorAll("details:not([open])")];
  if (!folded.length) return;
  const tools = document.createElement("p"), button = document.createElement("button");
  tools.className = "tools"; button.type = "button"; button.textContent = "open all sections";
  button.onclick = () => {
    const open = folded.some(one => !one.open);
    folded.forEach(one => { one.open = open; });
    button.textContent = open ? "close them" : "open all sections";
  };
  tools.append(button); (document.querySelector("h1 + .headline") || document.querySelector("h1"))
    .after(tools);
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = folded.filter(one => !one.open); opened.forEach(one => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach(one => { one.open = false; }));
})();
"""
"""A button that opens what is folded, since a browser searches what is open; print shows it all."""

_WIDE = '<div class="wide" tabindex="0">'  # scrolls sideways, by keyboard too


def as_html(parts: Sequence[Part]) -> str:
    """Return the parts as one `<div>` with its style."""
    return f'<div class="nmm"><style>{STYLE}</style>\n{_body(parts)}\n</div>'


def page(title: str, parts: Sequence[Part]) -> str:
    """Return a whole HTML document that holds everything it shows."""
    body = _body(parts)
    opener = f"<script>{OPENER}</script>" if "<details>" in body else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n"
        "<style>:root { color-scheme: light dark; } body { margin: 0; background: canvas; }\n"
        f".nmm {{ margin: 0 auto; padding: 1rem; }} {STYLE}</style></head>\n"
        f'<body><main class="nmm"><h1>{html.escape(title)}</h1>\n{body}\n'
        f"</main>{opener}</body></html>\n"
    )


def _body(parts: Sequence[Part]) -> str:
    return "\n".join(_part(part) for part in parts)


def _part(part: Part) -> str:
    match part:
        case Line():
            return f'<p class="{part.kind}">{html.escape(part.text)}</p>'
        case Grid():
            return _table(part)
        case Code():
            return f"<pre>{html.escape(part.text)}</pre>"
        case Drawing():
            caption = html.escape(part.text)
            return f'<figure class="wide">{part.svg}<figcaption>{caption}</figcaption></figure>'
        case Section():
            opened = "" if part.folded else " open"
            title = html.escape(part.title)
            return f"<details{opened}><summary>{title}</summary>\n{_body(part.parts)}\n</details>"


def _table(grid: Grid) -> str:
    """Return a table; its shares are bars behind the last cells of its rows."""

    def row(cells: Sequence[str], tag: str, share: float = 0.0) -> str:
        bars = [*[""] * (len(cells) - 1), f' style="--share:{share:.3f}"' if share else ""]
        texts = (
            f"<{tag}{mark}{bar}>{html.escape(cell)}</{tag}>"
            for cell, mark, bar in zip(cells, marks, bars, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"

    marks = [' class="right"' if name in grid.right else "" for name in grid.head]
    head = row(grid.head, "th")
    if not grid.shares:
        names = (f' data-name="{html.escape(name, quote=True)}"' for name in grid.head)
        marks = [mark + name for mark, name in zip(marks, names, strict=True)]
    lines = zip(grid.rows, grid.shares or [0.0] * len(grid.rows), strict=True)
    kind = "listing" if grid.shares else "grid"
    rows = "\n".join(row(cells, "td", share) for cells, share in lines)
    return (
        f'{_WIDE}<table class="{kind}"><thead>{head}</thead>\n<tbody>{rows}</tbody></table></div>'
    )
