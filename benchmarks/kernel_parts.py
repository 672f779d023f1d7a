"""The parts of `make bench-kernels` that are rows of one figure against one bar.

    dense    matmul beside AWS's tutorial blocking and the roofline, k to 53,248, n to 151,936
    small    kernels whose roofline is below 45 us, against it and against their dependent phases
    fp8      one token in fp8 against the roofline
    gated    the dense gated kernel, or its products one by one where these are faster
    search   the chosen schedule against the best of all candidates of the family

Times are predicted by the simulator and kept in a file (kernel_timings.py), so that a run goes on
where one ended. Each part is a list of jobs; a job gives a Line, which holds or misses its bar.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kernel_floors import arithmetic, floor_us, least_us
from kernel_timings import Timings, timings_of
from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen.choose import rank
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.targets import get

DENSE_FILE = Path(__file__).parent / "kernels_nki" / "dense_blocked.py"


@dataclass(frozen=True)
class Line:
    """One row: a figure, its bar, whether it holds, and what the figure is made of."""

    part: str
    target: str
    name: str
    us: float
    figure: float
    wanted: float
    held: bool
    note: str


@dataclass(frozen=True)
class Job:
    """A spec to judge as one part does."""

    part: str
    target: str
    spec: KernelSpec


def _dense_specs() -> list[KernelSpec]:
    shapes = [
        (2048, 8192), (8192, 2048), (4096, 14336), (14336, 4096), (2560, 9728), (9728, 2560),
        (4096, 4096), (4096, 1024), (2048, 2048),
    ]  # fmt: skip
    made = [
        MatmulSpec(m=m, k=k, n=n, x_layout="col")
        for k, n in shapes
        for m in (1, 16, 128, 256, 512, 1024, 2048)
    ]
    large = [(2048, 151936), (16384, 53248), (53248, 16384)]
    made += [MatmulSpec(m=m, k=k, n=n, x_layout="col") for k, n in large for m in (1, 128, 512)]
    return made


def _small_specs() -> list[KernelSpec]:
    made: list[KernelSpec] = []
    few = ((256, (2048,)), (128, (512,)), (128, (512,)))
    wide = ((256, (4096,)), (128, (1024,)), (128, (1024,)))
    for m in (1, 16, 100, 128, 333, 512):
        made += [
            MatmulSpec(m=m, k=2048, n=512, x_layout="col"),
            LowRankSpec(m=m, k=2048, r=256, n=2048, x_layout="col"),
            LowRankSpec(m=m, k=1024, r=128, n=1024, x_layout="col"),
            LowRankSpec(m=m, k=1024, r=128, n=1024, x_layout="col", dtype="float32"),
            LowRankSpec(m=m, k=1021, r=127, n=1021, x_layout="col"),
            LowRankSharedSpec(m=m, k=2048, pairs=few, x_layout="col"),
            LowRankSharedSpec(m=m, k=4096, pairs=wide, x_layout="col"),
            LowRankSpec(m=m, k=4096, r=16, n=4096, x_layout="col"),
            LowRankSpec(m=m, k=2048, r=1, n=2048, x_layout="col"),
            GatedMLPSpec(m=m, k=1024, n=2048, r=256, x_layout="col"),
        ]
    for m in (1, 16, 128):
        made += [
            MatmulSpec(m=m, k=2048, n=2048, x_layout="col"),
            LowRankSpec(m=m, k=2048, r=16, n=2048, base=True, x_layout="col"),
            LowRankSpec(m=m, k=2048, r=512, n=2048, x_layout="col", dtype="float32"),
        ]
    made.append(LowRankSpec(m=17, k=1021, r=61, n=509, x_layout="col"))
    made.append(LowRankSpec(m=101, k=509, r=31, n=1021, x_layout="col"))
    return made


def _fp8_specs() -> list[KernelSpec]:
    common: dict[str, Any] = {"dtype": "float8_e4m3", "scales": "channel", "x_layout": "col"}
    made: list[KernelSpec] = []
    for k, n, r in ((2048, 8192, 1280), (4096, 14336, 2560), (8192, 2048, 1280)):
        made.append(LowRankSpec(m=1, k=k, r=r, n=n, **common))
        made.append(MatmulSpec(m=1, k=k, n=n, **common))
    return made


def _search_specs() -> list[KernelSpec]:
    fp8: dict[str, Any] = {"dtype": "float8_e4m3", "scales": "channel", "x_layout": "col"}
    return [
        LowRankSpec(m=1, k=2048, r=1280, n=8192, x_layout="col"),
        LowRankSpec(m=128, k=2048, r=1280, n=8192, x_layout="col"),
        LowRankSpec(m=512, k=2048, r=512, n=2048, x_layout="col"),
        LowRankSpec(m=128, k=4096, r=16, n=4096, x_layout="col"),
        LowRankSpec(m=333, k=2048, r=256, n=2048, x_layout="col"),
        LowRankSpec(m=17, k=1021, r=61, n=509, x_layout="col"),
        LowRankSpec(m=1, k=2048, r=1280, n=8192, **fp8),
        MatmulSpec(m=128, k=2048, n=8192, **fp8),
        MatmulSpec(m=256, k=6144, n=2048, x_layout="col"),
        GatedMLPUpSpec(m=16, k=2048, n=4096, x_layout="col", out_layout="col"),
        GatedMLPSpec(m=128, k=1024, n=2048, r=256, x_layout="col"),
        LowRankSharedSpec(
            m=128, k=2048, pairs=((256, (2048,)), (128, (512,)), (128, (512,))), x_layout="col"
        ),
    ]


def _gated_specs() -> list[KernelSpec]:
    common: dict[str, Any] = {"x_layout": "col", "out_layout": "col"}
    return [
        GatedMLPUpSpec(m=m, k=k, n=n, **common)
        for k, n in ((4096, 14336), (2048, 8192))
        for m in (1, 16, 128, 512)
    ]


SPECS = {
    "dense": _dense_specs,
    "small": _small_specs,
    "fp8": _fp8_specs,
    "gated": _gated_specs,
    "search": _search_specs,
}


PHASES_SHARE = 0.90
LARGEST_RIVAL = 7e10  # the tutorial's kernels are unrolled: a simulation of more takes a minute


def dense(spec: Any, target: str, timings: Timings) -> Line:
    """Hold matmul to the roofline, or nine tenths of its phases, and to the tutorial's blocking."""
    m, k, n = (getattr(spec, name) for name in "mkn")
    line = _of_bounds("dense", spec, target, timings, 0.92 if m >= 512 else 0.90, PHASES_SHARE)
    if m * k * n >= LARGEST_RIVAL:
        return line
    rival = timings.file_us(DENSE_FILE, "dense_blocked", target, [(k, m), (k, n)])
    note = f"tutorial {rival / line.us:.2f}x; {line.note}"
    return replace(line, held=line.held and line.us <= rival, note=note)


def small(spec: Any, target: str, timings: Timings) -> Line:
    """Hold a small kernel to the roofline, or to its phases, which wait for one another."""
    roofline, floor = spec.roofline_us(get(target)), floor_us(spec, target)
    bars = (0.80 if bound > 12 else 0.65 for bound in (roofline, floor))
    return _of_bounds("small", spec, target, timings, *bars)


def fp8(spec: Any, target: str, timings: Timings) -> Line:
    """Hold one token in fp8 to the roofline, or to its phases, as a dense row.

    On trn3 the phases of a rank of 1280 alone take the roofline over 0.85.
    """
    return _of_bounds("fp8", spec, target, timings, 0.85, PHASES_SHARE)


def _of_bounds(
    part: str, spec: Any, target: str, timings: Timings, wanted: float, of_phases: float
) -> Line:
    """Hold a kernel to a share of the roofline, or to one of its phases.

    Raises ValueError if it takes less than no kernel can: then the phases are wrong.
    """
    us, roofline = timings.us(spec, target), spec.roofline_us(get(target))
    floor, least = floor_us(spec, target), least_us(spec, target)
    if us < least:
        raise ValueError(f"{spec.short()} on {target} takes {us:.2f} us, its floor {least:.2f} us")
    held = roofline / us >= wanted or floor / us >= of_phases
    note = (
        f"phases {arithmetic(spec, target)} = {floor:.1f} us: {floor / us:.2f}; least {least:.1f}"
    )
    return Line(part, target, spec.short(), us, roofline / us, wanted, held, note)


def gated(spec: KernelSpec, target: str, timings: Timings) -> Line:
    """Hold the dense gated kernel to its two products, run one by one, and what joins them.

    That is an elementwise product: two results are read again and one is written.
    """
    us = timings.us(spec, target)
    parts = spec.as_products()[0]
    joined = 3e6 * spec.output.bytes / get(target).memory_bytes_per_second
    apart = sum(timings.us(one, target) for one in parts) + joined
    note = f"products one by one {apart:.1f} us, of these {joined:.1f} us to join them"
    return Line("gated", target, spec.short(), us, apart / us, 1.0, apart >= us, note)


def search(spec: KernelSpec, target: str, timings: Timings) -> Line:
    """Hold the chosen schedule to the best of all candidates; an odd shape has more than two."""
    chip = get(target)
    us = timings.us(spec, target)
    every = [timings.timed(spec, one.schedule, chip)[0] for one in rank(spec, chip)]
    best = min(us, *every)
    held = us <= 1.02 * best and len(every) > 2
    note = f"best of {len(every)} candidates {min(every):.1f} us"
    return Line("search", target, spec.short(), us, us / best, 1.02, held, note)


JUDGES = {"dense": dense, "small": small, "fp8": fp8, "gated": gated, "search": search}


def judge(path: Path, job: Job) -> Line:
    """Return the line of a job."""
    return JUDGES[job.part](job.spec, job.target, timings_of(path))


def run_parts(
    console: Console,
    parts: Sequence[str],
    targets: Sequence[str],
    workers: int,
    path: Path,
) -> bool:
    """Print the lines of the parts; return whether all of them hold."""
    jobs = [
        Job(part, target, spec) for part in parts for target in targets for spec in SPECS[part]()
    ]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        lines = list(pool.imap(partial(judge, path), jobs))
    for part in parts:
        for target in targets:
            _show(console, part, [ln for ln in lines if (ln.part, ln.target) == (part, target)])
    missed = sum(not line.held for line in lines)
    console.print(f"{len(lines)} rows, {missed} missed")
    return not missed


def _show(console: Console, part: str, lines: list[Line]) -> None:
    table = Table(title=f"{part} on {lines[0].target}; predicted by the simulator")
    for name in ("kernel", "us", "figure", "wanted", "", "made of"):
        table.add_column(name)
    for line in lines:
        table.add_row(
            line.name, f"{line.us:.1f}", f"{line.figure:.3f}", f"{line.wanted:.2f}",
            "ok" if line.held else "MISS", line.note,
        )  # fmt: skip
    console.print(table)
