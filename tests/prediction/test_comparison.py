"""The comparison counts the traffic it claims: fused chains save the intermediate's two trips."""

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.gated_mlp import GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.prediction.comparison import compare, compare_built


def test_a_fused_chain_saves_exactly_the_intermediate_in_hbm():
    spec = LowRankSpec(m=256, k=384, r=128, n=512, x_layout="col")
    found = compare(spec, "trn2")
    assert found.fused.hbm_bytes == spec.minimal_hbm_bytes()
    assert found.separate.hbm_bytes - found.fused.hbm_bytes == 2 * 256 * 128 * 2
    assert found.dense.hbm_bytes == 2 * (256 * 384 + 384 * 512 + 256 * 512)
    assert found.separate.latency_us > found.fused.latency_us


def test_a_gated_mlp_counts_both_chains():
    spec = GatedMLPUpSpec(m=128, k=256, n=512, r=128, x_layout="col", out_layout="col")
    found = compare(spec, "trn2")
    chain = 2 * (128 * 256 + 256 * 128 + 128 * 512 + 128 * 512) + 2 * 2 * 128 * 128
    assert found.separate.hbm_bytes == 2 * chain
    assert found.separate.latency_us > found.fused.latency_us


def test_a_built_kernel_is_compared_without_building_the_others():
    spec = LowRankSpec(m=256, k=384, r=128, n=512, x_layout="col")
    found, built = compare_built(build_kernel(spec, "trn2")), compare(spec, "trn2")
    assert found.fused == built.fused
    for way in ("separate", "dense"):
        one, other = getattr(found, way), getattr(built, way)
        assert one.hbm_bytes == other.hbm_bytes  # the least, at this size
        assert other.latency_us <= one.latency_us * 1.001  # of several schedules, against the first


@pytest.mark.parametrize("target", ["trn1", "trn3"])
def test_a_plain_matmul_is_compared_with_itself(target):
    found = compare(MatmulSpec(m=64, k=128, n=128), target)
    assert found.fused == found.separate == found.dense
