"""Tokens beyond whole tiles: they move past stationary weights, and TensorE turns their results."""

import dataclasses

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.kernels.moving_tokens import best, squares, ways
from nmm_compiler.targets import get

SPECS = {
    "lowrank": LowRankSpec(m=129, k=300, r=500, n=1024, activation="silu"),
    "lowrank, float32": LowRankSpec(m=257, k=140, r=300, n=256, dtype="float32"),
    "lowrank, norm and residual": LowRankSpec(
        m=272, k=256, r=900, n=640, norm="rms", norm_gain=True, residual=True
    ),
    "matmul": MatmulSpec(m=129, k=600, n=640, x_layout="col"),
    "matmul, norm and residual": MatmulSpec(m=258, k=600, n=640, norm="rms", residual=True),
    "lowrank_shared": LowRankSharedSpec(m=129, k=256, pairs=((512, (512,)), (64, (200, 128)))),
    "gated_mlp": GatedMLPSpec(m=129, k=256, n=300, r=384),
    "gated_mlp, dense": GatedMLPSpec(m=257, k=256, n=384, residual=True),
}


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("name", SPECS)
def test_moving_tokens_are_right(name, target):
    kernel = build_kernel(SPECS[name], target)
    assert kernel.schedule.moving in ways(SPECS[name].m)[1:]
    assert "store_turned(" in kernel.source
    assert prove(kernel).passed


@pytest.mark.parametrize("count", [1, 129])
@pytest.mark.parametrize("m_block", [128, 256, 384])
def test_any_block_and_any_number_of_them(m_block, count):
    """The last block may be the moving tokens alone, or fewer than could move."""
    for spec in (
        MatmulSpec(m=257, k=256, n=256, x_layout="col", residual=True),
        LowRankSpec(m=257, k=128, r=128, n=256, residual=True),
    ):
        schedule = rank(spec, get("trn2"))[0].schedule.changed(
            {"m_block": m_block, "moving": count}
        )
        schedule = schedule.changed({"ahead": schedule.most_ahead(spec, get("trn2"))})
        kernel = build_kernel(spec, "trn2", schedule)
        assert prove(kernel).passed


@pytest.mark.parametrize("name", ["matmul", "lowrank", "gated_mlp, dense"])
def test_beta_1_moves_tokens_too(name):
    kernel = build_kernel(SPECS[name], "trn1", dialect="neuronxcc")
    assert "store_turned(" in kernel.source
    assert prove(kernel).passed


def test_a_bias_or_ragged_outputs_keep_the_tile():
    for changes in ({"bias": True}, {"n": 1000}, {"base": True}):
        kernel = build_kernel(dataclasses.replace(SPECS["lowrank"], **changes), "trn2")
        assert kernel.schedule.moving == 0
        assert "store_turned" not in kernel.source
        assert prove(kernel).passed


def test_the_rule_weighs_passes_against_transposes():
    """A long contraction is worth the transposes; one tile of it, or a tile nearly full, is not."""
    trn2 = get("trn2")
    assert ways(256) == ways(100) == (0,)
    assert ways(300) == (0, 44, 172)
    assert [best(m, [(2048, 2048)], trn2) for m in (257, 300, 383)] == [129, 172, 0]
    assert [best(m, [(512, 2048)], trn2) for m in (257, 300)] == [129, 0]
    assert best(257, [(256, 2048)], trn2) == 0  # a pass more is less than the transposes
    assert best(300, [(128, 2048)], trn2) == 0
    assert best(300, [], trn2) == 0
    assert squares(129, 2048) == 16 + 1
    assert squares(130, 2048) == 32


def test_one_token_more_costs_less_with_it():
    spec = LowRankSpec(m=257, k=1024, r=512, n=2048, x_layout="col")
    chosen = choose(spec, "trn2")[0].schedule
    assert chosen.moving
    plain = dataclasses.replace(chosen, moving=0)
    moved, whole = (build_kernel(spec, "trn2", s).profile().latency_us for s in (chosen, plain))
    assert moved < whole
    with pytest.raises(SpecError, match="moving is 5; of 257 tokens pass"):
        dataclasses.replace(chosen, moving=5).check(spec, get("trn2"))
