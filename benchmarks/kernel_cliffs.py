"""Predicted time at m + 1 tokens against m: no token may cost more than a tenth of the kernel.

By default the borders: small m, the neighbours of multiples of 128, and 64 beyond them.
--every takes every m from 1 to 1,100. Every figure is predicted by the simulator's timing model;
nothing is measured. Times are kept in --out as they come, and a second run takes them from there.

Usage: python benchmarks/kernel_cliffs.py [--targets trn2,trn3] [--families lowrank,...] [--every]
       [--out out/kernel_timings.jsonl] [--workers 2]
Exit code 1 when a step is over the bar.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from functools import partial
from pathlib import Path
from typing import Any

from kernel_timings import FILE, timings_of
from rich.console import Console

from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec

BAR = 1.10
LAST = 1100
SHAPES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "lowrank": (LowRankSpec, {"k": 2048, "r": 512, "n": 2048, "x_layout": "col"}),
    "lowrank turned": (LowRankSpec, {"k": 2048, "r": 512, "n": 2048}),
    "matmul": (MatmulSpec, {"k": 2048, "n": 2048, "x_layout": "col"}),
    "lowrank_shared": (
        LowRankSharedSpec,
        {"k": 2048, "pairs": ((256, (2048,)), (128, (512,)), (128, (512,))), "x_layout": "col"},
    ),
    "gated_mlp_up": (
        GatedMLPUpSpec,
        {"k": 2048, "n": 4096, "r": 512, "x_layout": "col", "out_layout": "col"},
    ),
    "gated_mlp": (GatedMLPSpec, {"k": 2048, "n": 4096, "r": 512, "x_layout": "col"}),
}


def borders() -> list[int]:
    """Return m whose next token is likely to cost: small ones, and those about whole tiles."""
    small = {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96}
    ends = {m + d for m in range(128, LAST, 128) for d in (-1, 0, 1, 2, 64)}
    return sorted(m for m in small | ends if m <= LAST)


def predict(job: tuple[str, str, int], path: Path) -> tuple[tuple[str, str, int], float]:
    """Return a job, (family, target, tokens), and the microseconds of its kernel."""
    name, target, m = job
    kind, fields = SHAPES[name]
    return job, timings_of(path).us(kind(m=m, **fields), target)


def run_cliffs(
    console: Console,
    families: list[str],
    targets: list[str],
    *,
    every: bool,
    workers: int,
    path: Path,
) -> bool:
    """Print the worst step of each family and target; return whether all hold."""
    sizes = list(range(1, LAST + 1)) if every else borders()
    series = [(f, t) for f in families for t in targets]
    wanted = sorted({(f, t, m) for f, t in series for at in sizes for m in (at, at + 1)})
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        held = dict(pool.imap_unordered(partial(predict, path=path), wanted, chunksize=4))
    missed = 0
    for family, target in series:
        steps = {m: held[family, target, m + 1] / held[family, target, m] for m in sizes}
        over = [m for m in sizes if steps[m] > BAR]
        worst = max(sizes, key=lambda m: steps[m])
        missed += len(over)
        console.print(
            f"{family} on {target}: {len(sizes)} steps, the worst {steps[worst]:.3f} from m "
            f"{worst} ({held[family, target, worst]:.1f} us); {len(over)} over {BAR}"
            + "".join(f" {m}:{steps[m]:.2f}" for m in over)
        )
    console.print("cliffs: ok" if not missed else f"cliffs: {missed} steps are over {BAR}")
    return not missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default="trn2,trn3")
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    held = run_cliffs(
        Console(), given.families.split(","), given.targets.split(","), every=given.every,
        workers=given.workers, path=given.out,
    )  # fmt: skip
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
