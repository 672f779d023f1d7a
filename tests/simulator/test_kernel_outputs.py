"""The arrays that a run returns share memory with no other array that anybody holds."""

import numpy as np
from simulator_kernels import run

WRITES_ITS_INPUT = """
tile = load(a)
nisa.dma_copy(dst=a, src=tile)
return a
"""
TWICE = """
result = out(load(a))
return result, result
"""
A_PART = """
result = out(load(a))
return result[:, 0:4]
"""


def numbers():
    return np.arange(128 * 8, dtype=np.float32).reshape(128, 8)


def test_an_output_is_not_the_callers_array():
    given = numbers()
    output = run(WRITES_ITS_INPUT, given).output
    assert np.array_equal(output, numbers())
    output[...] = 0
    assert np.array_equal(given, numbers())


def test_two_outputs_never_share_memory():
    first, second = run(TWICE, numbers()).outputs
    assert not np.shares_memory(first, second)
    assert np.array_equal(first, second)


def test_a_part_of_a_tensor_does_not_hold_the_whole():
    output = run(A_PART, numbers()).output
    assert output.flags.owndata
    assert np.array_equal(output, numbers()[:, :4])
