"""What neuronx-cc makes of a Beta 1 kernel on trn2, as its published counters and times show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from beta1_helpers import run, values

from nmm_compiler.simulator.run import ArraySpec

sys.path.insert(0, str(Path(__file__).parents[1]))

COPIES = """
    r = nl.ndarray((128, 8 * 512), dtype=nl.float32, buffer=nl.shared_hbm)
    t = nl.load(a)
    for n in nl.affine_range(8):
        p = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        p[...] = nisa.nc_matmul(t[:, 0:128], t[:, 0:512])
        nl.store(r[:, nl.ds(512 * n, 512)], nl.copy(p, dtype=nl.float32))
    return r
"""


def engines_of(result, op):
    line = result.profile.timeline
    found = [line.placed.get(i, ins.engine) for i, ins in enumerate(line.trace.instructions)
             if ins.op == op]  # fmt: skip
    return {engine: found.count(engine) for engine in ("vector", "scalar")}


def test_copies_that_leave_their_engine_open_are_shared_on_trn2():
    a = ArraySpec((128, 512), "float32")
    shared = run(COPIES, a, mode="timing", target="trn2")
    assert engines_of(shared, "tensor_copy") == {"vector": 4, "scalar": 4}
    assert any("whichever of VectorE and ScalarE" in line for line in shared.profile.unmodelled)
    older = run(COPIES, a, mode="timing", target="trn1")
    assert engines_of(older, "tensor_copy") == {"vector": 0, "scalar": 8}


def test_a_copy_goes_where_it_starts_first():
    """VectorE works on a long sum meanwhile, so ScalarE makes all copies."""
    body = COPIES.replace(
        "    for n in", "    s = nisa.tensor_reduce(nl.add, t, axis=[1])\n    for n in"
    )
    result = run(
        body.replace("    return r", "    nl.store(r[:, 0:1], s)\n    return r"),
        ArraySpec((128, 8192), "float32"), mode="timing", target="trn2",
    )  # fmt: skip
    assert engines_of(result, "tensor_copy") == {"vector": 0, "scalar": 8}


WEIGHTS = """
    r = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    x = nl.load(a)
    p = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(16):
        w = nl.load(b[nl.ds(128 * k, 128), :])
        p += nl.matmul(x[:, nl.ds(128 * k, 128)], w)
    nl.store(r, nl.copy(p))
    return r
"""


def turn_us(body, target):
    """Return what one more load and product takes."""
    shapes = ArraySpec((128, 2048), "float32"), ArraySpec((2048, 512), "float32")
    result = run(body, *shapes, mode="timing", target=target)
    line = result.profile.timeline
    loads = [line.start[i] for i, ins in enumerate(line.trace.instructions)
             if ins.op == "dma_copy" and ins.writes[0].memory == "sbuf"]  # fmt: skip
    return (loads[-1] - loads[1]) / (len(loads) - 2)


def test_a_load_for_nl_matmul_waits_for_the_product_before_it_on_trn2():
    turned = WEIGHTS.replace("nl.matmul(", "nl.matmul(transpose_x=True, x=").replace(
        ", w)", ", y=w)"
    )
    kept = WEIGHTS.replace("    for k", "    w = nl.load(b[0:128, :])\n    for k").replace(
        "        w = nl.load(b[nl.ds(128 * k, 128), :])\n", ""
    )
    assert turn_us(WEIGHTS, "trn2") > 3.0  # 3.7 us published for matmul_add_rmsnorm
    assert turn_us(turned, "trn2") < 2.0
    assert turn_us(WEIGHTS, "trn1") < 2.0
    shapes = ArraySpec((128, 2048), "float32"), ArraySpec((2048, 512), "float32")
    once = run(kept, *shapes, mode="timing", target="trn2").profile
    again = run(WEIGHTS, *shapes, mode="timing", target="trn2").profile
    assert once.latency_us < again.latency_us / 2


ROWS = """
    r = nl.ndarray((8 * 128, 1024), dtype=nl.float32, buffer=nl.shared_hbm)
    g = nl.load(b)
    for m in nl.affine_range(8):
        t = nl.load(a[nl.ds(128 * m, 128), :])
        nl.store(r[nl.ds(128 * m, 128), :], nl.multiply(t, g.broadcast_to((128, 1024))))
    return r
"""


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_a_row_is_spread_over_the_partitions_once(target):
    a, g = values(8 * 128, 1024), values(1, 1024)
    result = run(ROWS, a, g, mode="full", target=target)
    assert (result.output == a * g).all()
    assert result.profile.repeated_instructions == 7 * 2 * 2  # two banks: a product, a copy each
    busy = result.profile.engine_busy_us["tensor"]
    changed = ROWS.replace(
        "        t = nl.load(a", "        g[...] = g * 1.0\n        t = nl.load(a"
    )
    again = run(changed, a, g, mode="full", target=target)
    assert (again.output == a * g).all()
    assert again.profile.repeated_instructions == 0
    assert again.profile.engine_busy_us["tensor"] > 6 * busy


def test_a_tile_that_something_else_writes_is_spread_again():
    body = ROWS.replace(
        "nl.store(r[nl.ds(128 * m, 128), :], nl.multiply(t, g.broadcast_to((128, 1024))))",
        "w = nl.broadcast_to(g, shape=(128, 1024))\n"
        "        w[:, 0:1] = t[:, 0:1]\n"
        "        nl.store(r[nl.ds(128 * m, 128), :], nl.multiply(t, w))",
    )
    a, g = values(8 * 128, 1024), values(1, 1024)
    result = run(body, a, g, mode="full", target="trn2")
    assert (result.output[:, 1:] == (a * g)[:, 1:]).all()
    assert result.profile.repeated_instructions == 0
