"""The result of a compression as frozen records: per layer, and in total.

`CompressionReport` prints as a table, turns into JSON, and is drawn by `plot.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nmm_compiler.records import Record
from nmm_compiler.report.charts import Bar, Series, bars, lines
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown


@dataclass(frozen=True, kw_only=True)
class Skipped(Record):
    """A layer that was left alone: its stored weight shape, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class LayerReport(Record):
    """One linear [n, k] after compression.

    rank: None when it was kept dense; `note` says why.
    weight_error: |W - W_r|_F / |W|_F of the factors as stored (rounded to their dtype).
    output_error: the same in the calibration's norm, |(W - W_r) X|_F / |W X|_F: the relative error
        of the layer's output over the calibration tokens; None without calibration.
    theory_error: the minimized error by the method's theorem, before rounding.
    solver: "eigh", or "randomized" where a sketch was proved to be enough; excess is the proved
        bound on the share by which its squared error exceeds the optimum.
    counted: whether the ratio is over this matrix, too; not where it had to stay dense.
    """

    name: str
    k: int
    n: int
    rank: int | None
    weight_error: float | None = None
    output_error: float | None = None
    theory_error: float | None = None
    solver: str = ""
    excess: float = 0.0
    counted: bool = True
    note: str = ""

    @property
    def dense_parameters(self) -> int:
        """Elements of the dense weight."""
        return self.k * self.n

    @property
    def parameters(self) -> int:
        """Elements now kept: r (k + n), or k n when dense."""
        return self.k * self.n if self.rank is None else self.rank * (self.k + self.n)

    @property
    def removed(self) -> int:
        """Elements that were removed; none where the factors are no smaller."""
        return max(0, self.dense_parameters - self.parameters)

    @property
    def ratio(self) -> float:
        """Share of this matrix's elements that was removed."""
        return 1 - self.parameters / self.dense_parameters


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressionReport(Shown, Record):
    """The result of `compress`.

    ratio: the share of parameters (or of predicted time, by `budget`) asked to be removed, None
        when ranks were given;
    `achieved_ratio` is over the same matrices: those listed in `layers` that are `counted`.
    model_parameters_before / _after: of the whole model, tied parameters once.
    cost_before / _after: predicted microseconds of these products, when a cost model was given.
    """

    method: str
    allocation: str
    budget: str
    align: int
    ratio: float | None
    layers: tuple[LayerReport, ...]
    skipped: tuple[Skipped, ...] = ()
    model_parameters_before: int = 0
    model_parameters_after: int = 0
    calibration_tokens: int = 0
    cost_before: float | None = None
    cost_after: float | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def compressed(self) -> tuple[LayerReport, ...]:
        """The layers that are low-rank now."""
        return tuple(layer for layer in self.layers if layer.rank is not None)

    @property
    def achieved_ratio(self) -> float:
        """Share of the parameters of the counted matrices that was removed."""
        counted = [layer for layer in self.layers if layer.counted]
        before = sum(layer.dense_parameters for layer in counted)
        return 1 - sum(layer.parameters for layer in counted) / before if before else 0.0

    @property
    def model_ratio(self) -> float:
        """Share of the whole model's parameters that was removed."""
        if not self.model_parameters_before:
            return 0.0
        return 1 - self.model_parameters_after / self.model_parameters_before

    def ranks(self) -> dict[str, int]:
        """Return {name: rank} of the low-rank layers: what `compress(rank=...)` takes."""
        return {layer.name: layer.rank for layer in self.layers if layer.rank is not None}

    def summary(self) -> str:
        """Return one line: the ratio asked for and reached, ranks and errors."""
        asked = "explicit ranks" if self.ratio is None else f"ratio {self.ratio:g} asked"
        if self.budget == "latency":
            asked = f"{self.ratio:g} of the predicted time asked"
        calibrated = (
            f", {self.calibration_tokens} calibration tokens" if self.calibration_tokens else ""
        )
        predicted = (
            f", predicted {self.cost_before:.1f} -> {self.cost_after:.1f} us"
            if self.cost_before is not None and self.cost_after is not None
            else ""
        )
        return (
            f"compressed {len(self.compressed)} of {len(self.layers)} matrices: {asked}, "
            f"{self.achieved_ratio:.3f} of their parameters removed "
            f"({self.model_ratio:.3f} of the model); method {self.method}, {self.allocation} "
            f"ranks in multiples of {self.align}{calibrated}{predicted}, {self.seconds:.1f} s"
        )

    def page_parts(self) -> list[Part]:
        """Return the summary, charts of rank and error per layer, then the table."""
        summary, *table = self.parts()
        ranks = [
            Bar(layer.name, (float(layer.parameters), float(layer.removed)))
            for layer in self.layers
        ]
        errors = [
            Series(name, tuple((float(i), float(value)) for i, value in enumerate(values)
                               if value is not None))
            for name, values in (
                ("weight error", [layer.weight_error for layer in self.layers]),
                ("output error", [layer.output_error for layer in self.layers]),
            )
        ]  # fmt: skip
        errors = [series for series in errors if series.points]
        charts: list[Part] = []
        if errors:
            text = "relative error of each layer, in the order of the table"
            charts.append(lines(errors, "layer", "relative error", text))
        if self.layers:
            text = "parameters kept and removed of each layer"
            charts.append(bars(ranks, ("kept", "removed"), "parameters", text))
        return [summary, *charts, *table]

    def __repr__(self) -> str:
        return f"<CompressionReport: {self.summary()}>"

    def parts(self) -> list[Part]:
        """Return the summary, then the tables of layers and of skipped layers."""
        rows = [
            (
                layer.name,
                f"{layer.n} x {layer.k}",
                "dense" if layer.rank is None else layer.rank,
                f"{layer.ratio:.3f}",
                _figure(layer.weight_error),
                _figure(layer.output_error),
                layer.note,
            )
            for layer in self.layers
        ]
        rows += [
            (skip.name, " x ".join(map(str, skip.shape)), "-", "-", "-", "-", skip.reason)
            for skip in self.skipped
        ]
        figures = ("n x k", "rank", "removed", "weight", "output")
        return [
            Line(self.summary(), "headline"),
            Grid.of(("layer", *figures, "note"), rows, right=figures),
            Line("weight, output: relative error of the weight, and of the output over calibration",
                 "note"),
        ]  # fmt: skip


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
