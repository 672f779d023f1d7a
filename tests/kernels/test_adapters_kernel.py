"""Adapters of a batch in one kernel: each token has the branch that its index names, or none."""

import dataclasses

import pytest
from judge import prove_right, run_with_index, spec_of, within

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import OutOfBoundsError
from nmm_compiler.kernels.linear import AdaptersSpec, MatmulSpec

LOADED = spec_of("adapters m=8 k=256 n=384 r=16 groups=4")
GATHERED = dataclasses.replace(LOADED, groups=20)


@pytest.mark.parametrize(
    ("fields", "target"),
    [
        ("m=1 r=5", "trn3"),
        ("m=64 bias activation=gelu dtype=float16", "trn2"),
        ("k=200 n=200 u_layout=row v_layout=col out_layout=col", "trn2"),
        ("m=150 groups=12 r=24 residual w_layout=col", "trn2"),
        ("no_base x_layout=col dtype=float32", "trn2"),
        ("groups=20 m=3 k=300 norm=rms norm_gain", "trn3"),
        ("groups=40 m=20 n=1100 r=16", "trn2"),
        ("groups=30 m=1 r=64 out_layout=col", "trn2"),
        ("m=4 lnc=2", "trn2"),
        ("m=4 lnc=2 groups=9 bias", "trn2"),
        ("m=130 lnc=2 no_base", "trn3"),
    ],
)
def test_the_kernel_is_right_against_float64(fields, target):
    spec = spec_of(f"adapters m=8 k=256 n=384 r=16 groups=4 {fields}")
    prove_right(build_kernel(spec, target))


@pytest.mark.parametrize("spec", [LOADED, GATHERED], ids=["loaded", "gathered"])
@pytest.mark.parametrize(
    "index", [[-1] * 8, [3] * 8, [0, -1, 0, 3, 3, -1, 0, 0]], ids=["none", "one for all", "some"]
)
def test_any_index_of_groups(spec, index):
    assert within(spec, *run_with_index(spec, index))


@pytest.mark.parametrize("spec", [LOADED, GATHERED], ids=["loaded", "gathered"])
@pytest.mark.parametrize("beyond", [-2, "groups"])
def test_an_index_out_of_range_is_an_error(spec, beyond):
    one = spec.groups if beyond == "groups" else beyond
    with pytest.raises(OutOfBoundsError, match="runtime index"):
        run_with_index(spec, [0, 1, 2, one, 0, 1, 2, 3])


def test_few_tokens_read_the_factors_of_their_own_adapters():
    assert (LOADED.slots, GATHERED.slots) == (0, 8)
    one = 16 * (256 + 384) * 2
    dense = MatmulSpec(m=8, k=256, n=384).minimal_hbm_bytes()
    for spec in (LOADED, GATHERED):
        small = 4 * (8 + 16 * spec.groups)
        assert spec.minimal_hbm_bytes() == dense + min(8, spec.groups) * one + small


def test_eight_adapters_cost_an_eighth_of_the_base_at_most():
    base = build_kernel(MatmulSpec(m=8, k=4096, n=4096)).profile().latency_us
    for groups in (8, 32):
        spec = AdaptersSpec(m=8, k=4096, n=4096, r=16, groups=groups)
        assert build_kernel(spec).profile().latency_us <= 1.12 * base
