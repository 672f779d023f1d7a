"""Patches and segments of the dense kernel: right results, and as fast as AWS's blocking."""

from pathlib import Path

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

TUTORIAL = Path(__file__).parents[2] / "benchmarks" / "kernels_nki" / "dense_blocked.py"
CUT = {"w.chunk": 128, "x.chunk": 256, "k_segment": 256, "w.resident": False}
SMALL = {"w.chunk": 128, "x.chunk": 128, "m_block": 256, "w.block": 256, "x.group": 1, "w.group": 1}


def schedule_of(spec, changes, target="trn2"):
    """Return the first candidate in the closed form's order, changed."""
    return rank(spec, get(target))[0].schedule.changed(changes)


@pytest.mark.parametrize(
    ("out_layout", "fields"),
    [
        ("row", {"m": 600, "bias": True, "activation": "silu", "w_layout": "col"}),
        ("col", {"m": 300, "dtype": "float32", "x_layout": "col"}),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [CUT, SMALL | CUT | {"x.chunk": 128}, SMALL, SMALL | {"w.resident": True}],
    ids=["segments", "segments of many patches", "many patches", "resident"],
)
def test_patches_and_segments_equal_float64(out_layout, fields, changes):
    """The last segment is shorter than the others, by a whole load."""
    spec = MatmulSpec(k=600, n=560, out_layout=out_layout, **fields)
    proof = prove(build_kernel(spec, "trn2", schedule_of(spec, {"m_block": 256, **changes})))
    assert proof.passed, proof


@pytest.mark.parametrize(
    ("m", "k", "n", "chunk", "fields"),
    [
        (16, 256, 700, 128, {"activation": "gelu"}),
        (100, 1152, 640, 256, {"bias": True}),
        (128, 640, 1024, 256, {"residual": True}),
        (200, 896, 1536, 384, {"activation": "silu", "dtype": "float32"}),
        (256, 512, 1024, 256, {}),
        (64, 384, 1000, 384, {}),
    ],
)
@pytest.mark.parametrize(("panels", "ahead"), [(1, 0), (2, 0), (2, 1)])
def test_short_loads_at_both_ends_equal_float64(m, k, n, chunk, fields, panels, ahead):
    """Last chunks of one tile and of several, one and two tiles of tokens, a panel ahead."""
    spec = MatmulSpec(m=m, k=k, n=n, x_layout="col", **fields)
    block = 512 * -(-n // (512 * panels)) if panels > 1 else 128 * -(-n // 128)
    changes = {
        "w.chunk": chunk, "x.chunk": chunk, "m_block": 256, "x.group": 2, "w.group": 3,
        "w.block": block, "w.resident": False, "k_segment": 0,
    }  # fmt: skip
    plain = schedule_of(spec, changes)
    schedule = plain.changed({"short_start": True, "short_end": True, "ahead": ahead})
    kernel = build_kernel(spec, "trn2", schedule)
    assert "sum_last_tiles" in kernel.source
    assert prove(kernel).passed


def test_few_tokens_wait_for_w_and_end_in_short_loads():
    """The last load is 128 rows of 512 outputs; a product that TensorE bounds keeps long ones."""
    spec = MatmulSpec(m=128, k=4096, n=1024, x_layout="col")
    kernel = build_kernel(spec, "trn2")
    assert kernel.schedule.short_end
    loads = [t for t in kernel.profile().timeline.transfers if t.hbm_read_bytes]
    assert loads[-1].hbm_read_bytes == 128 * 512 * 2
    ended = kernel.schedule.changed({"short_end": False})
    assert (
        kernel.profile().latency_us < 0.97 * build_kernel(spec, "trn2", ended).profile().latency_us
    )
    large = choose(MatmulSpec(m=512, k=4096, n=1024, x_layout="col"), "trn2")[0].schedule
    assert large.short_start
    assert not large.short_end


@pytest.mark.parametrize("scales", ["tensor", "channel"])
def test_segments_of_double_rows_equal_float64(scales):
    spec = MatmulSpec(m=200, k=900, n=300, dtype="float8_e4m3", scales=scales, x_layout="col")
    schedule = schedule_of(spec, CUT | {"double_row": True, "w.chunk": 256})
    proof = prove(build_kernel(spec, "trn2", schedule))
    assert proof.passed, proof


def test_segments_of_a_small_contraction_add_up_in_order():
    """Of three segments the first is copied, the others are added: one VectorE pass more each."""
    spec = MatmulSpec(m=128, k=768, n=512, x_layout="col")
    whole, cut = (
        build_kernel(spec, "trn2", schedule_of(spec, CUT | {"k_segment": segment}))
        for segment in (0, 256)
    )
    adds = [k.profile().instructions["vector"].get("tensor_tensor", 0) for k in (whole, cut)]
    assert adds == [0, 2]


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize(("m", "k", "n"), [(512, 4096, 1024), (1, 2048, 2048), (256, 1024, 2048)])
def test_never_slower_than_the_blocking_of_the_tutorial(m, k, n, target):
    """AWS's blocks with the sums of all token tiles, tuned: (tiles of n, of k) in a block."""
    arrays = [ArraySpec((k, m), "bfloat16"), ArraySpec((k, n), "bfloat16")]
    tuned = min(
        simulate(
            f"{TUTORIAL}:dense_blocked", *arrays, target=target, mode="timing",
            m_tiles_in_block=4, n_tiles_in_block=n_tiles, k_tiles_in_block=k_tiles,
        ).profile.latency_us
        for n_tiles, k_tiles in ((1, 4), (2, 4), (2, 8))
    )  # fmt: skip
    best = choose(MatmulSpec(m=m, k=k, n=n, x_layout="col"), target)[0]
    assert best.simulated_us <= tuned


def test_a_product_that_fits_reads_each_operand_once():
    spec = MatmulSpec(m=512, k=4096, n=1024, x_layout="col")
    profile = build_kernel(spec, "trn2", choose(spec, "trn2")[0].schedule).profile()
    assert profile.hbm_read_bytes + profile.hbm_write_bytes == spec.minimal_hbm_bytes()


def test_what_no_kernel_can_do_is_refused():
    spec = MatmulSpec(m=600, k=700, n=560, x_layout="col")
    for changes, words in (
        (CUT | {"w.resident": True}, "keep w not resident"),
        (CUT | {"k_segment": 384}, "multiple of x.chunk = 256"),
        ({"w.stream": True}, "drop w.stream"),
    ):
        with pytest.raises(SpecError, match=words):
            schedule_of(spec, changes).check(spec, get("trn2"))
    with pytest.raises(CapacityError, match=r"w.group need 16 PSUM banks"):
        schedule_of(spec, {"x.group": 8, "w.group": 2, "m_block": 1024, "w.block": 1024}).check(
            MatmulSpec(m=1024, k=700, n=1024, x_layout="col"), get("trn2")
        )
