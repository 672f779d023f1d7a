"""Times the backward passes of low-rank layers beside those of dense ones, all in the simulator.

    python benchmarks/backward.py

A row is a layer of Llama-3.2-1B. Low rank: the launches that `torch.ops.nmm.lowrank_matmul` makes
for dx, du and dv, as autograd makes them under a kernel executor, one after the other. Dense: the
products dx = dy w^T and dw = x^T dy, by our `matmul` kernels. "p kept" leaves out the launch that
computes x u again. "LoRA" rows have a frozen dense weight beside the factors; dense is then dx of
that weight alone, which is no layer to gain over. Starts and stops of kernels are left out. Share
is the rooflines of the launches over their times. Exits with 1 where a product of a roofline of
100 us and more takes longer than 1 / 0.9 of it; a product below that is mostly its first load and
last store.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

import nmm_compiler.runtime.executor  # noqa: F401  (registers the executors)
from nmm_compiler.codegen.choose import choose
from nmm_compiler.ops.backward_calls import backward_calls
from nmm_compiler.ops.lower import lower, tokens
from nmm_compiler.targets import get

# name, input features, output features, rank at a fifth fewer parameters
LAYERS = [
    ("q, o", 2048, 2048, 768),
    ("k, v", 2048, 512, 384),
    ("gate, up", 2048, 8192, 1280),
    ("down", 8192, 2048, 1280),
    ("gate, up", 2048, 8192, 512),
    ("down", 8192, 2048, 512),
]
LORA = [("q, o", 2048, 2048, 16), ("gate, up", 2048, 8192, 16)]
LEAST_SHARE = 0.9
LONG_US = 100.0  # us of a roofline


@dataclass(frozen=True)
class Row:
    """A layer: its name, tokens, input features, output features, rank; lora: beside a frozen w."""

    name: str
    m: int
    k: int
    n: int
    r: int
    lora: bool = False


def specs_of(name: str, args: tuple[Any, ...], target: str, **keywords: Any) -> list[Any]:
    """Return the specs that the backward pass of an op call launches."""
    kwargs = {"executor": "simulator", "target": target, **keywords}
    found = []
    for op, operands, given in backward_calls(name, args, kwargs)[0]:
        lowered = lower(op, operands, given, int(tokens(operands[0], given)))
        found += [launch.spec for launch in lowered.launches]
    return found


def empty(*shape: int, grad: bool = True) -> torch.Tensor:
    """Return a bf16 tensor without data."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def times_us(specs: list[Any], target: str) -> list[float]:
    """Return the simulated time of each spec's kernel."""
    return [float(choose(spec, target)[0].simulated_us or 0.0) for spec in specs]


def main() -> int:
    """Print the rows; return 1 where a bar is not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--tokens", default="512,2048", help="of a step, comma separated")
    given = parser.parse_args()
    counts = [int(word) for word in given.tokens.split(",")]
    chip, missed = get(given.target), 0
    rows = [Row(name, m, *sizes) for m in counts for name, *sizes in LAYERS]
    rows += [Row(name, m, *sizes, lora=True) for m in counts for name, *sizes in LORA]
    print(
        f"{'layer':14s} {'tokens':>6s} {'k':>5s} {'n':>5s} {'r':>5s} {'launches':>8s} "
        f"{'low rank':>9s} {'p kept':>8s} {'dense':>8s} {'gain':>7s} {'share':>6s}"
    )
    for row in rows:
        x, u, v = empty(row.m, row.k), empty(row.r, row.k), empty(row.n, row.r)
        stored = {"u_layout": "col", "v_layout": "col"}
        w = empty(row.n, row.k, grad=False)
        base = (None, w) if row.lora else ()
        more = {"w_layout": "col"} if row.lora else {}
        specs = specs_of("lowrank_matmul", (x, u, v, *base), given.target, **stored, **more)
        dense = specs_of(
            "matmul", (x, w if row.lora else w.requires_grad_()), given.target, w_layout="col"
        )
        each, of_dense = times_us(specs, given.target), sum(times_us(dense, given.target))
        again = [
            us for spec, us in zip(specs, each, strict=True)
            if (spec.family, spec.m, spec.k, spec.n) == ("matmul", row.m, row.k, row.r)
        ]  # fmt: skip
        kept = sum(each) - again[0]  # where k is n, p and q are alike
        bounds = [spec.roofline_us(chip) for spec in specs]
        share = sum(bounds) / sum(each)
        bad = any(
            spec.family == "matmul" and bound >= LONG_US and us * LEAST_SHARE > bound
            for spec, bound, us in zip(specs, bounds, each, strict=True)
        )
        missed += bad
        gain = "-" if row.lora else f"{of_dense / sum(each):.2f}x"
        name = f"{row.name}{', LoRA' if row.lora else ''}"
        print(
            f"{name:14s} {row.m:6d} {row.k:5d} {row.n:5d} {row.r:5d} {len(specs):8d} "
            f"{sum(each):9.1f} {kept:8.1f} {of_dense:8.1f} {gain:>7s} "
            f"{share:6.2f}{'  MISSED' if bad else ''}",
            flush=True,
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
