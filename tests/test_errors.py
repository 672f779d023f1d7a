"""What every error of a kind has in common."""

import pytest

from nmm_compiler.errors import KernelArgumentError, UnknownNameError, nearest
from nmm_compiler.simulator.loading.loader import resolve

MANY = [f"task_{i}" for i in range(10_000)]


def test_known_names_are_listed_up_to_eight_the_nearest_first():
    assert nearest("x", ["b", "a"]) == "b, a"
    shown = nearest("task_77", MANY)
    assert shown.startswith("task_77, ")
    assert shown.endswith(" and 9,992 more")
    assert shown.count(", ") == 7
    text = str(UnknownNameError("task", "task_x" * 1000, MANY, ("FILE.py",)))
    assert len(text) < 600
    assert text.endswith("; or FILE.py)")


def test_a_file_of_many_kernels_is_not_listed_whole(tmp_path):
    file = tmp_path / "k.py"
    file.write_text("".join(f"def kernel_{i}(a):\n    return a\n" for i in range(500)))
    with pytest.raises(KernelArgumentError) as error:
        resolve(f"{file}:kernal_7")
    assert "did you mean 'kernel_7'" in str(error.value)
    assert "and 492 more" in str(error.value)
