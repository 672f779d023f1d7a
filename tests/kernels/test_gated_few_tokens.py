"""Dense gate and up of few tokens: products that are added in SBUF, and wide panels."""

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.targets import get

COLUMNS = {"x_layout": "col", "out_layout": "col"}
SPECS = {
    "one token": GatedMLPUpSpec(m=1, k=300, n=1280, **COLUMNS),
    "biases": GatedMLPUpSpec(
        m=5, k=256, n=640, gate_bias=True, up_bias=True, activation="gelu", **COLUMNS
    ),
    "fp32": GatedMLPUpSpec(m=3, k=200, n=640, dtype="float32", **COLUMNS),
    "turned": GatedMLPUpSpec(m=16, k=256, n=640, weight_layout="col", out_layout="col"),
    "two cores": GatedMLPUpSpec(m=4, k=256, n=2560, lnc=2, **COLUMNS),
    "down": GatedMLPSpec(m=4, k=384, n=640, x_layout="col"),
    "down turned": GatedMLPSpec(m=2, k=256, n=1280, down_bias=True, **COLUMNS),
    "cores by tokens": GatedMLPSpec(m=4, k=256, n=640, lnc=2, x_layout="col"),
    "residual": GatedMLPSpec(m=3, k=384, n=640, norm="rms", norm_gain=True, residual=True),
    "residual turned": GatedMLPSpec(m=2, k=256, n=640, residual=True, **COLUMNS),
}


def added(spec):
    """Return a schedule that adds products, in several loads, its last panel smaller if one is."""
    found = [c.schedule for c in rank(spec, get("trn2")) if c.schedule.v_added]
    best = next((s for s in found if spec.share(s.split).n % s.v.block), found[0])
    return best.changed({"v.chunk": 128, "out.chunk": 128})


@pytest.mark.parametrize("name", SPECS)
def test_added_products_equal_float64(name):
    kernel = build_kernel(SPECS[name], "trn2", added(SPECS[name]))
    assert "gate_few" in kernel.source
    assert "gate_columns" not in kernel.source
    proof = prove(kernel)
    assert proof.passed, proof


@pytest.mark.parametrize("m", [1, 16])
def test_the_kernel_is_faster_than_its_products(m):
    spec = GatedMLPUpSpec(m=m, k=1024, n=4096, **COLUMNS)
    best = choose(spec, "trn2")[0]
    apart = [choose(one, "trn2")[0].simulated_us for one in spec.as_products()[0]]
    assert best.schedule.v_added
    assert best.simulated_us < sum(apart)


@pytest.mark.parametrize("out_layout", ["row", "col"])
def test_a_whole_dense_mlp_of_one_token_is_faster_than_three_products(out_layout):
    spec = GatedMLPSpec(m=1, k=1024, n=4096, x_layout="col", out_layout=out_layout)
    best = choose(spec, "trn2")[0]
    apart = [choose(one, "trn2")[0].simulated_us for one in spec.as_products()[0]]
    assert len(apart) == 3
    assert best.schedule.v_added
    assert best.simulated_us < sum(apart)


def test_what_no_kernel_can_add_is_refused():
    schedule = added(SPECS["one token"])
    chip = get("trn2")
    for spec in (
        GatedMLPUpSpec(m=1, k=300, n=1280, x_layout="col"),
        GatedMLPUpSpec(m=1, k=300, n=1280, gate_r=128, up_r=128, **COLUMNS),
        GatedMLPUpSpec(m=100, k=300, n=1280, **COLUMNS),
        GatedMLPSpec(m=1, k=256, n=1280, down_r=128, **COLUMNS),
    ):
        with pytest.raises(SpecError, match="v_added takes one block"):
            schedule.changed({"v.block": 1280}).check(spec, chip)
