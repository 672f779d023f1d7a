"""The predicted latency of a model: the record that `predict` returns.

Times are sums of lines, one for each kind of piece and module. A line says how its figure was found
and how wrong such figures have been. A pass is also shown as steps from its bytes to its time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.records import Record
from nmm_compiler.report.charts import bars
from nmm_compiler.report.headline import headline, told_apart
from nmm_compiler.report.parts import Grid, Line as Text, Part, Section
from nmm_compiler.report.shown import Shown

_BYTES, _PRODUCTS = "bytes at the full rate", "products beyond the bytes"  # the bounds
STEPS = (
    _BYTES,
    _PRODUCTS,
    "kernels above their bound",
    "vector work, copies",
    "gaps between programs and launches",
    "host and stack",
    "collectives",
)
"""The parts of the time of a pass, in the order in which a waterfall shows them."""
_KINDS = {
    "kernel": STEPS[2], "attention": STEPS[2], "gaps": STEPS[4], "call": STEPS[5],
    "all_reduce": STEPS[6], "all_gather": STEPS[6],
}  # fmt: skip
"""The step of a kind of line beyond its bounds; vector work for any other."""


# Share of a line's figure that such figures have been off by, below and above, and why.
SOURCES = {
    "simulated": (-0.15, 0.15, "the timing model against published kernels (docs/timing.md)"),
    "estimated": (-0.25, 0.8, "the closed form is 0.65 to 1.15 of what the simulator says"),
    # Such kernels wait for their sum for about half of their time: half of both bands.
    "simulated + law": (-0.38, 1.1, "a kernel of ours, with the published law of its sum"),
    "estimated + law": (-0.43, 1.4, "its closed form, with the published law of its sum"),
    "bound": (-0.1, 1.0, "a bound: real kernels are slower"),
    "published law": (-0.6, 2.0, "spread of the published measurements"),
    "fitted": (-0.6, 2.0, "one constant, chosen on the published runs marked calibrate"),
}


@dataclass(frozen=True, kw_only=True)
class PhaseLine(Record):
    """The predicted time of one kind of work in equal modules: calls, and microseconds of each.

    source: one of SOURCES. bytes_us: what the bytes that a kernel must move take at the full HBM
    rate; floor_us: these, or its products at the peak rate, the larger. spec: of a line's kernel,
    None for other work and in a record that was read from JSON. A call is one launch.
    """

    module: str = ""
    kind: str = "kernel"
    calls: int = 1
    each_us: float
    source: str
    what: str = ""
    bytes_us: float = 0.0
    floor_us: float = 0.0
    spec: Any = field(default=None, repr=False, compare=False)

    derived: ClassVar[tuple[str, ...]] = ("error_band",)

    @property
    def error_band(self) -> tuple[float, float]:
        """How much less and more a device may take, as shares of the figure."""
        return SOURCES[self.source][:2]

    @property
    def us(self) -> float:
        """Microseconds of all calls."""
        return self.calls * self.each_us

    @property
    def steps(self) -> dict[str, float]:
        """Microseconds in each of STEPS that it has. Only kernels and attention have a bound, which
        is exact; what their times may be wrong by is in the step above it."""
        above = _KINDS.get(self.kind, STEPS[3])
        each = {
            _BYTES: self.bytes_us,
            _PRODUCTS: self.floor_us - self.bytes_us,
            above: self.each_us - self.floor_us,
        }
        return {name: self.calls * us for name, us in each.items() if us}


@dataclass(frozen=True, kw_only=True)
class PhaseStep(Record):
    """A part of the time of a pass, the sources of its figures and their error band."""

    name: str
    us: float
    sources: tuple[str, ...]
    error_band: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Phase(Record):
    """One pass of the model: "prefill", "decode", or "pass" of a model that does not generate."""

    name: str
    lines: tuple[PhaseLine, ...]

    derived: ClassVar[tuple[str, ...]] = ("steps",)

    @property
    def us(self) -> float:
        """Microseconds of the pass: the sum of its lines."""
        return sum(line.us for line in self.lines)

    @property
    def steps(self) -> tuple[PhaseStep, ...]:
        """The steps from the bytes of the pass to its time, those of nothing left out; they sum
        to the time."""
        made = []
        for name in STEPS:
            parts = [line for line in self.lines if line.steps.get(name)]
            us = sum(line.steps[name] for line in parts)
            if not abs(us) > 1e-9 * self.us:
                continue
            sources: tuple[str, ...] = ("target's rates",)
            band = (0.0, 0.0)
            if name not in (_BYTES, _PRODUCTS):
                sources = tuple(sorted({line.source for line in parts}))
                below, above = (
                    sum(line.us * line.error_band[side] for line in parts) / us for side in (0, 1)
                )
                band = (max(below, -1.0), above)  # no step takes less than nothing
            made.append(PhaseStep(name=name, us=us, sources=sources, error_band=band))
        return tuple(made)

    def by(self, field: str | Callable[[PhaseLine], str]) -> dict[str, float]:
        """Return microseconds per value of a field of the lines (module, kind, source), or per
        what a function says of a line."""
        key = operator.attrgetter(field) if isinstance(field, str) else field
        made: dict[str, float] = {}
        for line in self.lines:
            made[key(line)] = made.get(key(line), 0.0) + line.us
        return made


# How much less and more than predicted the published runs took (`make bench-models`). Decodes with
# 16,384 tokens in the cache took up to 1.54 times as long on trn1, others up to 1.28. First tokens
# of published systems took up to 5.7 times as long: they reach 13 to 42 % of the peak rate there,
# and the prediction has our kernels in their place.
BANDS = {"decode": (-0.3, 0.55), "prefill": (-0.1, 4.7), "pass": (-0.1, 4.7)}


@dataclass(frozen=True, kw_only=True)
class Memory(Record):
    """HBM bytes that one logical core needs and has."""

    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    capacity_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All bytes that the core needs."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether the core's HBM holds them."""
        return self.needed_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelPrediction(Shown, Record):
    """A model's predicted latency in one setting, and that of the dense model where it differs.

    parameters: of the whole model. ranks: the distinct ranks of its factors. price: of kernels, and
    stack: what runs them, as `predict` was asked. dense: the model before compression, or None.
    """

    name: str
    target: str
    dtype: str
    weights: str
    prompt: int
    context: int
    batch: int
    tp: int
    lnc: int
    ratio: float | None
    ranks: tuple[int, ...]
    parameters: int
    phases: tuple[Phase, ...]
    memory: Memory
    price: str = "simulated"
    stack: str = "own"
    dense: ModelPrediction | None = None

    @property
    def form(self) -> str:
        """What the weights are, as `forms.py` names it; "lowrank" of factors that no ratio made."""
        if self.dense is None:
            return self.weights
        low_rank = "lowrank" if self.ratio is None else f"lowrank:{self.ratio:g}"
        return low_rank + (f" {self.weights}" if self.weights != "bf16" else "")

    def phase(self, name: str) -> Phase | None:
        """Return a phase by name."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def ttft_us(self) -> float:
        """Time to first token: the prefill, or the one pass of a model that does not generate."""
        return self.phases[0].us

    @property
    def tpot_us(self) -> float | None:
        """Time per output token of each sequence; None for a model that does not generate."""
        decode = self.phase("decode")
        return None if decode is None else decode.us

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens of all sequences a second."""
        return None if self.tpot_us is None else 1e6 * self.batch / self.tpot_us

    @property
    def lines(self) -> tuple[PhaseLine, ...]:
        """The lines of all phases."""
        return tuple(itertools.chain.from_iterable(phase.lines for phase in self.phases))

    @property
    def gain(self) -> dict[str, float]:
        """How many times faster than dense each phase is; empty for a model that is dense."""
        if self.dense is None:
            return {}
        before = {phase.name: phase.us for phase in self.dense.phases}
        return {phase.name: before[phase.name] / phase.us for phase in self.phases}

    @property
    def step_gain(self) -> float:
        """How many times faster than dense a token is, or the pass; 0.0 for a dense model."""
        return self.gain.get(self.phases[-1].name, 0.0)

    @property
    def pays(self) -> bool:
        """Whether `step_gain` is a gain, and more than the error of the prices."""
        return self.step_gain > 1.0 and told_apart(self.step_gain, ERRORS[self.price])

    @property
    def error_band(self) -> tuple[float, float]:
        """How much less and more a device may take than predicted: a token, else the pass."""
        return BANDS[self.phases[-1].name]

    def headline(self, quality: str = "") -> str:
        """Return the one sentence that demo, reports and commands print."""
        setting = f"(batch {self.batch}, stack {self.stack}) on {self.target}"
        setting += f", tp {self.tp}" if self.tp > 1 else ""
        if self.dense is None:
            text = " and ".join(f"{_ms(p.us)} ms {_PHASE[p.name]}" for p in self.phases[::-1])
            return f"predicted {text} {setting}"
        gains = [(gain, _PHASE[name]) for name, gain in reversed(self.gain.items())]
        return headline(gains, setting, error=ERRORS[self.price], quality=quality, remedy=REMEDY)

    def parts(self) -> Sequence[Part]:
        """Return headline, memory, what each kind of piece takes, and the lines of each phase."""
        memory, gib = self.memory, 2.0**30
        fits = "fits" if memory.fits else "DOES NOT FIT"
        context = f"context {self.context:,}, " if self.phase("decode") else ""
        made: list[Part] = [
            Text(f"{self.name}: {self.headline()}", "headline"),
            Text(
                f"prompt {self.prompt:,}, {context}batch {self.batch}, "
                f"tp {self.tp}, "
                f"{self.lnc} physical core{'s' * (self.lnc > 1)} each, weights {self.weights}; "
                f"{self.parameters / 1e9:.2f} G parameters"
                + (f", ranks {', '.join(map(str, self.ranks))}" if self.ranks else "")
            ),
            Text(
                f"memory a core: {memory.weight_bytes / gib:.2f} GiB weights + "
                f"{memory.cache_bytes / gib:.2f} cache + {memory.activation_bytes / gib:.2f} "
                f"activations of {memory.capacity_bytes / gib:.0f} GiB: {fits}",
                "plain" if memory.fits else "warning",
            ),
            Text(
                "simulated and computed, nothing measured; the error of a whole pass is that of "
                "predictions of published runs",
                "note",
            ),
        ]
        made += self.waterfall()
        for phase in self.phases:
            gain = f", {self.gain[phase.name]:.2f}x over dense" if self.gain else ""
            title = f"{phase.name}: {_ms(phase.us)} ms{gain}"
            made.append(Section(title, (_lines_of(phase),), folded=True))
        return made

    def waterfall(self) -> list[Part]:
        """Return each phase's steps from bytes to time: a table and bars, with the dense model's
        beside."""
        models = {"": self} if self.dense is None else {"dense": self.dense, "low-rank": self}
        rows: list[tuple[str, ...]] = []
        drawn: list[tuple[str, list[float]]] = []
        nothing = {k: PhaseStep(name=k, us=0.0, sources=(), error_band=(0.0, 0.0)) for k in STEPS}
        for phase in self.phases:
            both = [model.phase(phase.name) or phase for model in models.values()]
            steps = [nothing | {step.name: step for step in one.steps} for one in both]
            for name, each in zip(models, steps, strict=True):
                drawn.append((f"{phase.name} {name}".strip(), [each[k].us / 1e3 for k in STEPS]))
            totals = [_ms(one.us) for one in both]
            rows.append((f"{phase.name}: all", *totals, "100", "", _percent(BANDS[phase.name])))
            for key in STEPS:
                step = steps[-1][key]
                share = f"{100 * step.us / phase.us:.0f}"
                told = (share, ", ".join(step.sources), _percent(step.error_band))
                if any(each[key].us for each in steps):
                    rows.append((f"+ {key}", *(f"{s[key].us / 1e3:.3f}" for s in steps), *told))
        times = tuple(f"{name} ms".strip() for name in models)
        head = ("step", *times, "%", "source", "error")
        chart = bars(drawn, STEPS, "ms", "what takes the time of a pass")
        return [Grid.of(head, rows, right=(*times, "%")), chart]

    def __repr__(self) -> str:
        return f"<ModelPrediction: {self.name}, {self.headline()}>"


REMEDY = 'a larger ratio, larger layers (include=["mlp"]), fewer cores or more tokens would help'
"""What would make low rank pay where it does not."""
_PHASE = {"prefill": "to first token", "decode": "per token", "pass": "a pass"}


def _lines_of(phase: Phase) -> Grid:
    """Return the table of a phase's lines; modules are named within their layer."""
    rows = [
        (line.calls, f"{line.each_us:.1f}", f"{line.us / 1e3:.3f}",
         f"{100 * line.us / phase.us:.0f}", line.kind,
         f"{line.source} {_percent(line.error_band)}",
         f"{line.module.rpartition('*.')[2]}: {line.what}")
        for line in sorted(phase.lines, key=lambda line: -line.us)
    ]  # fmt: skip
    right = ("calls", "us each", "ms", "%")
    return Grid.of((*right, "kind", "source, error", "what"), rows, right)


def _percent(band: tuple[float, float]) -> str:
    return f"{100 * band[0]:+.0f} to {100 * band[1]:+.0f} %"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"
