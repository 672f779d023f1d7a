"""One token more than whole tiles: the last tile moves past stationary weights."""

import dataclasses

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.targets import get

SPECS = {
    "lowrank": LowRankSpec(m=130, k=300, r=140, n=1024, activation="silu"),
    "matmul": MatmulSpec(m=129, k=300, n=640),
    "lowrank_shared": LowRankSharedSpec(m=132, k=256, pairs=((128, (512,)), (64, (200,)))),
    "gated_mlp": GatedMLPSpec(m=136, k=256, n=300, r=128),
}


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("family", SPECS)
def test_a_short_tail_is_right(family, target):
    kernel = build_kernel(SPECS[family], target)
    own = get(target).dma_generates_descriptors
    assert kernel.schedule.tail == (SPECS[family].m % 128 if own else 0)
    assert ("_tail(" in kernel.source) == own
    assert prove(kernel).passed


def test_a_bias_or_ragged_outputs_keep_the_tile():
    for changes in ({"bias": True}, {"n": 1000}, {"base": True}):
        kernel = build_kernel(dataclasses.replace(SPECS["lowrank"], **changes), "trn2")
        assert "expand_tail" not in kernel.source
        assert prove(kernel).passed


def test_one_token_more_costs_less_with_it():
    spec = LowRankSpec(m=257, k=1024, r=512, n=2048, x_layout="col")
    chosen = choose(spec, "trn2")[0].schedule
    plain = dataclasses.replace(chosen, tail=0)
    short, whole = (build_kernel(spec, "trn2", s).profile().latency_us for s in (chosen, plain))
    assert short < whole
    with pytest.raises(SpecError, match="drop tail for bfloat16 on trn1"):
        dataclasses.replace(chosen, own_queue=False).check(spec, get("trn1"))
