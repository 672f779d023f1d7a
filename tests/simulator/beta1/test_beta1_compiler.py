"""What neuronx-cc makes of a Beta 1 kernel on trn2, as its published counters and times show."""

import pytest
from beta1_helpers import run
from trace_builder import starts

from nmm_compiler.simulator.run import ArraySpec

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
    found = [line.engine(i) for i, ins in enumerate(line.trace.instructions)
             if ins.op == op]  # fmt: skip
    return {engine: found.count(engine) for engine in ("vector", "scalar")}


@pytest.mark.parametrize(("target", "engine"), [("trn1", "scalar"), ("trn2", "vector")])
def test_copies_that_leave_their_engine_open_are_on_one(target, engine):
    result = run(COPIES, ArraySpec((128, 512), "float32"), mode="timing", target=target)
    assert engines_of(result, "tensor_copy") == {"vector": 0, "scalar": 0} | {engine: 8}


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
    loads = [starts(line)[i] for i, ins in enumerate(line.trace.instructions)
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
