"""Segments of the contraction: right results, and each operand crossing HBM once."""

import dataclasses

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.targets import get


def segmented(spec, target="trn2", changes=None):
    """Return the best schedule that sums over k in one go, cut into three segments."""
    plain = next(c.schedule for c in rank(spec, get(target)) if not c.schedule.k_segment)
    cut = {"u.chunk": 128, "x.chunk": 256, "k_segment": 256, "u.block": 256, "u.group": 1}
    cut |= {"u.stream": False, "u.resident": False}
    return plain.changed(cut | (changes or {}))


@pytest.mark.parametrize("x_stream", [False, True])
@pytest.mark.parametrize(
    ("m", "dtype", "scale", "layout"),
    [(3, "bfloat16", 1.0, "row"), (150, "float32", 0.5, "col"), (1030, "float32", 1.0, "col")],
)
def test_segments_equal_float64(m, dtype, scale, layout, x_stream):
    spec = LowRankSpec(m=m, k=700, r=300, n=136, dtype=dtype, scale=scale, x_layout=layout)
    proof = prove(build_kernel(spec, "trn2", segmented(spec, changes={"x.stream": x_stream})))
    assert proof.passed, proof


def test_a_down_projection_of_1024_tokens_reads_each_operand_once():
    spec = LowRankSpec(m=1024, k=8192, r=1280, n=2048, x_layout="col")
    best = choose(spec, "trn2")[0].schedule
    profile = build_kernel(spec, "trn2", best).profile()
    assert best.k_segment
    assert profile.hbm_read_bytes + profile.hbm_write_bytes == spec.minimal_hbm_bytes()


def test_segments_refuse_what_would_read_x_or_u_again():
    spec = LowRankSpec(m=150, k=700, r=300, n=136)
    for changes, words in (
        ({"u.resident": True}, "drop u.resident"),
        ({"k_segment": 200}, "k_segment is 200"),
        ({"x.stream": True, "u.chunk": 128, "x.chunk": 384}, "that divides it, not 384"),
    ):
        with pytest.raises(SpecError, match=words):
            segmented(spec, changes=changes).check(spec, get("trn2"))
    based = dataclasses.replace(spec, base=True)
    with pytest.raises(SpecError, match=r"drop x\.stream"):
        segmented(based, changes={"x.stream": True}).check(based, get("trn2"))


def test_panels_of_a_base_product_are_counted_beside_a_resident_v():
    """They arrive ahead panel by panel, whether v stays in SBUF or not."""
    spec = LowRankSpec(m=2048, k=2048, r=16, n=8192, base=True)
    target = get("trn2")
    resident = [c.schedule for c in rank(spec, target) if c.schedule.v.resident]
    assert resident
    for schedule in resident:
        panel = schedule.sbuf_bytes(spec)["w"]
        free = target.sbuf_usable_bytes_per_partition - sum(schedule.sbuf_bytes(spec).values())
        assert schedule.ahead * panel <= free
    assert choose(spec, "trn2")[0].simulated_us >= spec.roofline_us(target)
