"""The table of `benchmarks/kernels.py --families shared`: q, k and v of one x as one kernel.

Every figure is predicted by the simulator's timing model; nothing here is measured. Per shape and
target: latency and its share of the roofline, HBM bytes over the minimum, and against one kernel
for each of q, k and v: their latencies added up, and the HBM bytes saved in reads of x. Kernel
start and stop, which three launches pay three times, is left out of both.

small ranks are 256, 128 and 128; ratio 0.2 keeps 80 % of the parameters, to whole tiles of 128.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.options import Options
from nmm_compiler.targets import get

# hidden size, and outputs of q and of k and v each, of the models' public configurations
ATTENTION = {
    "Llama-3.2-1B": (2048, (2048, 512, 512)),
    "Llama-3.2-3B": (3072, (3072, 1024, 1024)),
    "Llama-3.1-8B": (4096, (4096, 1024, 1024)),
    "Qwen3-1.7B": (2048, (2048, 1024, 1024)),
    "Qwen3-4B": (2560, (4096, 1024, 1024)),
    "Qwen3-8B": (4096, (4096, 1024, 1024)),
}
RANKS = {
    "small": lambda k, n: 256 if n >= k else 128,
    "ratio 0.2": lambda k, n: 128 * round(k * n * 0.8 / ((k + n) * 128)),
}


@dataclass(frozen=True)
class SharedRow:
    """One line of the table; times in microseconds, without kernel start and stop."""

    target: str
    model: str
    ranks: str
    m: int
    pairs: str
    latency_us: float
    roofline_us: float
    bytes_over_minimal: float
    apart_us: float
    x_reads_saved: float

    @property
    def ratio(self) -> float:
        return self.roofline_us / self.latency_us

    @property
    def misses(self) -> list[str]:
        wanted = 0.90 if self.m >= 512 else 0.85
        missed = [f"roofline {self.ratio:.3f} < {wanted}"] if self.ratio < wanted else []
        if self.latency_us > self.apart_us:
            missed.append("slower than three kernels")
        if self.x_reads_saved < 2.0:
            missed.append(f"{self.x_reads_saved:.2f} reads of x saved")
        return missed


def measure(target: str, model: str, ranks: str, m: int) -> SharedRow:
    k, outputs = ATTENTION[model]
    pairs = tuple((RANKS[ranks](k, n), (n,)) for n in outputs)
    spec = LowRankSharedSpec(m=m, k=k, pairs=pairs, x_layout="col")
    options = Options(cache="off")
    one = build_kernel(spec, target, options=options).profile()
    apart = [build_kernel(part, target, options=options).profile() for part, _ in spec.parts()]
    moved = one.hbm_read_bytes + one.hbm_write_bytes
    moved_apart = sum(p.hbm_read_bytes + p.hbm_write_bytes for p in apart)
    return SharedRow(
        target=target,
        model=model,
        ranks=ranks,
        m=m,
        pairs=" ".join(f"{r}:{n}" for r, (n,) in pairs),
        latency_us=one.latency_us,
        roofline_us=spec.roofline_us(get(target)),
        bytes_over_minimal=moved / spec.minimal_hbm_bytes(),
        apart_us=sum(p.latency_us for p in apart),
        x_reads_saved=(moved_apart - moved) / (2 * m * k),
    )


def main_shared(console: Console, given: Namespace) -> int:
    """Print the table; exit code 1 when a row is slower than three kernels or reads x again."""
    rows: list[SharedRow] = []
    for target in (given.targets or "trn2").split(","):
        table = Table(title=f"lowrank_shared on {get(target)}, bf16, x as k x m; predicted")
        for name in ("model", "ranks", "pairs"):
            table.add_column(name)
        for name in ("m", "us", "roofline us", "ratio", "HBM x min", "three us", "x reads saved"):
            table.add_column(name, justify="right")
        table.add_column("misses")
        for model in given.models.split(","):
            for ranks in RANKS:
                for m in map(int, given.m.split(",")):
                    row = measure(target, model, ranks, m)
                    rows.append(row)
                    table.add_row(
                        model, ranks, row.pairs, str(m), f"{row.latency_us:.1f}",
                        f"{row.roofline_us:.1f}", f"{row.ratio:.3f}",
                        f"{row.bytes_over_minimal:.2f}", f"{row.apart_us:.1f}",
                        f"{row.x_reads_saved:.2f}", "; ".join(row.misses),
                    )  # fmt: skip
        console.print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.latency_us > row.apart_us or row.x_reads_saved < 2.0 for row in rows))


if __name__ == "__main__":
    sys.exit("run: python benchmarks/kernels.py --families shared")
