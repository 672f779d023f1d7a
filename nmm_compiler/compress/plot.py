"""A picture of a compression: rank and error per layer, as a PNG."""

from __future__ import annotations

from pathlib import Path

from nmm_compiler.compress.report import CompressionReport
from nmm_compiler.errors import MissingPackageError

_BAR_INCHES = 0.22


def plot_report(report: CompressionReport, path: str | Path) -> Path:
    """Draw rank (as a share of the break-even rank) and relative errors per layer; return the path.

    Raises MissingPackageError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError("matplotlib", "the plot of a compression", "plot") from None
    layers = report.layers
    names = [layer.name for layer in layers]
    places = list(range(len(layers)))
    figure = Figure(figsize=(11, 2.2 + _BAR_INCHES * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)

    kept = [1 - layer.ratio for layer in layers]
    colors = ["0.75" if layer.rank is None else "tab:blue" for layer in layers]
    left.barh(places, kept, color=colors)
    for place, layer in zip(places, layers, strict=True):
        text = "dense" if layer.rank is None else f"rank {layer.rank}"
        left.text(
            0.01, place, text, va="center", fontsize=7, color="white" if layer.rank else "0.2"
        )
    left.set_xlim(0, 1.02)
    left.set_xlabel("parameters kept")
    left.set_yticks(places, names, fontsize=7)
    left.set_ylim(len(layers) - 0.4, -0.6)

    right.plot([layer.weight_error or 0.0 for layer in layers], places, "o", label="weight")
    if any(layer.output_error is not None for layer in layers):
        errors = [layer.output_error or 0.0 for layer in layers]
        right.plot(errors, places, "s", label="output, over the calibration tokens")
    right.set_xlim(left=0)
    right.set_xlabel("relative error")
    right.grid(axis="x", alpha=0.3)
    right.legend(fontsize=8)
    asked = "explicit ranks" if report.ratio is None else f"ratio {report.ratio:g}"
    figure.suptitle(
        f"{asked}, {report.achieved_ratio:.3f} of the parameters removed; {report.method}, "
        f"{report.allocation} ranks in multiples of {report.align}",
        fontsize=10,
    )
    path = Path(path)
    figure.savefig(path, format="png", dpi=120)
    return path
