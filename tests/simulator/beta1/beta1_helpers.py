"""Kernel text for tests of NKI Beta 1: a few lines of body become a file that imports neuronxcc."""

import functools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import simulator_kernels

HEADER = """\
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
import numpy as np
from neuronxcc.nki.language import par_dim


def out(tile, dtype=None):
    result = nl.ndarray(tile.shape, dtype=dtype or tile.dtype, buffer=nl.shared_hbm)
    nl.store(result, tile)
    return result


"""


run = functools.partial(simulator_kernels.run, header=HEADER)
"""Runs a body as a Beta 1 kernel whose arguments are a, b, c, ..."""


def ops(result):
    """Return the instructions of a run."""
    return [instruction.op for instruction in result.trace.instructions]


def values(*shape, seed=0):
    """Return normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
