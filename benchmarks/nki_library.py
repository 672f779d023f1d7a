"""Kernels of a clone of aws-neuron/nki-library, simulated at the shapes of ours."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from pathlib import Path
from typing import Any

from kernel_timings import latency_us

from nmm_compiler.errors import KernelFailedError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import ArraySpec

HERE = Path(__file__).parent / "kernels"
LARGEST_HEAD = 128
LARGEST_CACHE = 32_768  # that attention_tkg is compared at


@functools.cache
def library(checkout: Path) -> PrivateModules:
    """Return the modules of a clone, and the launcher of attention_tkg."""
    return PrivateModules([checkout / "src/nkilib_src", HERE])


def fastest_us(kernel: Any, ways: list[dict[str, Any]], target: Any, cores: int) -> float | None:
    """Return the time of a kernel in the fastest of its ways; None if none takes the shape."""
    times = []
    for named in ways:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # they print what they choose
                us = latency_us(kernel, target=target, strict=False, named=named, grid=cores)
            times.append(us)
        except KernelFailedError as error:  # an assertion of the library: not for this shape
            print(f"  {kernel.__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    return min(times, default=None)


def of_dtype(dtype: str, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: ArraySpec(shape, dtype) for name, shape in shapes.items()}


def attention_us(checkout: Path | None, spec: AttentionSpec, target: Any) -> float | None:
    """Return the time of attention_cte, k with the head size first, or of attention_tkg.

    None without a clone, and where the library's kernel does not compute the same, as far as it is
    run here.
    """
    same = spec.rope == "none" if spec.m > 1 else spec.context <= LARGEST_CACHE
    if checkout is None or spec.soft_cap or spec.d > LARGEST_HEAD or not same:
        return None
    if spec.m > 1:
        kernel = library(checkout).load("nkilib.core.attention.attention_cte").attention_cte
        named = of_dtype(
            "bfloat16", q=(spec.heads, spec.m, spec.d), k=(spec.kv_heads, spec.d, spec.context),
            v=(spec.kv_heads, spec.context, spec.d),
        ) | {"scale": spec.scale, "causal_mask": spec.causal}  # fmt: skip
        if spec.window:  # which takes queries that are scaled already
            named |= {"sliding_window": spec.window, "scale": 1.0}
        return latency_us(kernel, target=target, strict=False, named=named)
    kernel, batch = library(checkout).load("attention_tkg").decode, spec.batch * spec.kv_heads
    named = of_dtype(
        "bfloat16", q=(spec.d, batch * spec.group), k_active=(spec.d, batch),
        v_active=(batch, 1, 1, spec.d), k_prior=(batch, 1, spec.d, spec.context),
        v_prior=(batch, 1, spec.context, spec.d),
    ) | of_dtype("float32", positions=(batch, 1)) | {"heads": spec.group}  # fmt: skip
    if spec.window:
        named |= of_dtype("float32", starts=(batch, 1))
    if spec.rope != "none":
        named |= of_dtype("float32", inv_freqs=(spec.d // 2, 1))
    return latency_us(kernel, target=target, strict=False, named=named)


def experts_us(checkout: Path | None, spec: ExpertsSpec, target: Any) -> float | None:
    """Return the time of moe_tkg, up to 128 tokens, or of moe_cte on two cores; None of others."""
    if checkout is None or spec.k % 128 or (spec.m > 128) != (spec.lnc == 2):
        return None
    modules = library(checkout)
    types: Any = modules.load("nkilib.core.utils.common_types")
    named = {"expert_affinities_scaling_mode": types.ExpertAffinityScaleMode.POST_SCALE}
    if spec.limit:
        named["gate_clamp_upper_limit"] = named["up_clamp_upper_limit"] = spec.limit
        named["up_clamp_lower_limit"] = -spec.limit
    kernel, ways = (many_tokens if spec.lnc == 2 else few_tokens)(modules, types, spec)
    return fastest_us(kernel, [named | way for way in ways], target, spec.lnc)


def few_tokens(
    modules: PrivateModules, types: Any, spec: ExpertsSpec
) -> tuple[Any, list[dict[str, Any]]]:
    """Return moe_tkg and its ways: all experts, or those of each token."""
    m, groups, k, n = spec.m, spec.groups, spec.k, spec.n
    named = of_dtype(
        "bfloat16", hidden_input=(m, k), expert_gate_up_weights=(groups, k, 2, n),
        expert_down_weights=(groups, n, k),
    ) | of_dtype("float32", expert_affinities=(m, groups))  # fmt: skip
    named |= of_dtype("int32", expert_index=(m, spec.top_k))
    if spec.gate_up_bias:
        named |= of_dtype(
            "bfloat16", expert_gate_up_bias=(groups, 2, n), expert_down_bias=(groups, k)
        )
    if spec.limit:
        named["activation_fn"] = types.ActFnType.Swish
    ways = [named | {"is_all_expert": True} | of_dtype("int32", rank_id=(1, 1))]
    if m * spec.top_k <= 2 * groups:
        picks = of_dtype("float32", expert_affinities_eager=(m, spec.top_k))
        ways.append(named | {"is_all_expert": False} | picks)
    return modules.load("nkilib.core.moe.moe_tkg.moe_tkg").moe_tkg, ways


def many_tokens(
    modules: PrivateModules, types: Any, spec: ExpertsSpec
) -> tuple[Any, list[dict[str, Any]]]:
    """Return moe_cte, blocks shared out over two cores, and its ways: sizes of a block.

    It computes as many blocks as tokens can need at most, filled or not.
    """
    module: Any = modules.load("nkilib.core.moe.moe_cte.moe_cte")
    m, groups, k, n = spec.m, spec.groups, spec.k, spec.n
    named = of_dtype(
        "bfloat16", hidden_states=(m + 1, k), expert_affinities_masked=((m + 1) * groups, 1),
        gate_up_proj_weight=(groups, k, 2, n), down_proj_weight=(groups, n, k),
    )  # fmt: skip
    if spec.gate_up_bias:
        named |= of_dtype(
            "bfloat16", gate_and_up_proj_bias=(groups, 2, n), down_proj_bias=(groups, k)
        )
    named["spec"] = module.MoECTESpec(implementation=module.MoECTEImplementation.shard_on_block)
    named["activation_function"] = types.ActFnType.Swish if spec.limit else types.ActFnType.SiLU
    ways = []
    for size in (128, 256, 512):
        blocks = groups - 1 + -(-(m * spec.top_k - groups + 1) // size)
        blocks += blocks % 2
        sorted_tokens = of_dtype(
            "int32", token_position_to_id=(blocks * size,), block_to_expert=(blocks, 1)
        )
        ways.append(named | sorted_tokens | {"block_size": size})
    return module.moe_cte, ways
