"""The NeuronMM paper's kernels as their authors publish them, against float64; small shapes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import beta1_kernels

CLONE = "git clone https://github.com/dinghongsong/NeuronMM; pytest tests/simulator --neuronmm DIR"
# tokens, features, rank, outputs
SIZES = [(1, 130, 100, 515), (130, 300, 200, 700), (600, 256, 128, 512)]


@pytest.fixture
def checkout(request):
    """The clone that --neuronmm names."""
    folder = request.config.getoption("--neuronmm", default=None)
    if folder is None:
        pytest.skip(CLONE)
    return Path(folder)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", beta1_kernels.PAPER_KERNELS)
def test_a_paper_kernel_is_right(checkout, name, sizes, target):
    beta1_kernels.paper_kernel(checkout / "test_speedup.py", name, sizes, target)


def test_the_bounds_tell_a_wrong_kernel(checkout, tmp_path):
    """A kernel that leaves out the last block of a contraction is wrong by both measures."""
    text = (checkout / "test_speedup.py").read_text("utf-8")
    right = "M_n_blocks = (M + M_block_size - 1) // M_block_size"
    assert right in text
    changed = tmp_path / "test_speedup.py"
    changed.write_text(text.replace(right, "M_n_blocks = M // M_block_size"), "utf-8")
    with pytest.raises(beta1_kernels.WrongError, match=r"^trn1: largest error .*, norm "):
        beta1_kernels.paper_kernel(changed, "fused_three_mm_XTUV", (4, 1100, 128, 512), "trn1")
