"""A piece of a graph as SVG: one row a node, in order, with arcs from what it reads.

An arc diagram needs no layout engine, stays readable on a phone, and reads like the code: a node's
inputs are always above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nmm_compiler.report.charts import WIDTH, hint, label, svg
from nmm_compiler.report.parts import Drawing

_ROW = 22
_LETTER = 6.8  # pixels of a letter, on average
_COLOURS = {"fused": "--a", "transpose": "--b", "call": "--c", "": "--soft"}


@dataclass(frozen=True)
class GraphNode:
    """One node. reads: names of nodes above; kind: "fused", "transpose", "call" or nothing.

    label: what is written in place of the name.
    """

    name: str
    what: str
    reads: tuple[str, ...] = ()
    kind: str = ""
    label: str = ""


def graph(nodes: Sequence[GraphNode], text: str) -> Drawing:
    """Return a drawing of nodes in order; what a node reads that is not among them is left out."""
    rows = {node.name: i for i, node in enumerate(nodes)}
    arcs = [(rows[name], i) for i, node in enumerate(nodes) for name in dict.fromkeys(node.reads)
            if name in rows and rows[name] < i]  # fmt: skip
    longest = max((stop - start for start, stop in arcs), default=1)
    left = 24 + 10 * min(longest, 10)
    body = []
    for start, stop in arcs:
        top, bottom = _middle(start), _middle(stop)
        bulge = left - 14 - (left - 24) * (stop - start) / longest
        body.append(
            f'<path d="M{left - 8} {top}C{bulge:.4g} {top},{bulge:.4g} {bottom},{left - 8} '
            f'{bottom}" fill="none" stroke="var(--soft)" opacity="0.7"/>'
        )
    for row, node in enumerate(nodes):
        y = _middle(row)
        colour = _COLOURS[node.kind]
        if node.kind in ("fused", "call"):
            body.append(
                f'<rect x="{left - 4}" y="{y - _ROW / 2}" width="{WIDTH - left}" height="{_ROW}" '
                f'fill="var({colour})" opacity="0.14"/>'
            )
        said = f"{node.name} = {node.what}" + (f" ({node.kind})" if node.kind else "")
        body.append(f'<circle cx="{left - 8}" cy="{y}" r="4" fill="var({colour})">'
                    f"{hint(said)}</circle>")  # fmt: skip
        mark = "\u21c4 " if node.kind == "transpose" else ""
        line = f"{mark}{_cut(node.label or node.name, 34)} = {node.what}"
        body.append(label(left + 4, y + 4, _cut(line, int((WIDTH - left) / _LETTER))))
    return Drawing(svg(body, _middle(len(nodes)), text), text)


def _middle(row: int) -> float:
    return row * _ROW + _ROW / 2 + 2


def _cut(text: str, most: int) -> str:
    """Return a text without its middle where it is too long: both ends tell most."""
    if len(text) <= most:
        return text
    kept = most - 3
    return f"{text[: kept // 2]}...{text[-(kept - kept // 2) :]}"
