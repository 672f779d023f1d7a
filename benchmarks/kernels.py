"""`make bench-kernels`: the lowrank kernel over MLP shapes of six models, against three others.

Every figure is predicted by the simulator's timing model; nothing here is measured. Per shape and
target: latency, roofline (the larger of TensorE time and the time of the minimal HBM traffic),
their ratio, HBM bytes over the minimum, MFU and MBU, DMA time over TensorE time, instructions, and
how many times longer it takes with

    (a) one dense matmul, blocked as in AWS's tutorial
    (b) two of those, the intermediate through HBM
    (c) NeuronMM's algorithm

all in kernels_nki/. Kernel start and stop, which a linked graph does not pay, is printed apart.
Exit code 1 when a bar is missed.

With --dtype float8_e4m3: the same shapes in fp8 against bf16, as lowrank kernels with the
intermediate in bf16 and in fp8, and as one dense matmul; scales per channel.

Usage: python benchmarks/kernels.py [--targets trn2,trn3] [--models Llama-3.2-1B] [--m 1,512]
       [--json FILE] [--dtype float8_e4m3]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

HERE = Path(__file__).parent / "kernels_nki"
DENSE = f"{HERE / 'dense_blocked.py'}:dense_blocked"
NEURONMM = f"{HERE / 'neuronmm_chain.py'}:neuronmm_chain"

# (hidden, intermediate) of the models' public configurations.
MODELS = {
    "Llama-3.2-1B": (2048, 8192),
    "Llama-3.2-3B": (3072, 8192),
    "Llama-3.1-8B": (4096, 14336),
    "Qwen3-1.7B": (2048, 6144),
    "Qwen3-4B": (2560, 9728),
    "Qwen3-8B": (4096, 12288),
}
TOKENS = (1, 16, 128, 512, 2048, 4096)
RATIO = 0.2

# NeuronMM's tiles per block for (k, r, tokens, n), by token count (its table for the x^T kernel).
NEURONMM_BLOCKS = (
    (255, (8, 2, 1, 4)),
    (511, (4, 2, 2, 4)),
    (512, (4, 4, 4, 4)),
    (1023, (4, 2, 4, 4)),
    (1024, (4, 4, 8, 1)),
    (math.inf, (4, 2, 8, 4)),
)


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds, without kernel start and stop."""

    target: str
    model: str
    part: str
    m: int
    k: int
    r: int
    n: int
    latency_us: float
    roofline_us: float
    bytes_over_minimal: float
    mfu: float
    mbu: float
    dma_over_tensor: float
    transposes: int
    instructions: int
    dense_us: float
    separate_us: float
    neuronmm_us: float
    build_seconds: float

    @property
    def ratio(self) -> float:
        return self.roofline_us / self.latency_us

    @property
    def bars(self) -> list[str]:
        """What this row misses; trn1 is shown without bars."""
        if self.target == "trn1":
            return []
        missed = []
        wanted = 0.90 if self.m >= 512 else 0.85
        if self.ratio < wanted:
            missed.append(f"roofline {self.ratio:.3f} < {wanted}")
        if self.m <= 1024 and self.bytes_over_minimal > 1.10:
            missed.append(f"HBM bytes {self.bytes_over_minimal:.2f} > 1.10")
        if self.m > 1024 and self.dma_over_tensor > 0.60:
            missed.append(f"DMA / TensorE {self.dma_over_tensor:.2f} > 0.60")
        if self.transposes:
            missed.append(f"{self.transposes} transposes")
        if self.neuronmm_us < self.latency_us:
            missed.append("slower than NeuronMM")
        return missed


def rank(k: int, n: int) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, to the nearest tile of 128."""
    return 128 * round(k * n * (1 - RATIO) / ((k + n) * 128))


def measure(target: str, model: str, part: str, m: int) -> Row:
    hidden, intermediate = MODELS[model]
    k, n = (hidden, intermediate) if part == "up" else (intermediate, hidden)
    spec = LowRankSpec(m=m, k=k, r=rank(k, n), n=n, x_layout="col")
    start = time.perf_counter()
    kernel = build_kernel(spec, target, options=Options(cache="off"))
    seconds = time.perf_counter() - start
    profile = kernel.profile()
    moved = profile.hbm_read_bytes + profile.hbm_write_bytes
    blocks = next(b for bound, b in NEURONMM_BLOCKS if m <= bound)
    names = ("k_in_block", "r_in_block", "m_in_block", "n_in_block")
    return Row(
        target=target,
        model=model,
        part=part,
        m=m,
        k=k,
        r=spec.r,
        n=n,
        latency_us=profile.latency_us,
        roofline_us=spec.roofline_us(get(target)),
        bytes_over_minimal=moved / spec.minimal_hbm_bytes(),
        mfu=profile.mfu,
        mbu=profile.mbu,
        dma_over_tensor=profile.engine_busy_us["dma"] / profile.engine_busy_us["tensor"],
        transposes=sum(profile.transposes.values()),
        instructions=count(profile.instructions),
        dense_us=dense(target, (k, m), (k, n)),
        separate_us=dense(target, (k, spec.r), (k, m)) + dense(target, (spec.r, m), (spec.r, n)),
        neuronmm_us=latency(
            NEURONMM, target, [(k, m), (k, spec.r), (spec.r, n)], zip(names, blocks, strict=True)
        ),
        build_seconds=seconds,
    )


# Heading, dtype and intermediate of the columns of --dtype float8_e4m3; the first is the measure.
FORMATS = (
    ("bf16", "bfloat16", "operand"),
    ("fp8", "float8_e4m3", "operand"),
    ("fp8, p fp8", "float8_e4m3", "float8_e4m3"),
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
    for heading, dtype, kept in FORMATS:
        shared = {"m": m, "k": k, "n": n, "dtype": dtype, "x_layout": "col"}
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


def dense(target: str, a: tuple[int, int], b: tuple[int, int]) -> float:
    return latency(DENSE, target, [a, b], ())


def latency(kernel: str, target: str, shapes: list[tuple[int, int]], blocks: Any) -> float:
    arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
    run = simulate(kernel, *arrays, target=target, mode="timing", strict=False, **dict(blocks))
    assert run.profile is not None
    return float(run.profile.latency_us)


def count(instructions: Any) -> int:
    """Return the sum over engines and ops."""
    if isinstance(instructions, dict):
        return sum(count(value) for value in instructions.values())
    return int(instructions)


def show(console: Console, rows: list[Row], target: str) -> None:
    chip = get(target)
    table = Table(
        title=f"lowrank on {chip}, bf16, ratio {RATIO}, x passed as k x m; predicted by the "
        f"simulator; kernel start and stop ({1e6 * chip.kernel_start_stop_seconds:.0f} us) apart"
    )
    table.add_column("model")
    table.add_column("part")
    for name in ("m", "r", "us", "roofline us", "ratio", "HBM x min", "MFU", "MBU", "DMA/TensorE",
                 "instr", "(a) dense", "(b) two", "(c) NeuronMM"):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("misses")
    for row in rows:
        table.add_row(
            row.model, row.part, str(row.m), str(row.r), f"{row.latency_us:.1f}",
            f"{row.roofline_us:.1f}", f"{row.ratio:.3f}", f"{row.bytes_over_minimal:.2f}",
            f"{100 * row.mfu:.0f} %", f"{100 * row.mbu:.0f} %", f"{row.dma_over_tensor:.2f}",
            str(row.instructions), f"{row.dense_us / row.latency_us:.2f}x",
            f"{row.separate_us / row.latency_us:.2f}x",
            f"{row.neuronmm_us / row.latency_us:.2f}x", "; ".join(row.bars),
        )  # fmt: skip
    console.print(table)


def summary(rows: list[Row]) -> tuple[list[str], bool]:
    """Return lines of means and extremes per target, and whether every bar holds."""
    lines, good = [], True
    for target in dict.fromkeys(row.target for row in rows):
        mine = [row for row in rows if row.target == target]
        large = [row.ratio for row in mine if row.m >= 512]
        small = [row.ratio for row in mine if row.m < 512]
        over_a = [row.dense_us / row.latency_us for row in mine]
        over_b = [row.separate_us / row.latency_us for row in mine]
        over_c = [row.neuronmm_us / row.latency_us for row in mine]
        mean_a, mean_c = sum(over_a) / len(mine), sum(over_c) / len(mine)
        ratios = ""
        if large:
            ratios += f" least ratio m >= 512: {min(large):.3f};"
        if small:
            ratios += f" m <= 128: {min(small):.3f};"
        lines.append(
            f"{target}:{ratios} over (a) mean {mean_a:.2f}x max {max(over_a):.2f}x; over (b) mean "
            f"{sum(over_b) / len(mine):.2f}x; over (c) mean {mean_c:.2f}x least "
            f"{min(over_c):.2f}x; slowest build {max(r.build_seconds for r in mine):.1f} s; rows "
            f"with a missed bar: {sum(bool(r.bars) for r in mine)} of {len(mine)}"
        )
        if target != "trn1":
            good &= not any(row.bars for row in mine)
            good &= mean_a >= 1.35 and max(over_a) >= 2.22 and mean_c >= 1.15
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", help="trn1,trn2,trn3 unless --dtype is fp8")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float8_e4m3"), default="bfloat16")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 190)
    if given.dtype == "float8_e4m3":
        return main_formats(console, given)
    rows: list[Row] = []
    for target in (given.targets or "trn1,trn2,trn3").split(","):
        for model in given.models.split(","):
            for part in ("up", "down"):
                rows += [measure(target, model, part, int(m)) for m in given.m.split(",")]
        show(console, [row for row in rows if row.target == target], target)
    lines, good = summary(rows)
    for line in lines:
        console.print(line, soft_wrap=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if good else 1


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


if __name__ == "__main__":
    sys.exit(main())
