"""Every write goes where a register says: the view of a selected part, and nothing beside it."""

import numpy as np
import pytest
from simulator_kernels import run

BODY = """
t = nl.full((32, 2, 8), 7.0, nl.float32, nl.{memory})
one = nl.full((32, 8), 1.0, nl.float32)
d = t.select(1, nisa.register_alloc(1))
{call}
return out(t)
"""
CALLS = {
    "memset": ("sbuf", "nisa.memset(dst=d, value=3.0)", 3.0),
    "memset in PSUM": ("psum", "nisa.memset(dst=d, value=3.0)", 3.0),
    "tensor_copy": ("sbuf", "nisa.tensor_copy(dst=d, src=one)", 1.0),
    "nc_stream_shuffle": ("sbuf", "nisa.nc_stream_shuffle(d, one, list(range(32)))", 1.0),
    "nc_matmul": ("psum", "nisa.nc_matmul(d, one[:, 0:1].broadcast(1, 32), one, accumulate=False)",
                  32.0),
    "nc_matmul that adds": (
        "psum",
        "for turn in range(2):\n"
        "    nisa.nc_matmul(d, one[:, 0:1].broadcast(1, 32), one, accumulate=turn > 0)",
        64.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_write_by_a_register(name):
    memory, call, value = CALLS[name]
    output = run(BODY.format(memory=memory, call=call)).output
    assert (output[:, 0] == 7).all()
    assert (output[:, 1] == value).all()


@pytest.mark.parametrize("memory", ["sbuf", "shared_hbm"])
def test_a_register_is_stored_by_a_register(memory):
    body = f"""
    t = nl.full((1, 3, 1), 7, nl.int32, nl.{memory})
    nisa.register_store(t.select(1, nisa.register_alloc(2)), nisa.register_alloc(5))
    return out(t) if t.buffer is nl.sbuf else t
    """
    assert run(body).output.reshape(-1).tolist() == [7, 7, 5]


def test_a_received_tile_is_put_by_a_register():
    body = """
    me = nl.program_id(0)
    r = nl.ndarray((2, 32, 2, 8), nl.float32, nl.shared_hbm)
    t = nl.full((32, 2, 8), 7.0, nl.float32)
    mine = nl.full((32, 8), float(me), nl.float32)
    d = t.select(1, nisa.register_alloc(1))
    nisa.sendrecv(src=mine, dst=d, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
    nisa.dma_copy(dst=r[me], src=t)
    return r
    """
    output = run(body, grid=2).output
    assert (output[:, :, 0] == 7).all()
    assert [np.unique(part).tolist() for part in output[:, :, 1]] == [[1.0], [0.0]]
