"""Kernels of a few microseconds: loads side by side, sums in turns, odd contractions."""

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.simulator.run import ArraySpec
from nmm_compiler.targets import get

ODD = LowRankSpec(m=17, k=1021, r=61, n=509, x_layout="col")


def chosen(spec, **changes):
    return choose(spec, "trn2")[0].schedule.changed(changes)


def loads(kernel):
    """Return (elements per partition, partitions) of the loads from the first operand, and of u."""
    arrays = [ArraySpec(t.shape, t.dtype) for t in kernel.spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    return [i.writes[0].partitions for i in trace.instructions if i.op == "dma_copy"]


@pytest.mark.parametrize("k", [1021, 509, 383, 255 * 3])
def test_an_odd_contraction_is_loaded_at_once(k):
    """All but a few rows are one load of each factor; the last ones are a run in one partition."""
    spec = LowRankSpec(m=5, k=k, r=40, n=300, x_layout="col")
    kernel = build_kernel(spec, "trn2", chosen(spec, **{"u.chunk": k, "x.chunk": k}))
    assert kernel.schedule.k_order == "spread_rows"
    depth = -(-k // 128)
    rest = 2 if k % depth else 0
    assert sorted(loads(kernel)[: 2 + rest]) == [1] * rest + [k // depth] * 2
    assert prove(kernel).passed


def test_an_odd_contraction_in_chunks_and_segments_equals_float64():
    spec = LowRankSpec(m=17, k=1021, r=200, n=509, x_layout="col", bias=True)
    for changes in (
        {"u.chunk": 256, "x.chunk": 256},
        {"u.chunk": 384, "x.chunk": 384, "aside": "x+v"},
        {"u.chunk": 128, "x.chunk": 128, "k_segment": 512, "u.stream": False},
    ):
        assert prove(build_kernel(spec, "trn2", chosen(spec, **changes))).passed


def test_other_contractions_keep_whole_tiles():
    """257 rows would leave a third of the partitions idle; a base product reads x in tiles."""
    for spec in (
        LowRankSpec(m=5, k=257, r=40, n=300, x_layout="col"),
        LowRankSpec(m=5, k=512, r=40, n=300, x_layout="col"),
        LowRankSpec(m=5, k=509, r=40, n=300, x_layout="col", base=True),
        LowRankSpec(m=5, k=509, r=40, n=300, x_layout="col", norm="rms"),
    ):
        assert chosen(spec).k_order == "consecutive_rows", spec
    with pytest.raises(SpecError, match="takes lowrank without base"):
        chosen(LowRankSpec(m=5, k=509, r=40, n=300, x_layout="col", base=True)).changed(
            {"k_order": "spread_rows"}
        ).check(LowRankSpec(m=5, k=509, r=40, n=300, x_layout="col", base=True), get("trn2"))


SPECS = {
    "lowrank": (LowRankSpec(m=33, k=384, r=100, n=700, x_layout="col"), "x+v"),
    "lowrank_shared": (
        LowRankSharedSpec(m=9, k=384, pairs=((100, (700,)), (64, (130, 256)))), "v",
    ),
    "gated_mlp": (GatedMLPSpec(m=9, k=640, n=700, r=200, x_layout="col"), "x+v+out"),
}  # fmt: skip


@pytest.mark.parametrize("family", SPECS)
def test_operands_aside_equal_float64(family):
    """Loads on the sync engine's queue, the last store on ScalarE's."""
    spec, aside = SPECS[family]
    kernel = build_kernel(spec, "trn2", chosen(spec, aside=aside))
    assert "def load_aside" in kernel.source
    assert "engine=nisa.engine.scalar)" in kernel.source
    assert prove(kernel).passed


def test_what_cannot_come_aside_is_refused():
    fp8 = LowRankSpec(
        m=1, k=512, r=128, n=512, x_layout="col", dtype="float8_e4m3", scales="channel"
    )
    for spec, name in ((fp8, "x"), (ODD, "u"), (MatmulSpec(m=1, k=512, n=512), "x")):
        with pytest.raises(SpecError, match="aside is"):
            chosen(spec, aside=name).check(spec, get("trn2"))


@pytest.mark.parametrize(("rank", "tokens"), [(256, 3), (200, 128), (100, 1)])
def test_the_down_projection_of_few_tokens_sums_in_turns(rank, tokens):
    """Four sums take turns, where two would wait for one another's passes."""
    spec = GatedMLPSpec(m=tokens, k=300, n=1030, gate_r=40, up_r=50, down_r=rank, x_layout="col")
    kernel = build_kernel(spec, "trn2")
    assert "def project_in_turns" in kernel.source
    assert prove(kernel).passed


def test_more_tokens_sum_the_down_projection_in_one_go():
    spec = GatedMLPSpec(m=129, k=300, n=1030, gate_r=40, up_r=50, down_r=200, x_layout="col")
    assert "def project_in_turns" not in build_kernel(spec, "trn2").source


WARM = [
    LowRankSpec(m=200, k=768, r=16, n=640, x_layout="col"),
    LowRankSpec(m=500, k=384, r=130, n=512, x_layout="col", out_layout="col"),
    MatmulSpec(m=333, k=512, n=512, x_layout="col"),
    MatmulSpec(m=200, k=384, n=256, x_layout="col", out_layout="col", dtype="float32"),
]


@pytest.mark.parametrize("spec", WARM, ids=str)
def test_passes_over_zeros_change_no_result(spec):
    """They begin the first sum, so that nothing is computed that nobody reads."""
    schedule = chosen(spec, warm=0)
    warm = build_kernel(spec, "trn2", schedule.changed({"warm": 3}))
    assert prove(warm).passed
    counts = [
        len([i for i in one.simulate(*arrays, mode="timing").trace.instructions
             if i.op == "nc_matmul"])
        for one in (warm, build_kernel(spec, "trn2", schedule))
        for arrays in [[ArraySpec(t.shape, t.dtype) for t in spec.inputs()]]
    ]  # fmt: skip
    assert counts[0] == counts[1] + 3


def test_tokens_that_all_move_have_no_passes_over_zeros():
    spec = MatmulSpec(m=129, k=600, n=640, x_layout="col")
    kernel = build_kernel(spec, "trn2", chosen(spec, warm=3, moving=129))
    assert prove(kernel).passed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_one_x_begin_with_passes_over_zeros(dtype):
    spec = LowRankSharedSpec(
        m=140, k=600, pairs=((200, 384), (60, 640)), x_layout="col", dtype=dtype
    )
    kernel = build_kernel(spec, "trn2", chosen(spec, warm=3))
    assert prove(kernel).passed
    arrays = [ArraySpec(t.shape, t.dtype) for t in spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    columns = [i.writes[0].pattern for i in trace.instructions if i.op == "nc_matmul"][:3]
    assert len({str(c) for c in columns}) == 1  # one bank, all of it


def test_passes_over_zeros_raise_the_clock_before_the_first_operands_are_there():
    spec = MatmulSpec(m=333, k=2048, n=512, x_layout="col")
    kernel = build_kernel(spec, "trn3")
    assert kernel.schedule.warm > 0
    cold = build_kernel(spec, "trn3", kernel.schedule.changed({"warm": 0}))
    assert kernel.profile().latency_us < cold.profile().latency_us - 0.5


def test_passes_over_zeros_are_refused_where_no_sum_begins_with_them():
    fp8 = MatmulSpec(m=256, k=512, n=512, x_layout="col", dtype="float8_e4m3", scales="channel")
    with pytest.raises(SpecError, match="warm is 2 passes"):
        build_kernel(fp8, "trn2", chosen(fp8, double_row=True, warm=2))
    assert "warm" not in chosen(ODD).to_dict()


@pytest.mark.parametrize("tokens", [129, 333, 448])
def test_a_rank_of_one_tile_is_summed_in_turns(tokens):
    """A pass of so few columns takes less time than the pass before it, whose sum it adds to."""
    spec = LowRankSpec(m=tokens, k=1024, r=24, n=768, x_layout="col")
    whole = {"k_segment": 0, "x.stream": False, "m_block": 512, "warm": 0}
    kernel = build_kernel(spec, "trn2", chosen(spec, **whole))
    arrays = [ArraySpec(t.shape, t.dtype) for t in spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    products = [i for i in trace.instructions if i.op == "nc_matmul"]
    first = [i.writes[0].storage for i in products if i.writes[0].partitions == spec.r]
    assert len(first) == 8
    assert first[::2] != first[1::2]
    assert len(set(first)) == 2
    assert prove(kernel).passed


@pytest.mark.parametrize(("tokens", "stores"), [(200, 3), (128, 1)])
def test_first_results_of_several_tiles_leave_in_two_stores(tokens, stores):
    """The first half waits for half of the sums, on a queue that no later store needs."""
    spec = LowRankSpec(m=tokens, k=256, r=16, n=1280, x_layout="col")
    kernel = build_kernel(spec, "trn2", chosen(spec, **{"v.block": 1280, "moving": 0}))
    arrays = [ArraySpec(t.shape, t.dtype) for t in spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    out = [i for i in trace.instructions if i.op == "dma_copy" and i.writes[0].memory == "hbm"]
    assert len(out) == stores
    assert prove(kernel).passed
