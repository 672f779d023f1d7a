"""Parts as HTML: a fragment for a notebook, or one self-contained file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from nmm_compiler.outputs import write_text
from nmm_compiler.report.parts import Code, Drawing, Grid, Line, Part, Section

STYLE = """
.nmm { --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #ffffff; --shade: #f6f8fa;
  --a: #0969da; --b: #bc4c00; --c: #1a7f37; --d: #8250df; --e: #bf3989; --warn: #9a6700;
  color: var(--ink); background: var(--paper); max-width: 75rem;
  font: 15px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .nmm { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --shade: #151b23; --a: #4493f8; --b: #f0883e; --c: #3fb950; --d: #ab7df8;
  --e: #db61a2; --warn: #d29922; } }
@media print { .nmm { --ink: #000; --soft: #444; --paper: #fff; --shade: #fff; } }
.nmm .headline { font-size: 1.2em; font-weight: 600; }
.nmm .note { color: var(--soft); } .nmm .warning { color: var(--warn); }
.nmm .wide { overflow-x: auto; }
.nmm table { border-collapse: collapse; margin: .75em 0; }
.nmm th, .nmm td { text-align: left; padding: .2em .8em .2em 0; vertical-align: top;
  border-bottom: 1px solid var(--line); color: var(--ink); background: none; }
.nmm .right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.nmm pre { background: var(--shade); padding: .8em; overflow-x: auto; font-size: 13px;
  line-height: 1.4; }
.nmm svg { max-width: 100%; height: auto; } .nmm svg text { fill: var(--ink); }
.nmm figcaption { color: var(--soft); } .nmm figure { margin: 1em 0; }
.nmm summary { cursor: pointer; font-size: 1.1em; font-weight: 600; margin-top: 1em; }
"""


def as_html(parts: Sequence[Part]) -> str:
    """Return the parts as one `<div>` with its style."""
    return f'<div class="nmm"><style>{STYLE}</style>\n{_body(parts)}\n</div>'


def page(title: str, parts: Sequence[Part]) -> str:
    """Return a whole HTML document that holds everything it shows."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n"
        "<style>:root { color-scheme: light dark; } body { margin: 0; background: canvas; }\n"
        f".nmm {{ margin: 0 auto; padding: 1rem; }} {STYLE}</style></head>\n"
        f'<body><main class="nmm"><h1>{html.escape(title)}</h1>\n{_body(parts)}\n'
        "</main></body></html>\n"
    )


def write_page(title: str, parts: Sequence[Part], path: str | Path) -> Path:
    """Write `page` to `path`, whole or not at all; return the path. Raises OutputError."""
    return write_text(path, [page(title, parts)])


def _body(parts: Sequence[Part]) -> str:
    return "\n".join(_part(part) for part in parts)


def _part(part: Part) -> str:
    match part:
        case Line():
            return f'<p class="{part.kind}">{html.escape(part.text)}</p>'
        case Grid():
            return _grid(part)
        case Code():
            title = f"<p>{html.escape(part.title)}</p>" if part.title else ""
            return f"{title}<pre>{html.escape(part.text)}</pre>"
        case Drawing():
            caption = html.escape(part.text)
            return f'<figure class="wide">{part.svg}<figcaption>{caption}</figcaption></figure>'
        case Section():
            opened = "" if part.folded else " open"
            title = html.escape(part.title)
            return f"<details{opened}><summary>{title}</summary>\n{_body(part.parts)}\n</details>"


def _grid(grid: Grid) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        texts = (
            f"<{tag}{mark}>{html.escape(cell)}</{tag}>"
            for cell, mark in zip(cells, marks, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"

    marks = [' class="right"' if name in grid.right else "" for name in grid.head]
    rows = "\n".join(row(cells, "td") for cells in grid.rows)
    head = row(grid.head, "th")
    return f'<div class="wide"><table><thead>{head}</thead>\n<tbody>{rows}</tbody></table></div>'
