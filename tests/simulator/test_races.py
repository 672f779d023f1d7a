"""Two programs that write different values to one place, with no wait between, are warned of."""

import numpy as np
import pytest
from simulator_kernels import run

WRITES = """
result = nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name="result")
tile = nl.ndarray((128, 8), nl.float32, nl.sbuf)
core = nl.program_id(0)
nisa.memset(dst=tile, value={zeros})
nisa.dma_copy(dst=result, src=tile)
{between}
nisa.memset(dst=tile, value=1 + core)
half = nl.ds(core * 64, 64)
{store}
return result
"""
DIRECT = "nisa.dma_copy(dst=result[half, :], src=tile[0:64, :])"
SCATTERED = """
rows = nl.ndarray((64, 1), nl.int32, nl.sbuf)
nisa.iota(dst=rows, pattern=[[1, 1]], offset=core * 64, channel_multiplier=1)
nisa.dma_copy(dst=result.ap(pattern=[[8, 64], [1, 8]], offset=0, vector_offset=rows,
                            indirect_dim=0), src=tile[0:64, :])
"""
BARRIER = "nisa.core_barrier(result, (0, 1))"
EXCHANGE = """
other = nl.ndarray((128, 8), nl.float32, nl.sbuf)
nisa.sendrecv(src=tile, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
"""


def races(zeros="0", between="", store=DIRECT):
    done = run(WRITES.format(zeros=zeros, between=between, store=store), grid=2)
    return done.output, [w for w in done.warnings if "two programs write to one place" in w]


@pytest.mark.parametrize("store", [DIRECT, SCATTERED])
def test_zeros_of_the_other_program_over_what_one_has_stored(store):
    output, found = races(store=store)
    assert len(found) == 1
    assert "512 of 1024 elements that program 1 writes to 'result' (128, 8)" in found[0]
    assert np.all(output[:64] == 1), "in step, both programs' zeros came first"
    assert np.all(output[64:] == 2)


@pytest.mark.parametrize("store", [DIRECT, SCATTERED])
@pytest.mark.parametrize("between", [BARRIER, EXCHANGE])
def test_programs_that_wait_for_each_other_do_not_race(between, store):
    output, found = races(between=between, store=store)
    assert not found
    assert np.all(output[:64] == 1)
    assert np.all(output[64:] == 2)


LATE = """
result = nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name="result")
tile = nl.ndarray((128, 8), nl.float32, nl.sbuf)
core = nl.program_id(0)
nisa.memset(dst=tile, value=1 + core)
if core == 1:
    nisa.dma_copy(dst=result[0:64, :], src=tile[0:64, :])
nisa.dma_copy(dst=result, src=tile)
return result
"""


def test_of_two_racing_writes_the_one_with_the_higher_number_stays():
    output = run(LATE, grid=2).output
    assert np.all(output == 2), "program 1's second write is later than program 0's first"
    output = run(WRITES.format(zeros="0", between="", store=DIRECT), grid=2).output
    assert np.all(output[:64] == 1), "program 0's second write is later than program 1's first"


def test_equal_values_are_no_race():
    """NaN too: bits are compared."""
    body = """
    result = nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name="result")
    nisa.dma_copy(dst=result, src=load(a))
    return result
    """
    given = np.full((128, 8), np.nan, np.float32)
    done = run(body, given, grid=2)
    assert not done.warnings
    assert np.isnan(done.output).all()
