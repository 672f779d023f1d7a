"""Experts and adapters, timed in the simulator: `make bench-grouped`.

Experts stand beside the time of their bytes at the full rate; adapters beside the base alone, and
beside base, shrink and expand as kernels of their own.
"""

from __future__ import annotations

import sys

from nmm_compiler.codegen.choose import choose
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.kernels.linear import AdaptersSpec, MatmulSpec
from nmm_compiler.targets import get

GPT_OSS = {
    "k": 2880, "groups": 32, "top_k": 4, "gate_up_bias": True, "down_bias": True, "limit": 7.0,
    "slope": 1.702, "plus": 1.0, "halves": "interleaved",
}  # fmt: skip
EXPERTS = {
    "gpt-oss-20b": GPT_OSS | {"n": 2880},
    "gpt-oss-20b / 4": GPT_OSS | {"n": 720},
    "Qwen3-30B-A3B": {"k": 2048, "n": 768, "groups": 128, "top_k": 8},
    "Qwen3-30B-A3B / 4": {"k": 2048, "n": 192, "groups": 128, "top_k": 8},
}
LAYERS = {
    "1B q": (2048, 2048), "1B up": (2048, 8192), "8B q": (4096, 4096), "8B up": (4096, 14336),
    "8B down": (14336, 4096), "gpt-oss q": (2880, 4096),
}  # fmt: skip


def us(spec, target: str) -> float:
    """Return the simulated microseconds of a kernel."""
    return float(choose(spec, target)[0].simulated_us or 0.0)


def main(target: str = "trn2", quick: bool = False) -> None:
    """Print both tables; quick: a part of each."""
    tokens = (1, 8) if quick else (1, 8, 32)
    print(f"experts on {target}, simulated, one core: us, share of the bytes' time")
    print(f"{'layer':20} {'tokens':>6} {'experts':>8} {'us':>9} {'share':>6}  schedule")
    for name, fields in list(EXPERTS.items())[: 2 if quick else None]:
        for m in tokens if quick else (*tokens, 512):
            spec = ExpertsSpec(m=m, **fields)
            best = choose(spec, target)[0]
            share = spec.roofline_us(get(target)) / (best.simulated_us or 1.0)
            row = f"{name:20} {m:6} {spec.expected:8.1f} {best.simulated_us:9.1f} {share:6.2f}"
            print(f"{row}  {best.schedule.short()}", flush=True)
    print(f"\nadapters on {target}, simulated, one core: over the base, and over three kernels")
    print(
        f"{'layer':10} {'tokens':>6} {'adapters':>8} {'rank':>5} {'us':>9} {'base':>6} {'three':>6}"
    )
    for name, (k, n) in list(LAYERS.items())[2 : 3 if quick else None] if quick else LAYERS.items():
        for m in tokens:
            base = us(MatmulSpec(m=m, k=k, n=n), target)
            for groups, r in ((1, 16), (4, 16), (8, 16), (32, 16), (8, 8), (8, 64)):
                time = us(AdaptersSpec(m=m, k=k, n=n, r=r, groups=groups), target)
                stacked = min(groups, m) * r
                apart = base + us(MatmulSpec(m=m, k=k, n=stacked), target)
                apart += us(MatmulSpec(m=m, k=stacked, n=n), target)
                ratios = f"{time / base:6.3f} {time / apart:6.3f}"
                print(f"{name:10} {m:6} {groups:8} {r:5} {time:9.1f} {ratios}", flush=True)


if __name__ == "__main__":
    main(*[one for one in sys.argv[1:] if one != "--quick"], quick="--quick" in sys.argv)
