"""Times attention kernels beside those of nki-library, all in the simulator.

    python benchmarks/attention.py --checkout nki-library

`attention_cte` (prefill) and `attention_tkg` (decode) are those of a clone of
aws-neuron/nki-library. The published figures are of a fused bf16 kernel with d 128, on a device,
for 512 and 2048 tokens; their source gives neither heads nor mask, and they are taken as one head.
All else is simulated, on one core.
attention_tkg knows one head of keys: more are sequences to it. Its window is a mask over the whole
cache, and its RoPE rotates the new key too. Neither knows a soft cap or heads above 128, and
attention_cte has no RoPE: such rows have no figure of the library.
Exits with 1 where a kernel of ours is slower than the library's, slower than a published figure, or
where a decode kernel with a roofline of 40 us and more is not within 1 / 0.8 of it. Below that the
start of the first load, the softmax between the two products and the last store, about 10 us, are
the larger part.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nmm_compiler.codegen.choose import choose
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.simulator.loading.private_modules import PrivateModules
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

PREFILLS = [
    AttentionSpec(m=512),
    AttentionSpec(m=2048),
    AttentionSpec(m=2048, causal=False),
    AttentionSpec(m=512, heads=8, kv_heads=2),
    AttentionSpec(m=2048, heads=4, kv_heads=1),
    AttentionSpec(m=1024, heads=4, kv_heads=4, d=64),
    AttentionSpec(m=2048, window=512),
    AttentionSpec(m=2048, heads=4, kv_heads=1, window=1024),
    AttentionSpec(m=2048, rope="qk"),
    AttentionSpec(m=2048, soft_cap=50.0),
    AttentionSpec(m=1024, heads=4, kv_heads=1, d=256),
    AttentionSpec(m=1024, heads=4, kv_heads=1, d=256, window=512, soft_cap=50.0, rope="qk"),
]
DECODES = [
    AttentionSpec(m=1, context=2048, heads=8, k_layout="col"),
    AttentionSpec(m=1, context=8192, heads=8, kv_heads=1, k_layout="col"),
    AttentionSpec(m=1, context=8192, heads=32, kv_heads=8, k_layout="col"),
    AttentionSpec(m=1, context=8192, heads=32, kv_heads=8),
    AttentionSpec(m=1, context=32_768, heads=8, kv_heads=1, k_layout="col"),
    AttentionSpec(m=1, context=131_072, heads=8, kv_heads=1, k_layout="col"),
    AttentionSpec(m=1, context=131_072, heads=8, kv_heads=1),
    AttentionSpec(m=1, context=8192, heads=8, kv_heads=1, k_layout="col", rope="q"),
    AttentionSpec(m=1, context=8192, heads=8, kv_heads=1, k_layout="col", window=1024),
    AttentionSpec(m=1, context=8192, heads=8, kv_heads=1, k_layout="col", soft_cap=50.0),
    AttentionSpec(m=1, context=8192, heads=8, kv_heads=4, d=256, soft_cap=50.0, rope="q"),
]
PUBLISHED_US = {PREFILLS[0]: 28.0, PREFILLS[1]: 188.0}
LEAST_SHARE = 0.8
LONG_US = 40.0
LIBRARY = "src/nkilib_src"
LARGEST_HEAD = 128
LARGEST_CACHE = 32_768  # that attention_tkg is compared at
KERNELS = Path(__file__).resolve().parent / "kernels_nki"


def theirs_knows(spec: AttentionSpec) -> bool:
    """Return whether the library's kernel computes the same, as far as it is run here."""
    if spec.soft_cap or spec.d > LARGEST_HEAD:
        return False
    return spec.rope == "none" if spec in PREFILLS else spec.context <= LARGEST_CACHE


def library_us(
    kernel: Any, target: str, shapes: dict[str, tuple[int, ...]], strict: bool = False, **more: Any
) -> float:
    """Return the simulated time of a kernel, arrays bfloat16, positions, frequencies fp32."""
    dtypes = dict.fromkeys(("positions", "starts", "inv_freqs"), "float32")
    arrays = {n: ArraySpec(shape, dtypes.get(n, "bfloat16")) for n, shape in shapes.items()}
    run = simulate(kernel, target=target, mode="timing", strict=strict, named={**arrays, **more})
    assert run.profile is not None
    return float(run.profile.latency_us)


def prefill_us(library: PrivateModules, spec: AttentionSpec, target: str) -> float:
    """Return the time of attention_cte, k passed with the head size first."""
    module: Any = library.load("nkilib.core.attention.attention_cte")
    shapes = {
        "q": (spec.heads, spec.m, spec.d),
        "k": (spec.kv_heads, spec.d, spec.context),
        "v": (spec.kv_heads, spec.context, spec.d),
    }
    more: dict[str, Any] = {"scale": spec.scale, "causal_mask": spec.causal}
    if spec.window:  # which takes queries that are scaled already
        more |= {"sliding_window": spec.window, "scale": 1.0}
    return library_us(module.attention_cte, target, shapes, **more)


def decode_us(library: PrivateModules, spec: AttentionSpec, target: str) -> float:
    """Return the time of attention_tkg."""
    module: Any = library.load("attention_tkg")
    batch = spec.batch * spec.kv_heads
    shapes = {
        "q": (spec.d, batch * spec.group),
        "k_active": (spec.d, batch),
        "v_active": (batch, 1, 1, spec.d),
        "k_prior": (batch, 1, spec.d, spec.context),
        "v_prior": (batch, 1, spec.context, spec.d),
        "positions": (batch, 1),
    }
    if spec.window:
        shapes["starts"] = (batch, 1)
    if spec.rope != "none":
        shapes["inv_freqs"] = (spec.d // 2, 1)
    return library_us(module.decode, target, shapes, heads=spec.group)


def main() -> int:
    """Print the rows; return 1 where a bar is not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, help="a clone of aws-neuron/nki-library")
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--only", default="", help="rows whose description holds this text")
    given = parser.parse_args()
    library = PrivateModules([given.checkout / LIBRARY, KERNELS]) if given.checkout else None
    missed = 0
    chip = get(given.target)
    print(f"{'kernel':58s} {'ours, us':>9s} {'roofline':>9s} {'library':>9s} {'published':>9s}")
    for spec in (row for row in (*PREFILLS, *DECODES) if given.only in row.short()):
        best = choose(spec, given.target)[0]
        ours = best.simulated_us or 0.0
        bound = spec.roofline_us(chip)
        theirs = None
        if library is not None and theirs_knows(spec):
            price = prefill_us if spec in PREFILLS else decode_us
            theirs = price(library, spec, given.target)
        published = PUBLISHED_US.get(spec) if given.target == "trn2" else None
        bad = any(ours > other for other in (theirs, published) if other is not None)
        bad |= spec in DECODES and bound > LONG_US and ours > bound / LEAST_SHARE
        missed += bad
        others = " ".join(
            f"{'-' if us is None else format(us, '.1f'):>9s}" for us in (theirs, published)
        )
        print(f"{spec.short():58s} {ours:9.1f} {bound:9.1f} {others}{'  MISSED' if bad else ''}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
