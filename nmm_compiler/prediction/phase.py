"""A pass of a model as lines of work, and as steps from its bytes to its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from nmm_compiler.records import Record

STEPS = (
    "bytes at the full rate",
    "products beyond the bytes",
    "kernels above their bound",
    "vector work, copies",
    "gaps between programs and launches",
    "host and stack",
    "collectives",
)
"""The parts of the time of a pass, in the order in which a waterfall shows them."""
_BOUNDS = 2  # the first steps are bounds
_KINDS = {
    "kernel": STEPS[2], "attention": STEPS[2], "gaps": STEPS[4], "call": STEPS[5],
    "all_reduce": STEPS[6], "all_gather": STEPS[6],
}  # fmt: skip
"""The step of a kind of line beyond its bounds; vector work for any other."""


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

    @property
    def steps(self) -> tuple[float, ...]:
        """Microseconds in each of STEPS. Only kernels and attention have a bound, which is exact;
        what their times may be wrong by is in the step above it. Other work counts in one step."""
        bounds = (self.bytes_us, self.floor_us - self.bytes_us)
        name = _KINDS.get(self.kind, STEPS[3])
        rest = self.each_us - self.floor_us
        others = (rest if step == name else 0.0 for step in STEPS[_BOUNDS:])
        return tuple(self.calls * us for us in (*bounds, *others))


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
        each = (_step(i, self.lines) for i in range(len(STEPS)))
        return tuple(step for step in each if abs(step.us) > 1e-9 * self.us)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data, and the steps, which follow from the lines."""
        return {**super().to_dict(), "steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the phase again from the data of `to_dict`."""
        return super().from_dict({name: data[name] for name in data if name != "steps"})

    def by(self, field: str) -> dict[str, float]:
        """Return microseconds per value of a field of the lines: module, kind or source."""
        made: dict[str, float] = {}
        for line in self.lines:
            key = str(getattr(line, field))
            made[key] = made.get(key, 0.0) + line.us
        return made


def _step(i: int, lines: Sequence[Line]) -> Step:
    parts = [line for line in lines if line.steps[i]]
    us = sum(line.steps[i] for line in parts)
    if i < _BOUNDS:
        return Step(name=STEPS[i], us=us, sources=("target's rates",), error_band=(0.0, 0.0))
    below, above = (
        sum(line.us * line.error_band[side] for line in parts) / us if us else 0.0
        for side in (0, 1)
    )
    below = max(below, -1.0)  # no step takes less than nothing
    sources = tuple(sorted({line.source for line in parts}))
    return Step(name=STEPS[i], us=us, sources=sources, error_band=(below, above))
