"""Family attention: its reference against PyTorch, its kernels against the reference."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels.judge import first_kernel, prove_right, spec_of, within
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, random_arrays
from nmm_compiler.codegen.choose import rank
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.attention.op import attention
from nmm_compiler.nki_api.lint import lint_source
from nmm_compiler.options import Options
from nmm_compiler.targets import get

PREFILLS = {
    "grouped queries": "m=200 heads=4 kv_heads=2 d=64",
    "ragged, two parts of d": "m=100 context=300 d=192",
    "a window": "m=333 d=40 window=150 heads=2",
    "sections": "m=130 context=1300 d=64 k_layout=col batch=2",
    "capped": "m=150 d=64 soft_cap=3.0 window=100 dtype=float16",
    "fp32, seen whole": "m=140 context=70 d=48 causal=false dtype=float32",
    "rotated": "m=140 d=64 rope=qk heads=2 kv_heads=1",
}
DECODES = {
    "one token": "m=1 context=700 heads=8 kv_heads=2",
    "stored by columns": "m=1 context=333 heads=3 kv_heads=1 k_layout=col",
    "few tokens, a window": "m=3 context=500 heads=4 d=96 window=260",
    "capped and rotated": "m=2 context=300 d=256 soft_cap=5.0 rope=q",
    "fp32": "m=5 context=150 heads=2 d=80 dtype=float32 causal=false",
    "less than a tile": "m=1 context=9 d=16 batch=2",
    "packs of two and a rest": "m=2 context=404 heads=2 d=64 rope=q",
    "sets of three groups, in packs": "m=1 context=300 heads=12 kv_heads=6 d=64",
    "sets of two sequences' groups": "m=2 context=200 heads=4 batch=2 kv_heads=2 d=160 rope=q "
    "k_layout=col",
    "packs of four, single tiles": "m=1 context=773 d=32 soft_cap=4.0",
}
CASES = PREFILLS | DECODES


def sharp(spec, factor, seed=0):
    """Return arrays whose queries are so many times as long: few keys get all of the weight."""
    q, *rest = random_arrays(spec, seed)
    return ((q.astype(np.float32) * factor).astype(q.dtype), *rest)


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_float64(case):
    spec = spec_of(f"attention {CASES[case]}")
    kernel = first_kernel(spec)
    assert kernel.spec.decode == (case in DECODES)
    assert lint_source(kernel.source) == ()
    prove_right(kernel)
    arrays = sharp(spec, 8.0)
    assert within(spec, arrays, kernel.simulate(*arrays, mode="functional").outputs)


def test_huge_scores_neither_overflow_nor_vanish():
    """The maximum is exact: scores of a thousand and more, all of one sign, give finite weights."""
    for fields in ({"m": 40, "context": 1100}, {"m": 1, "context": 300}):
        spec = AttentionSpec(**fields, d=64, scale=1.0)
        arrays = [np.abs(a.astype(np.float32)).astype(a.dtype) for a in sharp(spec, 30.0)]
        for sign in (1, -1):
            arrays[1] = (np.abs(arrays[1].astype(np.float32)) * sign).astype(arrays[1].dtype)
            (got,) = build_kernel(spec, "trn2").simulate(*arrays, mode="functional").outputs
            bound = spec.error_bound(*arrays)
            assert compare("huge", (got,), (spec.reference(*arrays),), (bound,)).passed


@pytest.mark.parametrize(("m", "seen"), [(1, 200), (3, 202)])
def test_the_least_traffic_of_a_window_is_that_of_a_cache_as_long(m, seen):
    """One token sees its window only; three see two keys more."""
    cut = AttentionSpec(m=m, context=1000, window=200, d=32)
    whole = AttentionSpec(m=m, context=seen, d=32)
    assert cut.minimal_hbm_bytes() == whole.minimal_hbm_bytes()


@pytest.mark.parametrize("field", ["window", "scale", "soft_cap", "context"])
def test_the_bound_sees_a_wrong_mask_or_scale(field):
    spec = AttentionSpec(m=64, context=200, d=32, window=60, soft_cap=4.0, dtype="bfloat16")
    arrays = sharp(spec, 4.0)
    value = {"window": 61, "scale": 1.02 * spec.scale, "soft_cap": 4.1, "context": 199}[field]
    wrong = dataclasses.replace(spec, **{field: value})
    given = arrays if field != "context" else (arrays[0], *(a[:, :199] for a in arrays[1:]))
    assert not within(spec, arrays, wrong.reference(*given))


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_what_pytorch_computes(case):
    spec = spec_of(f"attention {CASES[case]} dtype=float32")
    q, k, v, *angles = arrays = [a.astype(np.float64) for a in sharp(spec, 3.0)]
    tensors = [torch.from_numpy(a).reshape(spec.batch, -1, *a.shape[1:]) for a in (q, k, v)] + [
        torch.from_numpy(a) for a in angles
    ]
    y = attention(
        *tensors, causal=spec.causal, window=spec.window, soft_cap=spec.soft_cap,
        scale=spec.scale, k_layout=spec.k_layout, rotates=spec.rope,
    )  # fmt: skip
    got = y.reshape(-1, *y.shape[2:]).numpy()
    # the op rotates and caps in fp32
    np.testing.assert_allclose(got, spec.reference(*arrays), rtol=1e-4, atol=1e-4)


def test_a_spec_counts_the_pairs_of_its_mask():
    spec = AttentionSpec(m=5, context=9, window=3, d=16, heads=4, kv_heads=2)
    assert spec.pairs == int(spec.seen().sum()) == 15
    assert spec.flops() == 4 * 4 * 15 * 16
    # the first two of nine keys are behind every window
    assert spec.minimal_hbm_bytes() == 2 * 16 * (2 * 4 * 5 + 2 * 2 * 7)
    assert AttentionSpec(m=5).pairs == 15
    assert AttentionSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("m", [1, 150])
def test_groups_beyond_the_budget_are_a_loop_on_the_device(m):
    spec = AttentionSpec(m=m, context=300, heads=6, kv_heads=3, d=32)
    kernel = build_kernel(spec, "trn2", options=Options(instruction_budget=60))
    assert kernel.schedule.loop
    assert "fori_loop" in kernel.source
    prove_right(kernel)
    older = build_kernel(spec, "trn1", options=Options(instruction_budget=60), dialect="neuronxcc")
    assert "for i in nl.affine_range(3):" in older.source
    prove_right(older)


def test_grouped_queries_load_their_keys_once():
    spec = AttentionSpec(m=256, heads=8, kv_heads=1)
    profile = build_kernel(spec, "trn2").profile()
    assert profile.hbm_read_bytes == sum(t.bytes for t in spec.inputs())


def test_one_load_brings_the_short_caches_of_several_groups():
    """Sixteen groups of 256 keys are two sets, whose eight groups have 2 kB a partition."""
    spec = AttentionSpec(m=1, context=256, heads=32, kv_heads=16, d=64)
    profile = build_kernel(spec, "trn2").profile()
    queries, keys, values, results = 2, 2, 2, 2
    assert profile.instructions["dma"]["dma_copy"] == queries + keys + values + results


@pytest.mark.parametrize(
    ("fields", "most_us"),
    [
        # published for a fused bf16 kernel of one head: 28 us; nki-library's attention_cte: 26 us
        ("m=512", 16.0),
        # 0.8 of the bytes of the cache over the bandwidth
        ("m=1 context=8192 heads=32 kv_heads=8", 93.0 / 0.8),
    ],
)
def test_predicted_times(fields, most_us):
    kernel = build_kernel(spec_of(f"attention {fields}"), "trn2")
    assert kernel.profile().latency_us < most_us


@pytest.mark.parametrize(
    ("d", "pack", "keys"), [(64, 2, 384), (64, 2, 500), (32, 4, 768), (128, 1, 384), (128, 1, 300)]
)
def test_small_heads_share_passes_over_the_cache(d, pack, keys):
    """One pass transposes, scores or weighs `pack` tiles, into which the keys are dealt evenly."""
    spec = AttentionSpec(m=1, context=keys, heads=2, kv_heads=1, d=d)
    schedule = rank(spec, get("trn2"))[0].schedule
    assert schedule.pack == pack
    run = build_kernel(spec, "trn2", schedule).simulate(*random_arrays(spec, 0))
    over_keys = -(-keys // (128 * pack))
    made = run.profile.instructions["tensor"]
    others = {"nc_transpose": 1 + 1 + pack, "nc_matmul": 2}  # q, maxima, y; spread, sum of weights
    assert made["nc_transpose"] - others["nc_transpose"] == over_keys
    assert made["nc_matmul"] - others["nc_matmul"] == 2 * over_keys


def test_a_pack_that_cannot_be_is_refused():
    """The tiles of a pack fill the partitions."""
    spec = AttentionSpec(m=1, context=1024, d=64)
    schedule = dataclasses.replace(rank(spec, get("trn2"))[0].schedule, pack=2)
    schedule.check(spec, get("trn2"))
    with pytest.raises(SpecError, match="take 2"):
        dataclasses.replace(schedule, pack=4).check(spec, get("trn2"))
    with pytest.raises(SpecError, match="take 1"):
        schedule.check(dataclasses.replace(spec, d=80), get("trn2"))


def test_the_reference_of_a_long_context_holds_some_scores_at_a_time(monkeypatch):
    """Queries in blocks give the same numbers as all of them at once."""
    spec = AttentionSpec(m=33, context=70, d=16, heads=2, kv_heads=1, window=20, rope="q")
    arrays = random_arrays(spec, 1)
    whole = spec.reference(*arrays), spec.error_bound(*arrays), spec.typical_error(*arrays)
    monkeypatch.setattr("nmm_compiler.kernels.attention.spec._REFERENCE_SCORES", 70 * 8)
    blocks = spec.reference(*arrays), spec.error_bound(*arrays), spec.typical_error(*arrays)
    for one, other in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
