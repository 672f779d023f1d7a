"""Charts and pieces of graphs as SVG text, in the colours of the page around them (`page.STYLE`).

Every mark has a `<title>`, which browsers show on hover and read aloud. Nothing is drawn by script.
A graph has one row a node, in order, with arcs from what it reads. Such an arc diagram needs no
layout engine, stays readable on a phone, and reads like the code: inputs are always above.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nmm_compiler.report.parts import Drawing

WIDTH = 720
_LEFT = 70
COLOURS = ("--a", "--b", "--c", "--d", "--e", "--f", "--g", "--h")
"""CSS variables of `page.STYLE`, in the order in which series take them."""


@dataclass(frozen=True)
class Axis:
    """A scale from data to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, value = (
            (math.log10(v) if self.log else v) for v in (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.stop - self.start), 2)


def bars(
    rows: Sequence[tuple[str, Sequence[float]]], keys: Sequence[str], unit: str, text: str
) -> Drawing:
    """Return stacked horizontal bars.

    rows: (name, the values of its parts). keys: the names of the parts, in that order.
    """
    sums = [sum(values) for _, values in rows]
    totals = [f"{f'{total:,.0f}' if total >= 1e4 else f'{total:.4g}'} {unit}" for total in sums]
    left, right = (12 + 7 * max(map(len, texts), default=0) for texts in (dict(rows), totals))
    axis = Axis(0.0, max(sums, default=0.0) or 1.0, left, max(WIDTH - right, left + 60))
    drawn = []
    for (name, values), total in zip(rows, totals, strict=True):
        ends = [0.0, *itertools.accumulate(values)]
        said = [f"{key}: {value:.4g} {unit}" for key, value in zip(keys, values, strict=True)]
        parts = zip(ends, ends[1:], itertools.cycle(COLOURS), said, strict=False)
        drawn.append((name, tuple(parts), total))
    body, top = _stacked(drawn, axis, legend(keys, 4))
    return Drawing(svg(body, top + 10, text), text)


def gain_bars(rows: Sequence[tuple[str, float, bool]], text: str) -> Drawing:
    """Return bars that begin at 1.0, to the right for faster and to the left for slower.

    rows: (name, times faster, whether that is told apart from no gain); those that are not are
    grey. The axis is logarithmic: twice and half as fast are equally long.
    """
    every = [1 / 1.1, 1.1, *(gain for _, gain, _ in rows)]
    left = 12 + 7 * max((len(name) for name, _, _ in rows), default=0)
    axis = Axis(min(every), max(every), left, WIDTH - 64, log=True)
    drawn = [
        (name, ((min(1.0, gain), max(1.0, gain), "--a" if told else "--h", "times as fast"),),
         f"{gain:.2f}x")
        for name, gain, told in rows
    ]  # fmt: skip
    keys = legend(("told apart", "within the error"), 4, ("--a", "--h"))
    body, top = _stacked(drawn, axis, keys)
    body.append(rule(axis.at(1.0), axis.at(1.0), keys[1] - 4, top))
    body.append(label(axis.at(1.0), top + 14, "1.0, as fast", "middle"))
    return Drawing(svg(body, top + 22, text), text)


def _stacked(
    rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]], str]], axis: Axis,
    above: tuple[list[str], float],
) -> tuple[list[str], float]:  # fmt: skip
    """Return the marks of bars below a legend, and where they end.

    rows: name, (start, stop, colour, what it is) of each part, and what stands behind the last.
    """
    body, top = above
    for name, parts, said in rows:
        body.append(label(axis.start - 6, top + 14, name, "end"))
        for start, stop, colour, what in parts:
            left, wide = axis.at(start), round(axis.at(stop) - axis.at(start), 2)
            body.append(
                f'<rect x="{left}" y="{top}" width="{wide}" height="18" '
                f'fill="var({colour})">'
                f"<title>{html.escape(f'{name}, {what}, {said}')}</title></rect>"
            )
        body.append(label(axis.at(parts[-1][1]) + 6, top + 14, said))
        top += 26
    return body, top


def legend(names: Sequence[str], top: float, taken: Sequence[str] = ()) -> tuple[list[str], float]:
    """Return the legend, in rows from `top` on, and the vertical position where it ends.

    taken: the colours, by default those of series.
    """
    body, left = [], float(_LEFT + 8)
    for name, colour in zip(names, itertools.cycle(taken or COLOURS), strict=False):
        wide = 30 + 7 * len(name)
        if left > _LEFT + 8 and left + wide > WIDTH:
            left, top = float(_LEFT + 8), top + 18
        body.append(f'<rect x="{left}" y="{top}" width="10" height="10" fill="var({colour})"/>')
        body.append(label(left + 14, top + 9, name))
        left += wide
    return body, top + 26


def rule(x1: float, x2: float, y1: float, y2: float) -> str:
    """Return a line of the grid."""
    return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="var(--line)"/>'


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Return a text; anchor: the end of it that is at x."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'


def svg(body: Sequence[str], height: float, text: str) -> str:
    """Return the marks as one picture; text describes it."""
    inner = "\n".join(body)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img" '
        f'aria-label="{html.escape(text, quote=True)}" font-size="12" '
        f'font-family="system-ui, sans-serif" xmlns="http://www.w3.org/2000/svg">\n{inner}\n</svg>'
    )


_ROW = 22
_LETTER = 6.8  # pixels of a letter, on average
_OF_KIND = {"fused": "--a", "transpose": "--b", "call": "--c", "": "--soft"}


@dataclass(frozen=True)
class GraphNode:
    """One node. reads: names of nodes above; kind: "fused", "transpose", "call" or nothing."""

    name: str
    what: str
    reads: tuple[str, ...] = ()
    kind: str = ""


def graph(nodes: Sequence[GraphNode], text: str) -> Drawing:
    """Return a drawing of nodes in order; what a node reads that is not among them is left out."""
    rows = {node.name: i for i, node in enumerate(nodes)}
    arcs = [(rows[name], i) for i, node in enumerate(nodes) for name in dict.fromkeys(node.reads)
            if name in rows and rows[name] < i]  # fmt: skip
    longest = max((stop - start for start, stop in arcs), default=1)
    left = 24 + 10 * min(longest, 10)
    body = []
    for start, stop in arcs:
        top, bottom = _ROW * (start + 0.5), _ROW * (stop + 0.5)
        bulge = left - 14 - (left - 24) * (stop - start) / longest
        body.append(
            f'<path d="M{left - 8} {top}C{bulge:.4g} {top},{bulge:.4g} {bottom},{left - 8} '
            f'{bottom}" fill="none" stroke="var(--soft)" opacity="0.7"/>'
        )
    for row, node in enumerate(nodes):
        y, colour = _ROW * (row + 0.5), _OF_KIND[node.kind]
        if node.kind in ("fused", "call"):
            body.append(
                f'<rect x="{left - 4}" y="{y - _ROW / 2}" width="{WIDTH - left}" height="{_ROW}" '
                f'fill="var({colour})" opacity="0.14"/>'
            )
        said = f"{node.name} = {node.what}" + (f" ({node.kind})" if node.kind else "")
        body.append(f'<circle cx="{left - 8}" cy="{y}" r="4" fill="var({colour})">'
                    f"<title>{html.escape(said)}</title></circle>")  # fmt: skip
        mark = "\u21c4 " if node.kind == "transpose" else ""
        line = f"{mark}{node.name[-34:]} = {node.what}"
        body.append(label(left + 4, y + 4, line[: int((WIDTH - left) / _LETTER)]))
    return Drawing(svg(body, _ROW * (len(nodes) + 0.5), text), text)
