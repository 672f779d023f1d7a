"""`python benchmarks/kernels.py --dtype float8_e4m3`: the same shapes in fp8 against bf16.

As lowrank kernels with x in bf16 or fp8 and the intermediate in bf16 or fp8, and as one dense
matmul; scales per channel. Everything is predicted by the simulator.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from kernel_rows import MODELS, rank
from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.targets import get

# Heading, dtype, intermediate and dtype of x of the columns of --dtype float8_e4m3; the first is
# the measure. "fp8, x bf16" is what compress(factors="float8_e4m3") runs.
FORMATS: tuple[tuple[str, str, str, str | None], ...] = (
    ("bf16", "bfloat16", "operand", None),
    ("fp8, x bf16", "float8_e4m3", "operand", "bfloat16"),
    ("fp8", "float8_e4m3", "operand", None),
    ("fp8, p fp8", "float8_e4m3", "float8_e4m3", None),
)


@dataclass(frozen=True)
class FormatRow:
    """One shape in several number formats: (latency, roofline) in microseconds for each."""

    target: str
    model: str
    what: str
    m: int
    times_us: dict[str, tuple[float, float]]


def formats(target: str, model: str, part: str, m: int) -> list[FormatRow]:
    """Predict the factored and the dense projection of one shape in each format."""
    hidden, intermediate = MODELS[model]
    k, n = (hidden, intermediate) if part == "up" else (intermediate, hidden)
    factored: dict[str, tuple[float, float]] = {}
    single: dict[str, tuple[float, float]] = {}
    for heading, dtype, kept, of_x in FORMATS:
        shared = {"m": m, "k": k, "n": n, "dtype": dtype, "x_layout": "col", "x_dtype": of_x}
        if dtype == "float8_e4m3":
            shared["scales"] = "channel"
        lowrank = LowRankSpec(r=rank(k, n), intermediate=kept, **shared)
        factored[heading] = predicted(lowrank, target)
        if kept == "operand":
            single[heading] = predicted(MatmulSpec(**shared), target)
    return [
        FormatRow(target, model, f"{part} factored, r {rank(k, n)}", m, factored),
        FormatRow(target, model, f"{part} dense", m, single),
    ]


def predicted(spec: Any, target: str) -> tuple[float, float]:
    kernel = build_kernel(spec, target, options=Options(cache="off"))
    return kernel.profile().latency_us, spec.roofline_us(get(target))


def show_formats(console: Console, rows: list[FormatRow], target: str) -> None:
    table = Table(
        title=f"fp8 (e4m3, scales per channel) against bf16 on {get(target)}; predicted by the "
        "simulator; ratio: roofline over latency"
    )
    for name in ("model", "projection"):
        table.add_column(name)
    table.add_column("m", justify="right")
    for heading, *_ in FORMATS:
        table.add_column(f"{heading} us", justify="right")
        table.add_column("ratio", justify="right")
        if heading != FORMATS[0][0]:
            table.add_column("faster", justify="right")
    for row in rows:
        cells = [row.model, row.what, str(row.m)]
        base = row.times_us[FORMATS[0][0]][0]
        for heading, *_ in FORMATS:
            if heading not in row.times_us:
                cells += ["", "", ""]
                continue
            latency_us, roofline_us = row.times_us[heading]
            cells += [f"{latency_us:.1f}", f"{roofline_us / latency_us:.3f}"]
            if heading != FORMATS[0][0]:
                cells.append(f"{base / latency_us:.2f}x")
        table.add_row(*cells)
    console.print(table)


def main_formats(console: Console, given: argparse.Namespace) -> int:
    """Print the table of --dtype float8_e4m3."""
    every: list[FormatRow] = []
    for target in (given.targets or "trn2,trn3").split(","):
        rows: list[FormatRow] = []
        for model in given.models.split(","):
            for m in map(int, given.m.split(",")):
                rows += formats(target, model, "up", m)
        show_formats(console, rows, target)
        every += rows
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in every], indent=1))
    return 0
