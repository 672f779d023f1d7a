"""Predicted time at m + 1 tokens against m: no token may cost more than a tenth of the kernel.

By default the borders: small m and the neighbours of multiples of 128 and 512. --every takes every
m from 1 to 1,100. Every figure is predicted by the simulator's timing model; nothing is measured.
Lines go to --out as they come (JSON, one a line), and a second run takes from there what is decided
as it was (what_decides.py).

Usage: python benchmarks/kernel_cliffs.py [--targets trn2,trn3] [--families lowrank,...] [--every]
       [--out out/kernel_cliffs.jsonl] [--workers 2]
Exit code 1 when a step is over the bar.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import what_decides

from nmm_compiler.codegen.choose import choose
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
    """Return m whose next token is likely to cost: small ones, and the ends of whole tiles."""
    small = {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96}
    ends = {m + d for m in range(128, LAST, 128) for d in (-1, 0, 1)}
    return sorted(m for m in small | ends if m <= LAST)


def predict(job: tuple[str, str, int]) -> tuple[tuple[str, str, int], float]:
    """Return a job, (family, target, tokens), and the microseconds of its kernel."""
    name, target, m = job
    kind, fields = SHAPES[name]
    return job, choose(kind(m=m, **fields), target)[0].simulated_us or 0.0


def code(name: str, target: str) -> str:
    """Return the digest of what decides the figures of a family on a target."""
    kind, fields = SHAPES[name]
    return what_decides.digest(
        repr(sorted(fields.items())), what_decides.templates(kind(m=1, **fields).family),
        what_decides.simulator(), what_decides.machine(target),
    )  # fmt: skip


def known(path: Path) -> dict[tuple[str, str, int], float]:
    """Return what earlier runs predicted and what is decided as it was."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(n, t, m): us for n, t, m, us, of in lines if n in SHAPES and of == code(n, t)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default="trn2,trn3")
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/kernel_cliffs.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    sizes = list(range(1, LAST + 1)) if given.every else borders()
    series = [(f, t) for f in given.families.split(",") for t in given.targets.split(",")]
    held = known(given.out)
    wanted = {(f, t, m) for f, t in series for at in sizes for m in (at, at + 1)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        given.out.open("a", encoding="utf-8") as file,
        multiprocessing.get_context("spawn").Pool(given.workers) as pool,
    ):
        for job, us in pool.imap_unordered(predict, sorted(wanted - held.keys())):
            held[job] = us
            file.write(json.dumps([*job, us, code(*job[:2])]) + "\n")
            file.flush()
    missed = 0
    for family, target in series:
        steps = {m: held[family, target, m + 1] / held[family, target, m] for m in sizes}
        over = [m for m in sizes if steps[m] > BAR]
        worst = max(sizes, key=lambda m: steps[m])
        missed += len(over)
        print(
            f"{family} on {target}: {len(sizes)} steps, the worst {steps[worst]:.3f} from m "
            f"{worst} ({held[family, target, worst]:.1f} us); {len(over)} over {BAR}"
            + "".join(f" {m}:{steps[m]:.2f}" for m in over)
        )
    print("ok" if not missed else f"{missed} steps are over {BAR}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
