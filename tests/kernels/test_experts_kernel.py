"""Experts in one kernel: an index chooses gated MLPs for each token, gates weigh the results."""

import dataclasses

import numpy as np
import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, prove, random_arrays
from nmm_compiler.codegen.choose import rank
from nmm_compiler.errors import OutOfBoundsError, SpecError
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.targets import get

SMALL = ExpertsSpec(m=5, k=256, n=128, groups=12, top_k=2)
GPT_OSS = {
    "gate_up_bias": True, "down_bias": True, "limit": 7.0, "slope": 1.702, "plus": 1.0,
    "halves": "interleaved",
}  # fmt: skip
INDEXES = {
    "none": [[-1, -1]] * 5,
    "one for all": [[7, -1]] * 5,
    "some": [[0, 11], [11, 0], [-1, 3], [3, 0], [5, 6]],
}


def ways(spec, target="trn2"):
    """Return one schedule for each way through the groups."""
    firsts = {}
    for choice in rank(spec, get(target)):
        firsts.setdefault((choice.schedule.way, choice.schedule.at_once), choice.schedule)
    return firsts


def run(spec, index, schedule=None):
    """Return the operands and the results of a kernel for this index."""
    arrays = list(random_arrays(spec))
    place = [tensor.name for tensor in spec.inputs()].index("index")
    arrays[place] = np.asarray(index, np.int32)
    kernel = build_kernel(spec, "trn2", schedule)
    return arrays, kernel.simulate(*arrays, mode="functional").outputs


def right(spec, arrays, outputs):
    limits = spec.reference(*arrays), spec.error_bound(*arrays), spec.typical_error(*arrays)
    return compare("experts", outputs, *((one,) for one in limits)).passed


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"m": 1, "top_k": 4},
        {"m": 1, "k": 200, "n": 200, **GPT_OSS},
        {"m": 3, "k": 320, "n": 96, "dtype": "float16", **GPT_OSS},
        {"m": 40, "groups": 3, "top_k": 1, "activation": "gelu_tanh"},
        {"m": 128, "groups": 2, "dtype": "float32", "n": 64},
        {"weight_layout": "col", "n": 200, "k": 136},
        {"m": 1, "lnc": 2, "n": 192, "k": 384, "down_bias": True},
        {"m": 4, "lnc": 2, "n": 320, **GPT_OSS},
        {"m": 2, "groups": 300, "top_k": 3},
        {"m": 140, "groups": 3, "n": 64},
    ],
    ids=str,
)
def test_the_kernel_is_right_against_float64(fields, target):
    assert prove(build_kernel(dataclasses.replace(SMALL, **fields), target)).passed


@pytest.mark.parametrize("way", [("distinct", 1), ("distinct", 2), ("distinct", 8), ("all", 1)])
@pytest.mark.parametrize("name", INDEXES)
def test_any_index_of_groups_in_every_way(way, name):
    arrays, outputs = run(SMALL, INDEXES[name], ways(SMALL)[way])
    assert right(SMALL, arrays, outputs)


def test_one_token_with_picks_of_none():
    spec = dataclasses.replace(SMALL, m=1)
    for index in ([[3, -1]], [[-1, -1]], [[4, 4]]):
        assert right(spec, *run(spec, index))


@pytest.mark.parametrize("beyond", [-2, 12])
def test_an_index_out_of_range_is_an_error(beyond):
    one = dataclasses.replace(SMALL, m=1)
    with pytest.raises(OutOfBoundsError, match="runtime index"):
        run(one, [[beyond, 0]])
    for schedule in ways(SMALL).values():
        with pytest.raises(OutOfBoundsError, match="runtime index"):
            run(SMALL, [[0, 1], [2, 3], [beyond, 1], [0, 5], [6, 7]], schedule)


def test_each_chosen_group_is_read_once():
    schedule = ways(SMALL)["distinct", 1]
    kernel = build_kernel(SMALL, "trn2", schedule)
    one = 3 * 256 * 128 * 2
    read = {}
    for name, index in INDEXES.items():
        arrays = list(random_arrays(SMALL))
        arrays[-2] = np.asarray(index, np.int32)
        read[name] = kernel.simulate(*arrays).profile.hbm_read_bytes
    assert read["one for all"] - read["none"] == one
    assert read["some"] - read["none"] == 5 * one


def test_the_reference_is_a_sum_of_gated_mlps():
    arrays = random_arrays(SMALL)
    x, gate_up, down, index, gates = (np.asarray(a, np.float64) for a in arrays)
    wanted = np.zeros((5, 256))
    for t in range(5):
        for j in range(2):
            if index[t, j] >= 0:
                g, u = np.split(x[t] @ gate_up[int(index[t, j])], 2)
                h = g / (1 + np.exp(-g)) * u
                wanted[t] += gates[t, j] * (h @ down[int(index[t, j])])
    np.testing.assert_allclose(SMALL.reference(*arrays), wanted, rtol=1e-9, atol=1e-12)


def test_expected_groups_follow_tokens_and_picks():
    assert dataclasses.replace(SMALL, m=1).expected == pytest.approx(2)
    assert SMALL.expected == pytest.approx(12 * (1 - (5 / 6) ** 5))
    assert dataclasses.replace(SMALL, distinct=3.0).expected == 3.0
    few = dataclasses.replace(SMALL, m=4, distinct=2.0)
    assert few.minimal_hbm_bytes() < dataclasses.replace(SMALL, m=4).minimal_hbm_bytes()


def test_selected_experts_keep_three_quarters_of_the_roofline():
    gpt_oss = ExpertsSpec(m=1, k=2880, n=2880, groups=32, top_k=4, **GPT_OSS)
    qwen = ExpertsSpec(m=1, k=2048, n=768, groups=128, top_k=8)
    for spec in (gpt_oss, qwen):
        profile = build_kernel(spec).profile()
        assert spec.roofline_us(get("trn2")) >= 0.75 * profile.latency_us


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 13}, "top_k is 13 of 12 groups"),
        ({"slope": 1.7}, "belong to a limit"),
        ({"limit": -1.0}, "number of 0 or more"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(SpecError, match=words):
        build_kernel(dataclasses.replace(SMALL, **fields))
    with pytest.raises(SpecError, match="trn2"):
        build_kernel(SMALL, "trn1")
