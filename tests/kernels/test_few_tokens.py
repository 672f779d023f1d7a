"""Few tokens past stationary weights: products that are added in SBUF, and what is loaded first."""

import dataclasses

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.targets import get

FP8 = {"dtype": "float8_e4m3", "scales": "channel"}
MATMUL = {
    "rows": MatmulSpec(m=1, k=300, n=640),
    "columns": MatmulSpec(m=5, k=256, n=640, x_layout="col", out_layout="col", bias=True),
    "fp32": MatmulSpec(m=2, k=200, n=640, x_layout="col", dtype="float32", activation="gelu"),
    "fp8": MatmulSpec(m=1, k=700, n=640, x_layout="col", activation="silu", **FP8),
    "fp8 columns": MatmulSpec(m=3, k=512, n=640, out_layout="col", bias=True, **FP8),
    "one scale": MatmulSpec(m=2, k=512, n=640, dtype="float8_e4m3", scales="tensor"),
    "x bfloat16": MatmulSpec(m=1, k=512, n=640, x_dtype="bfloat16", **FP8),
}
LOWRANK = {
    "rows": LowRankSpec(m=1, k=300, r=200, n=640, activation="silu", scale=0.5),
    "columns": LowRankSpec(m=16, k=256, r=300, n=640, out_layout="col", bias=True),
    "fp8": LowRankSpec(m=1, k=1024, r=300, n=640, x_layout="col", **FP8),
    "fp8 between": LowRankSpec(
        m=2, k=512, r=512, n=640, x_layout="col", intermediate="float8_e4m3", **FP8
    ),
    "fp32 between": LowRankSpec(m=3, k=256, r=200, n=640, intermediate="float32"),
}


def few(spec, field, double_row=False):
    """Return the best schedule with `field` whose last panel is smaller than the others."""
    found = [
        c.schedule
        for c in rank(spec, get("trn2"))
        if getattr(c.schedule, field) and c.schedule.double_row == double_row
    ]
    return next(s for s in found if spec.n % (s.w if field == "w_stationary" else s.v).block)


@pytest.mark.parametrize("name", MATMUL)
def test_few_tokens_of_matmul_equal_float64(name):
    spec = MATMUL[name]
    pairs = (False, True) if spec.x_format.startswith("float8") else (False,)
    for double_row in pairs:
        kernel = build_kernel(spec, "trn2", few(spec, "w_stationary", double_row))
        assert "expand_few" in kernel.source
        assert "matmul_block" not in kernel.source
        assert prove(kernel).passed


@pytest.mark.parametrize("name", LOWRANK)
def test_few_tokens_of_lowrank_equal_float64(name):
    spec = LOWRANK[name]
    pairs = (False, True) if spec.fp8 else (False,)
    for double_row in pairs:
        schedule = few(spec, "v_added", double_row)
        kernel = build_kernel(spec, "trn2", schedule)
        assert "expand_few" in kernel.source
        assert prove(kernel).passed
        segmented = schedule.changed({"k_segment": 128, "u.chunk": 128, "u.stream": False})
        if spec.k % 256 == 0 and not double_row:
            assert prove(build_kernel(spec, "trn2", segmented)).passed


def test_the_first_weights_do_not_wait_for_scales():
    spec = LowRankSpec(m=1, k=2048, r=512, n=4096, x_layout="col", **FP8)
    for chosen in (spec, MatmulSpec(m=1, k=2048, n=4096, x_layout="col", **FP8)):
        timeline = build_kernel(chosen, "trn2").profile().timeline
        largest = max(t.hbm_read_bytes for t in timeline.transfers)
        begins = min(
            start
            for t in timeline.transfers
            if t.hbm_read_bytes > largest // 4
            for _, start, _ in t.parts
        )
        # x comes first, in a quarter of a microsecond
        assert begins <= 1e6 * get("trn2").dma_start_latency_seconds + 0.25


def test_one_token_in_fp8_is_near_its_roofline():
    for spec in (
        LowRankSpec(m=1, k=2048, r=1280, n=8192, x_layout="col", **FP8),
        MatmulSpec(m=1, k=2048, n=8192, x_layout="col", **FP8),
    ):
        best = choose(spec, "trn2")[0]
        assert spec.roofline_us(get("trn2")) / best.simulated_us >= 0.85


@pytest.mark.parametrize(
    "spec",
    [
        LowRankSpec(m=100, k=512, r=16, n=640, x_layout="col"),
        LowRankSpec(m=140, k=256, r=130, n=200, out_layout="col", bias=True),
        LowRankSpec(m=33, k=512, r=20, n=256, x_layout="col", **FP8),
        LowRankSpec(m=70, k=256, r=1, n=300, base=True),
    ],
)
@pytest.mark.parametrize("k_segment", [0, 128])
def test_a_small_u_comes_at_once_on_the_queue_of_results(spec, k_segment):
    best = next(c.schedule for c in rank(spec, get("trn2")) if not c.schedule.k_segment)
    best = best.changed({"u.chunk": 128, "x.chunk": 128, "u.stream": False, "u.group": 1})
    if k_segment and not spec.base:
        best = best.changed({"k_segment": k_segment})
    assert best.settled(spec).u_aside
    kernel = build_kernel(spec, "trn2", best)
    of_u = [
        t.queue
        for t in kernel.profile().timeline.transfers
        if t.hbm_read_bytes == spec.k * spec.r * (1 if spec.fp8 else 2)
    ]
    assert "hwdge-sync" in of_u
    assert prove(kernel).passed


def test_what_few_tokens_refuse():
    spec = MATMUL["rows"]
    schedule = few(spec, "w_stationary")
    for changes in ({"n": 1290}, {"m": 300}, {"bias": True}, {"residual": True}):
        with pytest.raises(SpecError, match="w_stationary takes one block of tokens"):
            schedule.check(dataclasses.replace(spec, **changes), get("trn2"))
    with pytest.raises(SpecError):
        schedule.check(spec, get("trn1"))
    chain = LOWRANK["rows"]
    added = few(chain, "v_added")
    for changes in ({"base": True}, {"residual": True}, {"m": 300}):
        with pytest.raises(SpecError, match="v_added takes one block of tokens"):
            added.check(dataclasses.replace(chain, **changes), get("trn2"))
    with pytest.raises(SpecError, match="v_added takes"):
        added.changed({"v_stationary": False}).check(chain, get("trn2"))
