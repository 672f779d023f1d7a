"""The report of a RewriteResult, as plain text for a given width.

Places that differ only in where they are (the layers of a model) share a row: the numbers of their
paths become `*`. Sentences are wrapped; a table wider than the page loses its blanks between
columns before anything else.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmm_compiler.passes.result import RewriteResult

_SHOWN = 3
_WIDEST = 120


def page_width() -> int:
    """Return the columns of the terminal, 100 where there is none, 120 at most."""
    return min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)


def columns(head: Sequence[str], rows: Sequence[Sequence[Any]], width: int = _WIDEST) -> list[str]:
    """Return the rows as aligned lines under a head, the last column wrapped to the width."""
    texts = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    gap = "  " if sum(widths) + 2 * len(widths) <= width else " "
    start = sum(w + len(gap) for w in widths[:-1])
    lines = []
    for row in texts:
        left = gap.join(row[i].ljust(widths[i]) for i in range(len(head) - 1))
        last = textwrap.wrap(row[-1], max(width - start, 16), break_long_words=False) or [""]
        lines.append(f"{left}{gap}{last[0]}".rstrip())
        lines += [" " * start + more for more in last[1:]]
    return lines


def places(names: Iterable[str]) -> str:
    """Return paths in few words: numbers that differ as `*`, the first few, and how many more."""
    distinct = list(dict.fromkeys(names))
    patterns: dict[str, list[str]] = {}
    for name in distinct:
        patterns.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    shown = [pattern if len(same) > 1 else same[0] for pattern, same in patterns.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def render(result: RewriteResult, width: int | None = None) -> str:
    """Return what was fused, what not and why, the layouts, and what could be factorized."""
    width = width or page_width()
    lines = textwrap.wrap(
        f"{len(result.matches)} matched ({len(result.rewritten)} rewritten), "
        f"{len(result.declined)} declined; transposes of activations in the graph: "
        f"{result.transposes_before} -> {result.transposes_after}",
        width,
    )
    for part in (_matches, _layouts, _declined, _opportunities):
        text = part(result, width)
        lines += ["", *text] if text else []
    return "\n".join(lines)


def _group(rows: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Return key -> places, in the order in which keys come."""
    groups: dict[Any, list[str]] = {}
    for key, place in rows:
        groups.setdefault(key, []).append(place)
    return groups


def _matches(result: RewriteResult, width: int) -> list[str]:
    groups = _group(
        (
            (
                m.kind if m.rewritten else f"({m.kind})",
                *(str(m.info.get(key, "-")) for key in ("m", "k", "r", "n")),
                f"{m.info['x_layout']}>{m.info['out_layout']}" if "x_layout" in m.info else "-",
                m.notes,
            ),
            m.module or m.name,
        )
        for m in result.matches
    )
    rows = [(len(where), *key[:-1], places(where)) for key, where in groups.items()]
    head = ("calls", "fused", "m", "k", "r", "n", "layout", "where")
    lines = columns(head, rows, width) if rows else []
    if any(not m.rewritten for m in result.matches):
        lines.append("(in brackets: reported, no kernel computes it yet)")
    for note, count in _counted(note for m in result.matches for note in m.notes):
        lines += _wrapped(f"note, {count} x: {note}", width)
    return lines


def _counted(items: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return list(counts.items())


def _layouts(result: RewriteResult, width: int) -> list[str]:
    """Say where transposes are left and what they cost, in elements moved per token."""
    calls = [m.info for m in result.rewritten if "x_layout" in m.info]
    rows = [info for info in calls if info["x_layout"] == "row"]
    turned = [choice for choice in result.layouts if choice.layout == "col"]
    left = [c for c in result.layouts if min(c.row_cost, c.col_cost) > 0]
    lines = []
    if turned:
        through = sum(choice.through for choice in turned)
        more = f", {through} pointwise operations between them turned with it" if through else ""
        count = f"{len(turned)} result{'s' * (len(turned) > 1)}"
        lines.append(f"{count} passed [features, tokens] from kernel to kernel{more}")
    if rows:
        elements = sum(int(info["k"]) for info in rows)
        lines.append(
            f"{len(rows)} of {len(calls)} calls read x [tokens, features] and transpose it while "
            f"they load it: {elements:,} elements per token"
        )
    for choice in left[:_SHOWN]:
        lines.append(
            f"{choice.node} stays {choice.layout}: row costs {choice.row_cost:,} elements moved "
            f"per token, col {choice.col_cost:,}"
        )
    if len(left) > _SHOWN:
        lines.append(f"and {len(left) - _SHOWN} more such results (result.layouts)")
    return [line for text in lines for line in _wrapped(text, width)]


def _wrapped(text: str, width: int, indent: str = "    ") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False)


def _declined(result: RewriteResult, width: int) -> list[str]:
    """Say each reason once, with the nodes to blame and what would have to change."""
    groups = _group(
        ((d.rule, _without_names(d.reason), d.remedy), f"{d.at}\0{d.module}\0{d.reason}")
        for d in reversed(result.declined)  # rules look from the end of the graph
    )
    lines = ["left alone"] if groups else []
    for (rule, _, remedy), found in groups.items():
        parts = [entry.split("\0") for entry in found]
        modules = places(module for _, module, _ in parts if module)
        nodes = places(at for at, _, _ in parts)
        count = f"{len(found)} x " if len(found) > 1 else ""
        lines += _wrapped(f"  {count}{rule}: {parts[0][2]}", width)
        lines += _wrapped(
            f"      at {nodes}" + (f" in {modules}" if modules else ""), width, " " * 9
        )
        helps = f"no remedy: {remedy[9:]}" if remedy[:9] == "nothing: " else f"would help: {remedy}"
        lines += _wrapped(f"      {helps}", width, " " * 9)
    return lines


def _without_names(reason: str) -> str:
    """Return a reason without the numbers of nodes and layers, so that equal ones meet."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", re.sub(r"(\w)_\d+\b", r"\1", reason))


def _opportunities(result: RewriteResult, width: int) -> list[str]:
    groups = _group(
        ((o.k, o.n, o.r, o.break_even, o.saved_bytes, o.saved_flops_per_token), o.module or o.node)
        for o in result.opportunities
    )
    if not groups:
        return []
    rows = [
        (len(at), k, n, r, even, f"{saved * len(at) / 2**20:.2f}", f"{flops * len(at) / 1e6:.3f}",
         places(at))
        for (k, n, r, even, saved, flops), at in groups.items()
    ]  # fmt: skip
    head = ("dense", "k", "n", "rank", "break-even", "MiB saved", "MFLOP/token")
    total = sum(o.saved_bytes for o in result.opportunities) / 2**20
    return [
        *columns((*head, "could be factorized"), rows, width),
        *_wrapped(
            f"keeping 80 % of these weights' parameters saves {total:.2f} MiB per pass", width
        ),
    ]
