"""A timeline as SVG: a row of slices for each engine, below them levels over time.

The picture needs no script. The page's script (`page.SCRIPT`) widens the inner picture of an
element with the class `timeline`, which makes zooming and panning; it reads the end of the time
from `data-end`. Slices too thin to see are drawn as one, so that a picture has a bounded size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nmm_compiler.report.charts import WIDTH, Axis, colours, hint, label, svg
from nmm_compiler.report.parts import Drawing

_ROW, _BAR, _LEVEL = 24, 18, 46
_RIGHT = 20
_THINNEST = 1 / 4000  # of the whole time: the width with which a shorter slice is drawn


@dataclass(frozen=True)
class Slice:
    """A stretch of work: start and stop in microseconds, what it is, and what hovering says."""

    start_us: float
    stop_us: float
    name: str
    hint: str = ""


@dataclass(frozen=True)
class Lane:
    """One row of a timeline, such as an engine."""

    name: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Level:
    """A quantity over time: (moment, value from then on), in order; full: its largest possible
    value."""

    name: str
    points: tuple[tuple[float, float], ...]
    full: float
    unit: str


def timeline(
    lanes: Sequence[Lane], text: str, *, levels: Sequence[Level] = (), most_slices: int = 4000
) -> Drawing:
    """Return a timeline, one row a lane and a level.

    Neighbours are joined where they are too thin to see, and more of them where the picture would
    have more than `most_slices` slices.
    """
    end = max((piece.stop_us for lane in lanes for piece in lane.slices), default=1.0) or 1.0
    peaks = [f"{level.name}, {_peak(level) / level.full:.0%} at most" for level in levels]
    names = [*(lane.name for lane in lanes), *peaks]
    left = 10 + 7 * max([len(name) for name in names], default=0)
    axis = Axis(0.0, end, left, WIDTH - _RIGHT)
    outer, inner, top = [], [], 10
    thin = end / (axis.stop - axis.start) / 3
    joined = [_joined(lane.slices, thin) for lane in lanes]
    while sum(map(len, joined)) > max(most_slices, 8 * len(joined)):
        thin *= 2
        joined = [_joined(lane.slices, thin) for lane in lanes]
    for lane, pieces, colour in zip(lanes, joined, colours(len(lanes)), strict=True):
        outer.append(label(left - 6, top + 14, lane.name, "end"))
        for piece in pieces:
            wide = max(piece.stop_us - piece.start_us, end * _THINNEST)
            said = f"{piece.name}: {piece.start_us:.2f} to {piece.stop_us:.2f} us {piece.hint}"
            inner.append(
                f'<rect x="{piece.start_us:.7g}" y="{top}" width="{wide:.4g}" height="{_BAR}" '
                f'fill="var({colour})">{hint(said.strip())}</rect>'
            )
        top += _ROW
    for level, peak, colour in zip(levels, peaks, colours(len(levels)), strict=True):
        outer.append(label(left - 6, top + 26, peak, "end"))
        inner.append(_area(level, end, top, colour))
        top += _LEVEL
    plot = (
        f'<svg class="plot" x="{left}" y="0" width="{axis.stop - axis.start}" height="{top}" '
        f'viewBox="0 0 {end:.7g} {top}" preserveAspectRatio="none">{"".join(inner)}</svg>'
    )
    ticks = [label(axis.at(mark), top + 16, f"{mark:g}", "middle") for mark in axis.ticks()]
    unit = label(left - 16, top + 16, "us", "end")
    body = [*outer, plot, f'<g class="ticks">{"".join(ticks)}</g>', unit]
    marks = f'class="timeline" tabindex="0" data-end="{end:.7g}" '
    return Drawing(svg(body, top + 26, text, marks), text)


def _area(level: Level, end: float, top: float, colour: str) -> str:
    """Return the area below a level, its top at the largest value; the row's name has its share."""
    most = _peak(level) or 1.0
    height, floor = _LEVEL - 6, top + _LEVEL - 2

    def y(value: float) -> str:
        return f"{floor - height * value / most:.4g}"

    steps, before = [f"M0 {floor}"], 0.0
    for when, value in _fewer(level.points, end / 1000):
        steps.append(f"L{when:.6g} {y(before)}L{when:.6g} {y(value)}")
        before = value
    steps.append(f"L{end:.6g} {y(before)}L{end:.6g} {floor}Z")
    said = f"{level.name}: at most {_peak(level):,.0f} of {level.full:,.0f} {level.unit}"
    return f'<path d="{"".join(steps)}" fill="var({colour})" opacity="0.6">{hint(said)}</path>'


def _peak(level: Level) -> float:
    return max((value for _, value in level.points), default=0.0)


def _fewer(points: Sequence[tuple[float, float]], thin: float) -> list[tuple[float, float]]:
    """Return the points, of those closer than `thin` the one with the largest value."""
    kept: list[tuple[float, float]] = []
    for when, value in points:
        if kept and when - kept[-1][0] < thin:
            kept[-1] = (kept[-1][0], max(kept[-1][1], value))
        else:
            kept.append((when, value))
    return kept


def _joined(slices: Sequence[Slice], thin_us: float) -> list[Slice]:
    """Join slices that follow each other closer than `thin_us` and are thinner than that."""
    joined: list[Slice] = []
    count = 1
    for piece in sorted(slices, key=lambda one: one.start_us):
        last = joined[-1] if joined else None
        if (
            last is not None
            and piece.start_us - last.stop_us < thin_us
            and piece.stop_us - piece.start_us < thin_us
        ):
            count += 1
            stop = max(last.stop_us, piece.stop_us)
            joined[-1] = Slice(last.start_us, stop, last.name, f"and {count - 1} more")
        else:
            joined.append(piece)
            count = 1
    return joined
