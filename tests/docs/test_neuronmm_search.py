"""The block sizes that `make bench-neuronmm` tunes the paper's kernels over."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from nmm_compiler.kernels.linear.specs import LowRankSpec

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import neuronmm

CHAIN = LowRankSpec(m=4096, k=2560, r=1664, n=9728)


class Rival(neuronmm.Rival):
    """Answers a formula in place of the simulator."""

    def __init__(self, spec, kernel=neuronmm.LOW_RANK, us=None):
        super().__init__(us, Path("x.py"), kernel, spec)

    def latency(self, m, blocks):
        return self.timings(blocks)


@pytest.mark.parametrize("target", [(10, 13, 1, 1), (1, 1, 8, 4), (5, 2, 4, 2)])
def test_the_search_finds_the_least_of_a_bowl(target):
    def us(blocks):
        return 1 + sum(abs(math.log2(a / b)) for a, b in zip(blocks, target, strict=True))

    rival = Rival(dataclasses.replace(CHAIN, m=1024), us=us)
    assert rival.fastest([(8, 2, 8, 4)]) == target
