"""Attention kernels beside those of nki-library, a table of kernels.py: `make bench-attention`.

    python benchmarks/kernels.py --tables attention --targets trn2 --checkout nki-library

`attention_cte` (prefill) and `attention_tkg` (decode) are those of a clone of
aws-neuron/nki-library. The published figures are of a fused bf16 kernel with d 128, on a device,
for 512 and 2048 tokens; their source gives neither heads nor mask, and they are taken as one head.
All else is simulated, on one core.
attention_tkg knows one head of keys: more are sequences to it. Its window is a mask over the whole
cache, and its RoPE rotates the new key too. Neither knows a soft cap or heads above 128, and
attention_cte has no RoPE: such rows have no figure of the library.
A kernel of ours misses its bar where it is slower than the library's, slower than a published
figure, or where a decode kernel with a roofline of 40 us and more is not within 1 / 0.8 of it.
Below that the start of the first load, the softmax between the two products and the last store,
about 10 us, are the larger part.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kernel_timings import Timings

from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

PUBLISHED_US = {AttentionSpec(m=512): 28.0, AttentionSpec(m=2048): 188.0}
LEAST_SHARE = 0.8
LONG_US = 40.0
LARGEST_HEAD = 128
LARGEST_CACHE = 32_768  # that attention_tkg is compared at


def judge(spec: AttentionSpec, target: str, timings: Timings) -> tuple[dict[str, float], list[str]]:
    """Hold a kernel to its roofline, the published figures and nki-library's time."""
    ours, bound = timings.us(spec, target), spec.roofline_us(get(target))
    found = {"roofline us": bound}
    if timings.checkout and theirs_knows(spec):
        found["library us"] = library_us(timings.checkout, spec, target)
    if spec in PUBLISHED_US and target == "trn2":
        found["published us"] = PUBLISHED_US[spec]
    missed = [f"over {name}" for name, us in found.items() if name != "roofline us" and ours > us]
    if spec.m == 1 and bound > LONG_US and ours > bound / LEAST_SHARE:
        missed.append(f"below {LEAST_SHARE} of its roofline")
    return found, missed


def theirs_knows(spec: AttentionSpec) -> bool:
    """Return whether the library's kernel computes the same, as far as it is run here."""
    if spec.soft_cap or spec.d > LARGEST_HEAD:
        return False
    return spec.rope == "none" if spec.m > 1 else spec.context <= LARGEST_CACHE


@functools.cache
def library(checkout: Path) -> PrivateModules:
    """Return the modules of a clone, and the launcher of attention_tkg."""
    return PrivateModules([checkout / "src/nkilib_src", Path(__file__).parent / "kernels_nki"])


def library_us(checkout: Path, spec: AttentionSpec, target: str) -> float:
    """Return the simulated time of attention_cte, k with the head size first, or attention_tkg."""
    if spec.m > 1:
        module: Any = library(checkout).load("nkilib.core.attention.attention_cte")
        kernel = module.attention_cte
        shapes: dict[str, tuple[int, ...]] = {
            "q": (spec.heads, spec.m, spec.d),
            "k": (spec.kv_heads, spec.d, spec.context),
            "v": (spec.kv_heads, spec.context, spec.d),
        }
        more: dict[str, Any] = {"scale": spec.scale, "causal_mask": spec.causal}
        if spec.window:  # which takes queries that are scaled already
            more |= {"sliding_window": spec.window, "scale": 1.0}
    else:
        module = library(checkout).load("attention_tkg")
        kernel, batch = module.decode, spec.batch * spec.kv_heads
        shapes = {
            "q": (spec.d, batch * spec.group),
            "k_active": (spec.d, batch),
            "v_active": (batch, 1, 1, spec.d),
            "k_prior": (batch, 1, spec.d, spec.context),
            "v_prior": (batch, 1, spec.context, spec.d),
            "positions": (batch, 1),
        }
        shapes |= {"starts": (batch, 1)} if spec.window else {}
        shapes |= {"inv_freqs": (spec.d // 2, 1)} if spec.rope != "none" else {}
        more = {"heads": spec.group}
    wide = dict.fromkeys(("positions", "starts", "inv_freqs"), "float32")
    arrays = {n: ArraySpec(shape, wide.get(n, "bfloat16")) for n, shape in shapes.items()}
    run = simulate(kernel, target=target, mode="timing", strict=False, named={**arrays, **more})
    assert run.profile is not None
    return float(run.profile.latency_us)
