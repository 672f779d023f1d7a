"""The phases that `make bench-kernels` judges rows against: no kernel beats the strict ones."""

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.targets import get

SPECS = [
    MatmulSpec(m=1, k=1024, n=256, x_layout="col"),
    MatmulSpec(m=333, k=512, n=512, x_layout="col"),
    LowRankSpec(m=333, k=1024, r=16, n=1024, x_layout="col"),
    LowRankSpec(m=16, k=1021, r=61, n=509, x_layout="col"),
    GatedMLPSpec(m=100, k=512, n=512, r=128, x_layout="col"),
]


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_kernel_beats_the_strict_phases(spec, target):
    from benchmarks.kernel_floors import floor_us, least_us

    least, floor = least_us(spec, target), floor_us(spec, target)
    assert spec.roofline_us(get(target)) < least < floor
    assert least <= build_kernel(spec, target).profile().latency_us


def test_phases_of_a_token_are_its_traffic_and_the_ends():
    from benchmarks.kernel_floors import phases_us

    chip, spec = get("trn2"), MatmulSpec(m=1, k=2048, n=512, x_layout="col")
    phases = phases_us(spec, "trn2")
    read = 2 * (2048 + 2048 * 512)
    rate = min(chip.hbm_bytes_per_second, 16 * chip.dma_bytes_per_second_per_engine)
    assert phases["operands"] == pytest.approx(1e6 * read / rate)
    assert phases["start"] == pytest.approx(1e6 * chip.dma_start_latency_seconds)
    assert phases["engines"] == pytest.approx(2e6 * chip.dma_stagger_seconds)
    assert phases["between"] == phases["results"] == 0.0


def test_of_two_products_the_intermediate_leaves_psum():
    from benchmarks.kernel_floors import phases_us

    one = phases_us(MatmulSpec(m=16, k=2048, n=512, x_layout="col"), "trn2")
    two = phases_us(LowRankSpec(m=16, k=2048, r=512, n=512, x_layout="col"), "trn2")
    assert one["between"] == 0.0 < two["between"]
