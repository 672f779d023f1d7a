"""The block sizes that `make bench-neuronmm` tunes the paper's kernels over."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import neuronmm

CHAIN = neuronmm.Job("x.py", "trn1", "reused", "Qwen3-4B", "up", 4096, "tuned")
DENSE = neuronmm.Job("x.py", "trn1", "reused", "Llama-3.2-1B", "up", 512, "tutorial")


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


def test_many_tokens_take_the_shortlist_of_the_largest_block_of_them():
    clock = Clock(CHAIN, lambda blocks: None if blocks[0] > 4 else float(sum(blocks)))
    found = neuronmm.fastest(clock, 4096, [(8, 2, 8, 4)])
    assert found[0] == (1, 1, 1, 1)
    assert len(found) == neuronmm.SHORTLIST
    assert {m for m, _ in clock.asked} == {1024}
    assert all(clock.us(blocks) is not None for blocks in found)


def test_gate_and_up_share_one_dense_kernel_run_twice(monkeypatch):
    monkeypatch.setattr(neuronmm.Job, "made_by", "digest")
    gated = neuronmm.Job("x.py", "trn1", "reused", "Qwen3-4B", "gated", 1, "dense")
    assert (gated.times, gated.key) == (2, "digest/trn1/reused/Qwen3-4B/up/1/dense")
    assert (CHAIN.times, CHAIN.kernel) == (1, "fused_three_mm_XTUV")


def test_the_page_and_the_readme_say_what_the_rows_give():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "neuronmm.md").read_text("utf-8")
    found = {"dense": [], "tuned": [], "shipped": []}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in neuronmm.MODELS:
            *us, dense, tuned, shipped = (float(cell.rstrip("x")) for cell in cells[3:])
            theirs = us[neuronmm.HOW.index("shipped")], us[neuronmm.HOW.index("tuned")]
            strongest = min(us[neuronmm.HOW.index(how)] for how in ("tutorial", "dense"))
            ours = us[neuronmm.HOW.index("ours")]
            assert dense == pytest.approx(strongest / ours, abs=0.0061)
            assert (shipped, tuned) == pytest.approx([v / ours for v in theirs], abs=0.0061)
            for name, value in zip(found, (dense, tuned, shipped), strict=True):
                found[name].append(value)
    readme = (root / "README.md").read_text("utf-8")
    assert f"[{len(found['tuned'])} shapes](docs/neuronmm.md)" in readme
    for name, title in (
        ("dense", "the strongest dense kernel"), ("tuned", "the paper's kernel, tuned"),
        ("shipped", "the paper's kernel, its authors' fixed blocks"),
    ):  # fmt: skip
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {title} |"))
        mean, least, most = (cell.strip() for cell in row.strip("|").split("|")[1:])
        assert f"{mean} ({least} to {most})" in readme
        values = found[name]
        assert [float(v.rstrip("x")) for v in (mean, least, most)] == pytest.approx(
            [sum(values) / len(values), min(values), max(values)], abs=0.0061
        )
