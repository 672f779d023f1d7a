"""The block sizes that `make bench-neuronmm` tunes the paper's kernels over."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from nmm_compiler.kernels.linear.specs import LowRankSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import neuronmm

CHAIN = LowRankSpec(m=4096, k=2560, r=1664, n=9728)
UP = LowRankSpec(m=512, k=2048, r=1280, n=8192)


class Rival(neuronmm.Rival):
    """Answers a formula in place of the simulator, and counts the questions."""

    def __init__(self, spec, kernel=neuronmm.LOW_RANK, us=None):
        super().__init__(us, Path("x.py"), kernel, spec)
        object.__setattr__(self, "asked", [])

    def latency(self, m, blocks):
        self.asked.append((m, blocks))
        return self.timings(blocks)


@pytest.mark.parametrize("target", [(10, 13, 1, 1), (1, 1, 8, 4), (5, 2, 4, 2)])
def test_the_search_finds_the_least_of_a_bowl(target):
    def us(blocks):
        return 1 + sum(abs(math.log2(a / b)) for a, b in zip(blocks, target, strict=True))

    rival = Rival(dataclasses.replace(CHAIN, m=1024), us=us)
    assert rival.fastest([(8, 2, 8, 4)]) == target
    assert {m for m, _ in rival.asked} == {1024}


def test_many_tokens_halve_the_shortlist():
    rival = Rival(CHAIN, us=lambda blocks: None if blocks[0] > 4 else float(sum(blocks)))
    assert rival.fastest([(8, 2, 8, 4)]) == (1, 1, 1, 1)
    asked = {m: [blocks for at, blocks in rival.asked if at == m] for m in (1024, 2048, 4096)}
    assert sum(map(len, asked.values())) == len(rival.asked)
    assert (len(asked[2048]), len(asked[4096])) == neuronmm.SHORTLIST
    ranked = sorted(set(asked[1024]), key=lambda blocks: rival.timings(blocks) or math.inf)
    assert set(asked[4096]) < set(asked[2048]) == set(ranked[:5])
