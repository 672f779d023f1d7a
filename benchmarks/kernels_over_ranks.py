"""`make bench-ranks`: a low-rank product shared by the cores of a tensor-parallel group.

Every figure is predicted by the simulator's timing model; nothing here is measured. The sum over
the ranks takes what is published for all-reduces of so many bytes and ranks (trn2: 15.1 us for
8 KiB and 183 us for 16 MiB on 4 ranks, 17.6 and 185 us on 64; `Target.collective_points`), without
the wait for late ranks. Per shape: each way of sharing as one kernel, and as kernels with the
collective between them; one core for comparison.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.prices.kernel import simulated_us
from nmm_compiler.prices.ways import rank_ways

# Row-parallel and column-parallel linears: k, r, n.
SHAPES = {
    "llama-3.2-1b down": (8192, 1280, 2048),
    "llama-3.2-1b up": (2048, 1280, 8192),
    "llama-3.1-8b down": (14336, 2560, 4096),
    "llama-3.1-8b o": (4096, 1664, 4096),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--m", default="1,512")
    parser.add_argument("--tp", default="4")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    given = parser.parse_args()
    table = Table(title=f"one of so many ranks on {given.target}, bf16, us; "
                        "predicted by the simulator")  # fmt: skip
    head = ("shape", "m", "ranks", "one core", "axis", "one kernel", "apart",
            "KiB summed")  # fmt: skip
    for name in head:
        table.add_column(name, justify="left" if name in ("shape", "axis") else "right")
    for name in given.shapes.split(","):
        k, r, n = SHAPES[name]
        for m in map(int, given.m.split(",")):
            whole = LowRankSpec(m=m, k=k, r=r, n=n)
            alone = simulated_us(whole, given.target)
            for tp in map(int, given.tp.split(",")):
                for axis, way in rank_ways(whole, tp, given.target).items():
                    summed = whole.sharded(tp, axis).exchanged_bytes() / 1024
                    table.add_row(
                        name, str(m), str(tp), f"{alone:.1f}", axis, f"{way.fused:.1f}",
                        f"{way.separate:.1f}", f"{summed:.0f}",
                    )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
