"""The result of a compression as frozen records: per layer, and in total.

`CompressionReport` prints as a table and turns into JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.records import Record
from nmm_compiler.report.headline import headline, not_told
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown

_COLUMNS = (
    "weight, output: relative error of the weight, and of the output over calibration; "
    "us: predicted share of the layer's call, dense and now"
)
REMEDY = "a larger ratio, larger layers alone (include=), or more tokens a call would help"


@dataclass(frozen=True, kw_only=True)
class Skipped(Record):
    """A layer that was left alone: its stored weight shape, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Timed(Record):
    """The selected layers in one kind of pass: tokens a call, its weight in the mix, predictions.

    dense_us, us: microseconds of all their calls in one pass, before and after compression.
    """

    name: str
    tokens: int
    weight: float
    dense_us: float
    us: float

    @property
    def gain(self) -> float:
        """How many times faster than dense the calls are; 1.0 where there are none."""
        return self.dense_us / self.us if self.us else 1.0

    def __str__(self) -> str:
        tokens = f"{self.tokens:,} token{'s' * (self.tokens != 1)}"
        share = f", weight {self.weight:.2g}" if self.weight < 1 else ""
        gain = f" ({self.gain:.2f}x)" if self.us else ""
        return f"{self.name} of {tokens}{share}: {self.dense_us:,.1f} -> {self.us:,.1f} us{gain}"


@dataclass(frozen=True, kw_only=True)
class LayerReport(Record):
    """One linear [n, k] after compression.

    rank: None when it was kept dense; `note` says why.
    weight_error: |W - W_r|_F / |W|_F of the factors as stored (rounded to their dtype).
    output_error: the same in the calibration's norm, |(W - W_r) X|_F / |W X|_F: the relative error
        of the layer's output over the calibration tokens; None without calibration.
    base: the format of the weight beside the factors, "" without one; a rank of 0 is it alone.
    bytes: what its matrices take as stored, with scales.
    counted: whether the ratio is over this matrix, too; not where it had to stay dense.
    dense_us, us: its share of its call's predicted time, before and after, in the mix of workloads;
        a call of several layers is shared out by their parameters.
    """

    name: str
    k: int
    n: int
    rank: int | None
    weight_error: float | None = None
    output_error: float | None = None
    base: str = ""
    bytes: int = 0
    counted: bool = True
    note: str = ""
    dense_us: float | None = None
    us: float | None = None

    @property
    def dense_parameters(self) -> int:
        """Elements of the dense weight."""
        return self.k * self.n

    @property
    def parameters(self) -> int:
        """Elements now kept: r (k + n), or k n when dense; with a base, those of 16 bits that take
        as many bytes."""
        if self.base:
            return self.bytes // 2
        return self.k * self.n if self.rank is None else self.rank * (self.k + self.n)

    @property
    def slower(self) -> bool:
        """Whether its call would be faster with it dense."""
        return bool(self.rank) and (self.us or 0.0) > (self.dense_us or 0.0)

    @property
    def ratio(self) -> float:
        """Share of this matrix's elements that was removed; with a base, of its bytes."""
        return 1 - self.parameters / self.dense_parameters


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressionReport(Shown, Record):
    """The result of `compress`.

    ratio: the share of parameters asked to be removed, None when ranks were given;
    `achieved_ratio` is over the same matrices: those listed in `layers` that are `counted`.
    model_parameters_before / _after: of the whole model, tied parameters once.
    target: what times are predicted for.
    workload: predicted times of all calls of the layers, for each kind of pass; empty for a dtype
        without kernels. source: of these times, one of `prices.kernel.PRICES`. priced: how layers
        were priced, where not by the calls of the backend, or that no kernel reads the base.
    factors: their format of eight bits, "" for floats. base: that of the weights beside them, ""
        without; `ratio` and `achieved_ratio` are then over bytes, of the weights in 16 bits.
    model_bytes_before / _after: of all parameters and buffers of the model, tied ones once.
    whole: (quality) -> the sentence on the whole model, or why there is none; it takes seconds.
    """

    method: str
    allocation: str
    align: int
    ratio: float | None
    layers: tuple[LayerReport, ...]
    skipped: tuple[Skipped, ...] = ()
    model_parameters_before: int = 0
    model_parameters_after: int = 0
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    calibration_tokens: int = 0
    target: str = ""
    workload: tuple[Timed, ...] = ()
    priced: str = ""
    source: str = ""
    factors: str = ""
    base: str = ""
    seconds: float = field(default=0.0, compare=False)
    whole: Any = field(default=None, repr=False, compare=False)

    @property
    def compressed(self) -> tuple[LayerReport, ...]:
        """The layers that are low-rank, or quantized, now."""
        return tuple(layer for layer in self.layers if layer.rank is not None)

    @property
    def achieved_ratio(self) -> float:
        """Share of the parameters of the counted matrices that was removed."""
        counted = [layer for layer in self.layers if layer.counted]
        before = sum(layer.dense_parameters for layer in counted)
        return 1 - sum(layer.parameters for layer in counted) / before if before else 0.0

    @property
    def model_ratio(self) -> float:
        """Share of the whole model's parameters that was removed; with a base, of its bytes."""
        before, after = self.model_parameters_before, self.model_parameters_after
        if self.base:
            before, after = self.model_bytes_before, self.model_bytes_after
        return 1 - after / before if before else 0.0

    @property
    def slower(self) -> tuple[LayerReport, ...]:
        """The layers whose calls low rank makes slower (allow_slower=True)."""
        return tuple(layer for layer in self.layers if layer.slower)

    def headline(self, quality: str = "") -> str:
        """Return what low rank gains: in the whole model where it is known, else in its layers.

        quality: in words; default is the mean error of the layers' outputs.
        """
        errors = [layer.output_error for layer in self.layers if layer.output_error is not None]
        mean = "quality not judged: no calibration"
        if errors:
            mean = f"outputs of the layers off by {sum(errors) / len(errors):.1%} in the mean"
        quality = quality or mean
        said, reason = ("", "") if self.whole is None else self.whole(quality)
        if said:
            return said
        gains = [(t.gain, f"in {t.name} of {t.tokens:,} tokens") for t in self.workload]
        if gains:
            where = f"in these layers ({self.source}) on {self.target}"
            error = ERRORS[self.source]
            verdict = headline(gains, where, error=error, quality=quality, remedy=REMEDY)
        else:
            unpriced = "no time is predicted for this base or dtype"
            verdict = f"{self.priced or unpriced}; {quality}"
        return verdict + (f" (the whole model is not predicted: {reason})" if reason else "")

    def ranks(self) -> dict[str, int]:
        """Return {name: rank} of the low-rank layers: what `compress(rank=...)` takes."""
        return {layer.name: layer.rank for layer in self.layers if layer.rank is not None}

    def summary(self) -> str:
        """Return one line: the ratio asked for and reached, ranks and errors."""
        asked = "explicit ranks" if self.ratio is None else f"ratio {self.ratio:g} asked"
        stored = f", base of {self.base}" if self.base else ""
        stored += f", factors of {self.factors}" if self.factors else ""
        return (
            f"compressed {len(self.compressed)} of {len(self.layers)} matrices: {asked}, "
            f"{self.achieved_ratio:.3f} of them removed ({self.model_ratio:.3f} of the model); "
            f"method {self.method}, {self.allocation} ranks in multiples of {self.align}{stored}, "
            f"{self.seconds:.1f} s"
        )

    def __repr__(self) -> str:
        return f"<CompressionReport: {self.summary()}>"

    def parts(self) -> list[Part]:
        """Return the summary, what the calls of the layers take, which layers are slower than
        dense, then the table of layers and of skipped layers."""
        shown: list[Part] = [Line(self.summary(), "headline")]
        if self.source:
            shown.append(Line(self.headline(), "headline"))
        for one in self.workload:
            near = not_told(one.gain, ERRORS[self.source], "dense")
            where = f"on one physical core of {self.target}, {self.source}"
            shown.append(Line(f"the layers' calls {where}: {near}{one}"))
        if self.priced:
            shown.append(Line(self.priced, "warning"))
        if self.slower:
            names = ", ".join(layer.name for layer in self.slower)
            shown.append(Line(f"made slower than dense, as asked: {names}", "warning"))
        rows = [
            (
                layer.name,
                f"{layer.n} x {layer.k}",
                "dense" if layer.rank is None else layer.rank,
                f"{layer.ratio:.3f}",
                _figure(layer.weight_error),
                _figure(layer.output_error),
                _figure(layer.dense_us, 1),
                _figure(layer.us, 1),
                layer.note,
            )
            for layer in self.layers
        ]
        rows += [
            (skip.name, " x ".join(map(str, skip.shape)), *"------", skip.reason)
            for skip in self.skipped
        ]
        head = ("layer", "n x k", "rank", "removed", "weight", "output", "dense us", "us", "note")
        # without columns that say nothing in any row; a terminal is narrow
        kept = [i for i in range(len(head)) if not rows or {row[i] for row in rows} - {"", "-"}]
        told = [[row[i] for i in kept] for row in rows]
        table = Grid.of([head[i] for i in kept], told, right=head[1:-1])
        return [*shown, table, Line(_COLUMNS, "note")]


def _figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
