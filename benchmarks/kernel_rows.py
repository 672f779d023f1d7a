"""The rows of `make bench-kernels`: one shape on one target, predicted by the simulator.

A `Row` is a kernel of this project, its roofline and what other ways to compute the same take. The
bars that a row must hold are here too; kernels.py runs the rows and prints them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from kernel_timings import digest, rooms, templates, timings_of

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.choose import choose
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
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
# lowrank: the up (or gate) and the down projection. gated: gate and up in one, and the whole MLP.
LOWRANK = ("up", "down")
GATED = ("gated", "mlp")
TOKENS = (1, 16, 128, 512, 1024, 2048, 4096)
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


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure: a part of a model's MLP, for m tokens."""

    target: str
    model: str
    part: str
    m: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table; times in microseconds, without kernel start and stop.

    instructions: in the program that the NKI compiler sees, its Python loops unrolled. turned_us:
    the kernel when x arrives m x k and must be turned. others_us: what else computes the same.
    """

    job: Job
    spec: str
    schedule: str
    latency_us: float
    roofline_us: float
    bytes_over_minimal: float
    mfu: float
    mbu: float
    dma_over_tensor: float
    transposes: int
    instructions: int
    build_seconds: float
    turned_us: float
    turned_transposes: int
    others_us: dict[str, float]

    @property
    def ratio(self) -> float:
        """Roofline over latency."""
        return self.roofline_us / self.latency_us

    def over(self, other: str) -> float:
        """How many times longer another way takes."""
        return self.others_us[other] / self.latency_us

    @property
    def reads_once(self) -> bool:
        """Whether the bar is on HBM bytes; else on DMA time, where weights are read again.

        Of the whole MLP at 1024 tokens an 8B model's intermediates fill SBUF twice over.
        """
        return self.job.m <= (512 if self.job.part == "mlp" else 1024)

    @property
    def misses(self) -> list[str]:
        """The bars this row misses; trn1, which no NKI of today compiles for, has none."""
        if self.job.target == "trn1":
            return []
        missed = []
        wanted = ratio_bar(self.job.m, self.roofline_us)
        if self.ratio < wanted:
            missed.append(f"roofline {self.ratio:.3f} < {wanted}")
        if self.reads_once and self.bytes_over_minimal > BYTES_BAR:
            missed.append(f"HBM bytes {self.bytes_over_minimal:.2f} > {BYTES_BAR}")
        if not self.reads_once and self.dma_over_tensor > DMA_BAR:
            missed.append(f"DMA / TensorE {self.dma_over_tensor:.2f} > {DMA_BAR}")
        if self.transposes:
            missed.append(f"{self.transposes} transposes")
        if self.others_us.get("NeuronMM", math.inf) < self.latency_us:
            missed.append("slower than NeuronMM")
        if self.job.part in LOWRANK and self.job.m > 1 and self.build_seconds > BUILD_BAR:
            missed.append(f"built in {self.build_seconds:.1f} s")
        return missed


BYTES_BAR, DMA_BAR, BUILD_BAR = 1.10, 0.60, 3.0
SHORT_US = 45  # kernels with a roofline below this have the bar of the `small` rows


def ratio_bar(m: int, roofline_us: float) -> float:
    """Return the least share of the roofline that a kernel of m tokens must reach."""
    if m >= 512:
        return 0.90
    return 0.85 if roofline_us >= SHORT_US else 0.80


def rank(k: int, n: int) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, to the nearest tile of 128."""
    return 128 * round(k * n * (1 - RATIO) / ((k + n) * 128))


def spec_of(job: Job, x_layout: str = "col") -> Any:
    """Return what the kernel computes; layouts are those of a model whose transposes are gone."""
    hidden, intermediate = MODELS[job.model]
    if job.part in LOWRANK:
        k, n = (hidden, intermediate) if job.part == "up" else (intermediate, hidden)
        return LowRankSpec(m=job.m, k=k, r=rank(k, n), n=n, x_layout=x_layout)
    r = rank(hidden, intermediate)
    common: dict[str, Any] = {"m": job.m, "k": hidden, "n": intermediate, "r": r}
    if job.part == "gated":
        return GatedMLPUpSpec(**common, x_layout=x_layout, out_layout="col")
    return GatedMLPSpec(**common, x_layout=x_layout)


def measured(path: Path, job: Job) -> Row:
    """Return the row of a job from the file, if nothing that decides it changed, else measured.

    These are the templates, the simulator, the schedules chosen for both layouts of x, and the
    other kernels.
    """
    timings = timings_of(path)
    specs = [spec_of(job), spec_of(job, "row")]
    chosen = [timings.choose(spec, job.target).schedule.to_dict() for spec in specs]
    texts = [Path(one.partition(":")[0]).read_text(encoding="utf-8") for one in (DENSE, NEURONMM)]
    folder = FAMILIES[specs[0].family].folder
    parts = rooms(), templates(folder), templates("lowrank"), chosen, texts, get(job.target)
    held = timings.of(
        digest("row", dataclasses.asdict(job), [spec.to_dict() for spec in specs], *parts),
        lambda: dataclasses.asdict(measure(job)),
    )
    return Row(**{**held, "job": Job(**held["job"])})


def measure(job: Job) -> Row:
    """Build the kernel, without any cache, and simulate it and its rivals."""
    spec = spec_of(job)
    start = time.process_time()
    kernel = build_kernel(spec, job.target, options=Options(cache="off"))
    seconds = time.process_time() - start
    profile = kernel.profile()
    turned = build_kernel(spec_of(job, "row"), job.target, options=Options(cache="off")).profile()
    moved = profile.hbm_read_bytes + profile.hbm_write_bytes
    return Row(
        job=job,
        spec=spec.short(),
        schedule=kernel.schedule.short(),
        latency_us=profile.latency_us,
        roofline_us=spec.roofline_us(get(job.target)),
        bytes_over_minimal=moved / spec.minimal_hbm_bytes(),
        mfu=profile.mfu,
        mbu=profile.mbu,
        dma_over_tensor=profile.engine_busy_us["dma"] / profile.engine_busy_us["tensor"],
        transposes=sum(profile.transposes.values()),
        instructions=profile.program_instructions,
        build_seconds=seconds,
        turned_us=turned.latency_us,
        turned_transposes=sum(turned.transposes.values()),
        others_us=(_rivals if job.part in LOWRANK else _separate)(job, spec),
    )


def _rivals(job: Job, spec: LowRankSpec) -> dict[str, float]:
    """Return the latency of three kernels of the benchmark for the same product."""
    m, k, r, n = spec.m, spec.k, spec.r, spec.n
    blocks = next(b for bound, b in NEURONMM_BLOCKS if m <= bound)
    names = ("k_in_block", "r_in_block", "m_in_block", "n_in_block")
    chain = dict(zip(names, blocks, strict=True))
    return {
        "dense": _latency(DENSE, job.target, [(k, m), (k, n)]),
        "two": _latency(DENSE, job.target, [(k, r), (k, m)])
        + _latency(DENSE, job.target, [(r, m), (r, n)]),
        "NeuronMM": _latency(NEURONMM, job.target, [(k, m), (k, r), (r, n)], chain),
    }


def _separate(job: Job, spec: GatedMLPUpSpec) -> dict[str, float]:
    """Return the latency of one lowrank kernel per projection, without what joins them."""
    total = 0.0
    for branch in spec.branches:
        first, last = spec.ends(branch)
        part = LowRankSpec(m=spec.m, k=first, r=spec.rank(branch), n=last, x_layout="col")
        total += choose(part, job.target)[0].simulated_us or 0.0
    return {"separate": total}


def _latency(
    kernel: str, target: str, shapes: list[tuple[int, int]], blocks: dict[str, int] | None = None
) -> float:
    arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
    run = simulate(kernel, *arrays, target=target, mode="timing", strict=False, **(blocks or {}))
    assert run.profile is not None
    return float(run.profile.latency_us)
