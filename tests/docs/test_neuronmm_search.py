"""The block sizes that `make bench-neuronmm` tunes the paper's kernels over."""

import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import neuronmm
from neuronmm import ratios

CHAIN = neuronmm.Job("x.py", "trn1", "Qwen3-4B", "up", 4096, "tuned")
DENSE = neuronmm.Job("x.py", "trn1", "Llama-3.2-1B", "up", 512, "tutorial")


class Clock:
    """Answers a formula in place of the simulator, and counts the questions."""

    def __init__(self, job, us):
        self.job, self.us, self.asked = job, us, []

    def latency(self, m, blocks):
        self.asked.append((m, blocks))
        return self.us(blocks)


def test_block_sizes_are_divisors_and_two_and_four():
    # 2560 x 1664 x 9728, at most 1024 tokens: 20, 13, 8 and 19 tiles
    assert neuronmm.values(CHAIN, 1024) == [
        [1, 2, 4, 5, 10], [1, 2, 4, 13], [1, 2, 4, 8], [1, 2, 4],
    ]  # fmt: skip
    assert neuronmm.values(DENSE, 512) == [[1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 8, 16]]
    assert [v[0] for v in neuronmm.values(CHAIN, 1)] == [1, 1, 1, 1]


@pytest.mark.parametrize("target", [(10, 13, 1, 1), (1, 1, 8, 4), (5, 2, 4, 2)])
def test_the_search_finds_the_least_of_a_bowl(target):
    def us(blocks):
        return 1 + sum(abs(math.log2(a / b)) for a, b in zip(blocks, target, strict=True))

    clock = Clock(CHAIN, us)
    found = neuronmm.fastest(clock, 1024, [(8, 2, 8, 4)])
    assert found == [target]
    assert {m for m, _ in clock.asked} == {1024}


def test_many_tokens_halve_the_shortlist():
    clock = Clock(CHAIN, lambda blocks: None if blocks[0] > 4 else float(sum(blocks)))
    assert neuronmm.fastest(clock, 4096, [(8, 2, 8, 4)]) == [(1, 1, 1, 1)]
    asked = {m: [blocks for at, blocks in clock.asked if at == m] for m in (1024, 2048, 4096)}
    assert sum(map(len, asked.values())) == len(clock.asked)
    assert (len(asked[2048]), len(asked[4096])) == neuronmm.SHORTLIST
    ranked = sorted(set(asked[1024]), key=lambda blocks: clock.us(blocks) or math.inf)
    assert set(asked[4096]) < set(asked[2048]) == set(ranked[:5])


def test_the_readme_says_what_the_page_says():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "neuronmm.md").read_text("utf-8")
    readme = (root / "README.md").read_text("utf-8")
    shown = re.findall(r"\| (\d\.\d\dx) \| simulated \| `make bench-neuronmm` \|", readme)
    assert len(shown) == 2
    assert set(shown) <= set(re.findall(r"^\| the [^|]* \| (\d\.\d\dx) \|", page, re.M))


def test_ratios_are_over_the_faster_dense_kernel():
    us = {"shipped": 12.0, "tuned": 11.0, "tutorial": 14.0, "dense": 13.0, "ours": 10.0}
    assert ratios(us) == [1.3, 1.1, 1.2]
    assert ratios(us | {"tutorial": None, "shipped": None}) == [None, 1.1, None]
