"""Experts and adapters, timed in the simulator: `make bench-grouped`.

    python benchmarks/grouped.py trn2 --checkout nki-library

Experts stand beside the time of their bytes at the full rate, and beside a clone of
aws-neuron/nki-library: `moe_tkg` for up to 128 tokens (its `moe_block_tkg` is a norm, a router and
a call of it), `moe_cte` for more, which is for two cores. Their features divide by 128, so that
gpt-oss is padded for them, as AWS does, and for us in the same row. Then their times with weights
of few bits, and the share of the time of those bytes. Adapters stand beside the base alone, and
beside base, shrink and expand as kernels of their own. Exits with 1 where experts take more than
1.05 of the library's time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from nmm_compiler.codegen.choose import choose
from nmm_compiler.errors import KernelFailedError, SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.kernels.linear import AdaptersSpec, MatmulSpec
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

GPT_OSS: dict[str, Any] = {
    "k": 2880, "groups": 32, "top_k": 4, "gate_up_bias": True, "down_bias": True, "limit": 7.0,
    "slope": 1.702, "plus": 1.0, "halves": "interleaved",
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": GPT_OSS | {"n": 2880},
    "gpt-oss-20b / 4": GPT_OSS | {"n": 720},
    "gpt-oss padded": GPT_OSS | {"k": 3072, "n": 2880},
    "gpt-oss padded / 4": GPT_OSS | {"k": 3072, "n": 768},
    "Qwen3-30B-A3B": {"k": 2048, "n": 768, "groups": 128, "top_k": 8},
    "Qwen3-30B-A3B / 4": {"k": 2048, "n": 192, "groups": 128, "top_k": 8},
}
LAYERS = {
    "1B q": (2048, 2048), "1B up": (2048, 8192), "8B q": (4096, 4096), "8B up": (4096, 14336),
    "8B down": (14336, 4096), "gpt-oss q": (2880, 4096),
}  # fmt: skip
MOST = 1.05
"""Of the library's time that experts may take."""
LIBRARY = "src/nkilib_src"
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"weight": "fp8"},
    "mxfp4": {"weight": "mxfp4", "halves": "joined"},
    "mxfp4+32": {"weight": "mxfp4", "halves": "joined", "ranks": (32, 32)},
}


def us(spec: KernelSpec, target: str) -> float:
    """Return the simulated microseconds of a kernel."""
    return float(choose(spec, target)[0].simulated_us or 0.0)


def operands_of(spec: ExpertsSpec, library: PrivateModules) -> dict[str, Any]:
    """Return what the library's kernels of few and of many tokens name alike."""
    types: Any = library.load("nkilib.core.utils.common_types")
    named: dict[str, Any] = {
        "expert_affinities_scaling_mode": types.ExpertAffinityScaleMode.POST_SCALE
    }
    if spec.limit:
        named["gate_clamp_upper_limit"] = named["up_clamp_upper_limit"] = spec.limit
        named["up_clamp_lower_limit"] = -spec.limit
    return named


def fastest_us(kernel: Any, ways: list[dict[str, Any]], target: str, cores: int) -> float | None:
    """Return the time of a kernel in the fastest of its ways; None if none takes the shape."""
    times = []
    for named in ways:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # they print what they choose
                run = simulate(
                    kernel, target=target, mode="timing", strict=False, named=named, grid=cores
                )
        except KernelFailedError as error:  # an assertion of the library: not for this shape
            print(f"  {kernel.__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        assert run.profile is not None
        times.append(float(run.profile.latency_us))
    return min(times, default=None)


def library_us(library: PrivateModules, spec: ExpertsSpec, target: str) -> float | None:
    """Return the time of the library's kernel; None if it has none for the shape and the cores."""
    if spec.k % 128 or (spec.m > 128) != (spec.lnc == 2):
        return None
    return (many_tokens_us if spec.lnc == 2 else few_tokens_us)(library, spec, target)


def few_tokens_us(library: PrivateModules, spec: ExpertsSpec, target: str) -> float | None:
    """Return the time of moe_tkg in the faster of its ways, all experts or those of each token."""
    shapes = {
        "hidden_input": (spec.m, spec.k),
        "expert_gate_up_weights": (spec.groups, spec.k, 2, spec.n),
        "expert_down_weights": (spec.groups, spec.n, spec.k),
    }
    if spec.gate_up_bias:
        shapes["expert_gate_up_bias"] = (spec.groups, 2, spec.n)
        shapes["expert_down_bias"] = (spec.groups, spec.k)
    named: dict[str, Any] = {name: ArraySpec(shape, "bfloat16") for name, shape in shapes.items()}
    named["expert_affinities"] = ArraySpec((spec.m, spec.groups), "float32")
    named["expert_index"] = ArraySpec((spec.m, spec.top_k), "int32")
    named |= operands_of(spec, library)
    types: Any = library.load("nkilib.core.utils.common_types")
    if spec.limit:
        named["activation_fn"] = types.ActFnType.Swish
    picks = {"expert_affinities_eager": ArraySpec((spec.m, spec.top_k), "float32")}
    ways = [named | {"is_all_expert": True, "rank_id": ArraySpec((1, 1), "int32")}]
    if spec.m * spec.top_k <= 2 * spec.groups:
        ways.append(named | {"is_all_expert": False} | picks)
    return fastest_us(library.load("nkilib.core.moe.moe_tkg.moe_tkg").moe_tkg, ways, target, 1)


def many_tokens_us(library: PrivateModules, spec: ExpertsSpec, target: str) -> float | None:
    """Return the time of moe_cte on two cores, blocks shared out, in the best size of a block.

    It computes as many blocks as tokens can need at most, filled or not.
    """
    module: Any = library.load("nkilib.core.moe.moe_cte.moe_cte")
    types: Any = library.load("nkilib.core.utils.common_types")
    shapes = {
        "hidden_states": (spec.m + 1, spec.k),
        "expert_affinities_masked": ((spec.m + 1) * spec.groups, 1),
        "gate_up_proj_weight": (spec.groups, spec.k, 2, spec.n),
        "down_proj_weight": (spec.groups, spec.n, spec.k),
    }
    if spec.gate_up_bias:
        shapes["gate_and_up_proj_bias"] = (spec.groups, 2, spec.n)
        shapes["down_proj_bias"] = (spec.groups, spec.k)
    named: dict[str, Any] = {name: ArraySpec(shape, "bfloat16") for name, shape in shapes.items()}
    named["spec"] = module.MoECTESpec(implementation=module.MoECTEImplementation.shard_on_block)
    named["activation_function"] = types.ActFnType.Swish if spec.limit else types.ActFnType.SiLU
    named |= operands_of(spec, library)
    ways = []
    for size in (128, 256, 512):
        blocks = spec.groups - 1 + -(-(spec.m * spec.top_k - spec.groups + 1) // size)
        blocks += blocks % 2
        sorted_tokens = {
            "block_size": size,
            "token_position_to_id": ArraySpec((blocks * size,), "int32"),
            "block_to_expert": ArraySpec((blocks, 1), "int32"),
        }
        ways.append(named | sorted_tokens)
    return fastest_us(module.moe_cte, ways, target, 2)


def in_forms(target: str, tokens: tuple[int, ...]) -> None:
    """Print the times of experts with weights in each form that the target multiplies."""
    print(f"\nexperts in forms on {target}, simulated, one core: us, and the share of their bytes'")
    print(f"{'layer':20} {'tokens':>6}" + "".join(f" {form:>9} {'':5}" for form in FORMS))
    for name, fields in EXPERTS.items():
        for m in () if "padded" in name else tokens:
            row = f"{name:20} {m:6}"
            for form in FORMS.values():
                spec = ExpertsSpec(m=m, **fields | form)
                try:
                    spec.check(get(target))
                except SpecError:  # the target multiplies no MX blocks
                    row += f" {'-':>9} {'':5}"
                    continue
                time = us(spec, target)
                row += f" {time:9.1f} {spec.roofline_us(get(target)) / time:5.2f}"
            print(row, flush=True)


def main() -> int:
    """Print both tables; return 1 where the bar beside the library is not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", default="trn2")
    parser.add_argument("--quick", action="store_true", help="a part of each table")
    parser.add_argument("--checkout", type=Path, help="a clone of aws-neuron/nki-library")
    given = parser.parse_args()
    target, quick, missed = given.target, given.quick, 0
    library = PrivateModules([given.checkout / LIBRARY]) if given.checkout else None
    tokens = (1, 8) if quick else (1, 8, 32)
    print(f"experts on {target}, simulated: us, share of the bytes' time, the library's us")
    print(
        f"{'layer':20} {'tokens':>6} {'cores':>5} {'experts':>8} {'us':>9} {'share':>6} "
        f"{'library':>9}  schedule"
    )
    many = [] if quick else [(512, 1), (512, 2), (4096, 2)]
    for name, fields in list(EXPERTS.items())[: 2 if quick else None]:
        for m, cores in [(m, 1) for m in tokens] + many:
            spec = ExpertsSpec(m=m, lnc=cores, **fields)
            best = choose(spec, target)[0]
            ours = best.simulated_us or 1.0
            share = spec.roofline_us(get(target)) / ours
            theirs = library_us(library, spec, target) if library is not None else None
            bad = theirs is not None and ours > MOST * theirs
            missed += bad
            row = f"{name:20} {m:6} {cores:5} {spec.expected:8.1f} {ours:9.1f} {share:6.2f}"
            row += f" {'-' if theirs is None else format(theirs, '.1f'):>9}"
            print(f"{row}  {best.schedule.short()}{'  MISSED' * bad}", flush=True)
    in_forms(target, (1,) if quick else (1, 8, 512))
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

    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
