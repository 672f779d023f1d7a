"""A proof compares every element with its own bound; wrong shapes and NaN fail."""

import numpy as np
import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, prove, random_arrays
from nmm_compiler.kernels.linear.specs import LowRankSpec


def test_a_right_kernel_passes_and_prints_its_share_of_the_bound():
    spec = LowRankSpec(m=9, k=130, r=17, n=65, dtype="float32")
    proof = prove(build_kernel(spec))
    assert proof.passed
    assert 0 < proof.max_bound_share <= 1
    assert proof.elements == 9 * 65
    assert "passed" in str(proof)


def test_one_wrong_element_fails():
    spec = LowRankSpec(m=4, k=8, r=2, n=8, dtype="float32")
    arrays = random_arrays(spec)
    want, bound = spec.reference(*arrays), spec.error_bound(*arrays)
    assert compare("right", (want.astype(np.float32),), (want,), (bound,)).passed
    wrong = want.copy()
    wrong[1, 2] += 10 * bound[1, 2]
    assert not compare("wrong", (wrong,), (want,), (bound,)).passed


@pytest.mark.parametrize("spoil", ["nan", "shape", "missing"])
def test_nan_shape_and_missing_outputs_fail(spoil):
    want, bound = np.ones((2, 3)), np.full((2, 3), 1e-3)
    got = {
        "nan": (np.full((2, 3), np.nan),),
        "shape": (np.ones((3, 2)),),
        "missing": (),
    }[spoil]
    assert not compare("k", got, (want,), (bound,)).passed


def test_random_arrays_are_the_same_for_the_same_seed_only():
    spec = LowRankSpec(m=4, k=8, r=2, n=8)
    first, again, other = (random_arrays(spec, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
