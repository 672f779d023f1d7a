"""The low-rank paper's table for whole models: what MLP factors gain, and over which baseline.

    python benchmarks/paper_table.py [--models llama-3.2-1b,...] [--targets trn1] [--ratios .05]
        [--prompts 128,2048] [--contexts 512,4096,32768] [--batches 1,8,32] [--tps 1,4] [--fp8]

Columns: MLP kernels in decode and in prefill, a token, the first token, each over our strongest
dense kernels; then over a model whose dense MLP products are blocked as in AWS's NKI tutorial; and
the limit that the bytes of the weights allow a token. All simulated. The paper claims 1.66x end to
end in version 3 (four models, ratio 0.2) and 1.21x in version 4 (six models, ratio 0.05), kernels
1.35x, on one trn1 core.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.prediction import predict as prediction
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.plan import layer_gains
from nmm_compiler.prediction.prices import PAIR_BARRIER_US, Machine, Price, price
from nmm_compiler.prediction.walk import Piece
from nmm_compiler.simulator.run import ArraySpec, simulate

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
DENSE = f"{Path(__file__).parent / 'kernels_nki' / 'dense_blocked.py'}:dense_blocked"
MOST_TOKENS = 512  # what is longer repeats it, as the tutorial's blocks do


@functools.cache
def tutorial_us(m: int, k: int, n: int, target: str) -> float:
    """Return the simulated microseconds of one dense product as the tutorial blocks it."""
    if m > MOST_TOKENS:
        return m / MOST_TOKENS * tutorial_us(MOST_TOKENS, k, n, target)
    a, b = ArraySpec((k, m), "bfloat16"), ArraySpec((k, n), "bfloat16")
    profile = simulate(DENSE, a, b, target=target, mode="timing").profile
    assert profile is not None
    return float(profile.latency_us)


def tutorial_price(piece: Piece, machine: Machine) -> Price:
    """Return the price of a piece where dense MLP products are the tutorial's kernel."""
    if piece.kind != "kernel" or ".mlp" not in piece.module:
        return price(piece, machine)
    products: tuple[KernelSpec, ...] = tuple(
        one for spec in piece.ways[-1] for one in spec.as_products()[1]
    )
    us = 0.0
    for spec in products:
        assert isinstance(spec, MatmulSpec)
        part = -(-spec.n // machine.lnc)
        us += tutorial_us(spec.m, spec.k, part, machine.target.name)
        us += PAIR_BARRIER_US if machine.lnc > 1 else 0.0
    return Price(us, "simulated", "as the tutorial", len(products))


def tutorial(model: str, target: str, **setting: Any) -> ModelPrediction:
    """Return the dense model with the tutorial's MLP products."""
    with mock.patch.object(prediction, "price", tutorial_price):
        return prediction.predict(model, target, **setting)


def weight_limit(low: ModelPrediction) -> float:
    """Return what a token would gain if it took the time of its weight bytes alone."""
    assert low.dense is not None
    return low.dense.memory.weight_bytes / low.memory.weight_bytes


def main() -> int:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    lists = {"models": ",".join(MODELS), "targets": "trn1,trn2,trn3", "ratios": "0.05,0.1,0.2",
             "prompts": "2048", "contexts": "4096", "batches": "1", "tps": "1"}  # fmt: skip
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default, type=lambda text: text.split(","))
    parser.add_argument("--fp8", action="store_true", help="float8_e4m3 matrices on trn2 and trn3")
    given = parser.parse_args()
    print("| model | target | tp | batch | prompt | context | ratio | MLP decode | MLP prefill "
          "| token | first token | token, tutorial | first, tutorial | weight limit |")  # fmt: skip
    print("| --- |" + " ---: |" * 13)
    grid = itertools.product(*(getattr(given, name) for name in (
        "models", "targets", "tps", "batches", "prompts", "contexts")))  # fmt: skip
    for model, target, tp, batch, prompt, context in grid:
        setting = {"tp": int(tp), "batch": int(batch), "prompt": int(prompt),
                   "context": int(context)}  # fmt: skip
        weights = "float8_e4m3" if given.fp8 else None
        try:
            base = tutorial(model, target, **setting)
            for ratio in map(float, given.ratios):
                low = prediction.predict(
                    model, target, ratio=ratio, include=["mlp"], weights=weights, **setting
                )
                print(_row(low, base), flush=True)
        except NmmError as error:
            print(f"{model} {target} {setting}: {error}", file=sys.stderr)
    return 0


def _row(low: ModelPrediction, base: ModelPrediction) -> str:
    assert low.tpot_us is not None
    assert base.tpot_us is not None
    layers = [layer_gains(low, name).get("mlp", 0.0) for name in ("decode", "prefill")]
    gains = [*layers, low.gain["decode"], low.gain["prefill"],
             base.tpot_us / low.tpot_us, base.ttft_us / low.ttft_us, weight_limit(low)]  # fmt: skip
    cells = [low.name, low.target, low.tp, low.batch, low.prompt, low.context, low.ratio]
    return f"| {' | '.join(map(str, cells))} | " + " | ".join(f"{g:.2f}x" for g in gains) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
