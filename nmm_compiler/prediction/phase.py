"""A pass of a model as lines of work, and as steps from its bytes to its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nmm_compiler.records import Record


@dataclass(frozen=True, kw_only=True)
class Line(Record):
    """The predicted time of one kind of work in equal modules: calls, and microseconds of each.

    source: "simulated", "bound", "published law" or "fitted". error_band: how much less and more a
    device may take, as shares of the figure. bytes_us: what the bytes that a kernel must move take
    at the full HBM rate; floor_us: these, or its products at the peak rate, the larger.
    """

    module: str
    kind: str
    calls: int
    each_us: float
    source: str
    error_band: tuple[float, float]
    what: str = ""
    bytes_us: float = 0.0
    floor_us: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds of all calls."""
        return self.calls * self.each_us


@dataclass(frozen=True, kw_only=True)
class Step(Record):
    """A part of the time of a pass, the sources of its figures and their error band."""

    name: str
    us: float
    sources: tuple[str, ...]
    error_band: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Phase(Record):
    """One pass of the model: "prefill", "decode", or "pass" of a model that does not generate.

    tokens: output tokens of one pass, one for each sequence of the batch.
    """

    name: str
    lines: tuple[Line, ...]
    tokens: int

    @property
    def us(self) -> float:
        """Microseconds of the pass: the sum of its lines."""
        return sum(line.us for line in self.lines)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps from the bytes of the pass to its time, those of nothing left out; they sum
        to the time."""
        made = (_step(name, of, self.lines) for name, of in STEPS.items())
        return tuple(step for step in made if abs(step.us) > 1e-9 * self.us)

    def by(self, field: str) -> dict[str, float]:
        """Return microseconds per value of a field of the lines: module, kind or source."""
        made: dict[str, float] = {}
        for line in self.lines:
            key = str(getattr(line, field))
            made[key] = made.get(key, 0.0) + line.us
        return made


_COMPUTED = ("kernel", "attention")
_LEFT = {"gaps": "gaps between programs and launches", "call": "host and stack",
         "all_reduce": "collectives", "all_gather": "collectives"}  # fmt: skip


def _of_kind(name: str) -> Callable[[Line], float]:
    def us(line: Line) -> float:
        of_others = line.kind not in _COMPUTED
        return line.us if of_others and _LEFT.get(line.kind, "vector work, copies") == name else 0.0

    return us


_BOUNDS: dict[str, Callable[[Line], float]] = {
    "bytes at the full rate": lambda line: line.calls * line.bytes_us,
    "products beyond the bytes": lambda line: line.calls * (line.floor_us - line.bytes_us),
}
STEPS: dict[str, Callable[[Line], float]] = {
    **_BOUNDS,
    "kernels above their bound": lambda line: (
        line.calls * (line.each_us - line.floor_us) if line.kind in _COMPUTED else 0.0
    ),
    **{name: _of_kind(name) for name in ("vector work, copies", *dict.fromkeys(_LEFT.values()))},
}
"""Each step's microseconds of a line, in the order in which a waterfall shows them. Only kernels
and attention have a bound, which is exact; what their times may be wrong by is in the step above
it. Other work counts whole in one step."""


def _step(name: str, of: Callable[[Line], float], lines: Sequence[Line]) -> Step:
    parts = [(line, of(line)) for line in lines if of(line)]
    us = sum(part for _, part in parts)
    if name in _BOUNDS:
        return Step(name=name, us=us, sources=("target's rates",), error_band=(0.0, 0.0))
    below, above = (
        sum(line.us * line.error_band[side] for line, _ in parts) / us if us else 0.0
        for side in (0, 1)
    )
    below = max(below, -1.0)  # no step takes less than nothing
    sources = tuple(sorted({line.source for line, _ in parts}))
    return Step(name=name, us=us, sources=sources, error_band=(below, above))
