"""Draws the figures of docs/: `make figures`. Each is made by running what it explains.

The drawings are those of reports, written as files of their own: they carry their colours, light
and dark, and load nothing.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.codegen.check_against_float64 import prove, random_arrays
from nmm_compiler.passes.result import graph_parts
from nmm_compiler.report import charts
from nmm_compiler.report.page import STYLE
from nmm_compiler.report.parts import Drawing

FOLDER = Path(__file__).resolve().parent / "pictures"


def alone(drawing: Drawing) -> str:
    """Return a drawing of a report as an SVG file: with the page's colours, on its paper."""
    light, dark = (
        "".join(re.findall(r"--\w+: #\w+;", block)) for block in STYLE.split("@media print")[0]
        .split("@media (prefers-color-scheme: dark)")
    )  # fmt: skip
    style = (
        f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }} "
        'text { fill: var(--ink); }</style><rect width="100%" height="100%" fill="var(--paper)"/>'
    )
    head, _, body = drawing.svg.partition(">\n")
    return f"{head}>\n{style}\n{body}\n"


def layouts() -> dict[str, Drawing]:
    """Draw two chains between transposes, before and after the rewrite."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = {"a": (64, 8), "b": (8, 96), "c": (96, 8), "d": (8, 64)}
            for name, shape in shapes.items():
                setattr(self, name, nn.Parameter(torch.randn(shape)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu((x.t() @ self.a @ self.b).t())  # [features, tokens]
            return hidden.t() @ self.c @ self.d

    x = torch.randn(64, 4)
    made = nmm.rewrite(Turned(), (x,))
    assert made.transposes_after == 0 < made.transposes_before
    before, after = {}, {}
    for section in graph_parts(made.original, made.graph_module, made.matches):
        first, second = section.parts
        before[section.title], after[section.title] = first, second
    title = next(iter(before))
    return {"layouts-before": before[title], "layouts-after": after[title]}


def data_flow() -> Drawing:
    """Draw what lies on the partitions in the two stages of y = (x u) v."""
    body: list[str] = []

    def box(x: float, y: float, wide: float, high: float, lines: list[str], colour: str) -> None:
        body.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="var({colour})" '
            'opacity="0.18"/>'
            f'<rect x="{x}" y="{y}" width="4" height="{high}" fill="var({colour})"/>'
        )
        for i, text in enumerate(lines):
            body.append(charts.label(x + 12, y + 18 + 16 * i, text))

    def arrow(x1: float, y1: float, x2: float, y2: float) -> None:
        body.append(
            f'<path d="M{x1} {y1}L{x2} {y2}m-7 -4l7 4l-7 4" fill="none" stroke="var(--soft)"/>'
        )

    box(10, 34, 150, 60, ["u, stationary", "k on the partitions", "[k, r]"], "--a")
    box(10, 110, 150, 60, ["x^T, moving", "k on the partitions", "[k, m]"], "--b")
    box(250, 72, 170, 60, ["p^T = (x u)^T", "r on the partitions", "PSUM, then SBUF"], "--c")
    box(510, 34, 200, 60, ["p^T stationary, v moving", "y: m on the partitions", '"row"'], "--d")
    box(510, 110, 200, 60, ["v stationary, p^T moving", "y^T: n on the partitions", '"col"'], "--e")
    for start, stop in (((160, 64), (250, 92)), ((160, 140), (250, 112)), ((420, 92), (510, 64)),
                        ((420, 112), (510, 140))):  # fmt: skip
        arrow(*start, *stop)
    body.append(charts.label(10, 20, "stage 1 sums over k"))
    body.append(charts.label(510, 20, "stage 2 sums over r: no transpose"))
    text = "what lies on the partitions in the two stages of y = (x u) v"
    return Drawing(charts.svg(body, 184, text), text)


Points = Sequence[tuple[float, float]]
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 70, 20, 26, 44


def marks(axis: charts.Axis) -> list[float]:
    """Return the round values within a logarithmic scale."""
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    few = axis.high / axis.low < 100
    found = [part * 10.0**power for power in powers for part in ((1, 2, 5) if few else (1,))]
    return [mark for mark in found if axis.low <= mark <= axis.high]


def lines(series: Mapping[str, Points], x_title: str, y_title: str, text: str) -> Drawing:
    """Return a chart of lines, and of single points, over two logarithmic axes."""
    points = [point for found in series.values() for point in found]
    xs, ys = zip(*points, strict=True)
    x = charts.Axis(min(xs) / 1.2, max(xs) * 1.2, LEFT, charts.WIDTH - RIGHT, log=True)
    y = charts.Axis(min(ys) / 1.2, max(ys) * 1.2, HEIGHT - BOTTOM, TOP, log=True)
    body = []
    for mark in marks(x):
        at = x.at(mark)
        body.append(charts.rule(at, at, y.start, y.stop))
        body.append(charts.label(at, y.start + 16, f"{mark:g}", "middle"))
    for mark in marks(y):
        at = y.at(mark)
        body.append(charts.rule(x.start, x.stop, at, at))
        body.append(charts.label(x.start - 6, at + 4, f"{mark:g}", "end"))
    body.append(charts.label((x.start + x.stop) / 2, HEIGHT - 8, x_title, "middle"))
    turned = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)"'
    body.append(f'<text {turned} text-anchor="middle">{html.escape(y_title)}</text>')
    for (name, found), colour in zip(series.items(), charts.COLOURS, strict=False):
        if len(found) > 1:
            path = " ".join(f"{x.at(a)},{y.at(b)}" for a, b in found)
            body.append(
                f'<polyline points="{path}" fill="none" stroke="var({colour})" stroke-width="2"/>'
            )
        for a, b in found:
            said = html.escape(f"{name}: {x_title} {a:.4g}, {y_title} {b:.4g}")
            body.append(
                f'<circle cx="{x.at(a)}" cy="{y.at(b)}" r="{2.5 if len(found) > 1 else 5}" '
                f'fill="var({colour})"><title>{said}</title></circle>'
            )
    keys, height = charts.legend(list(series), HEIGHT)
    return Drawing(charts.svg([*body, *keys], height, text), text)


def timing() -> dict[str, Drawing]:
    """Draw kernels for more and more tokens on the roofline."""
    kernels: dict[str, tuple[float, float]] = {}
    for m in (1, 16, 128, 512, 2048):
        kernel = nmm.build_kernel(nmm.LowRankSpec(m=m, k=2048, r=512, n=2048))
        profile = kernel.profile()
        moved = profile.hbm_read_bytes + profile.hbm_write_bytes
        kernels[f"m={m}"] = profile.flops / moved, profile.flops * 1e6 / profile.latency_us
    chip = kernel.target
    peak, rate = chip.peak_flops_per_second(), chip.memory_bytes_per_second
    ridge, intensities = peak / rate, [at for at, _ in kernels.values()]
    low, high = min([ridge / 16, *intensities]) / 2, max([ridge * 16, *intensities]) * 2
    series = {"roofline": [(at, min(peak, at * rate) / 1e12) for at in (low, ridge, high)]}
    series |= {name: [(at, flops / 1e12)] for name, (at, flops) in kernels.items()}
    said = "; ".join(
        f"{name} at {flops / 1e12:.1f} TFLOP/s, {at:.0f} FLOPs per byte, "
        f"{'compute' if at >= ridge else 'memory'} side"
        for name, (at, flops) in kernels.items()
    )
    text = f"roofline of {chip.name}, {peak / 1e12:.0f} TFLOP/s, bf16 (simulated): {said}"
    return {"roofline": lines(series, "FLOPs per HBM byte", "TFLOP/s", text)}


def error_bounds() -> Drawing:
    """Draw the largest error of proved kernels over the contraction, and the two derived limits."""
    seen: dict[str, list[tuple[float, float]]] = {"bound": [], "typical": [], "error": []}
    for k in (64, 128, 256, 512, 1024, 2048):
        kernel = nmm.build_kernel(nmm.LowRankSpec(m=16, k=k, r=64, n=128))
        arrays = random_arrays(kernel.spec)
        seen["bound"].append((k, float(np.max(kernel.spec.error_bound(*arrays)))))
        seen["typical"].append((k, float(np.max(kernel.spec.typical_error(*arrays)))))
        seen["error"].append((k, prove(kernel).max_error))
    names = {"bound": "largest elementwise bound", "typical": "largest typical error",
             "error": "largest error in the simulator"}  # fmt: skip
    series = {names[key]: points for key, points in seen.items()}
    text = "bf16 kernels with 16 tokens, rank 64 and 128 outputs, against float64"
    return lines(series, "k, terms of the first sum", "absolute error", text)


def main() -> None:
    """Write every figure."""
    figures = {**layouts(), "data-flow": data_flow(), **timing(), "error-bounds": error_bounds()}
    for name, drawing in figures.items():
        (FOLDER / f"{name}.svg").write_text(alone(drawing), encoding="utf-8")
        print(f"docs/pictures/{name}.svg: {drawing.text}")


if __name__ == "__main__":
    main()
