"""Experts in one kernel: an index chooses gated MLPs for each token, gates weigh the results."""

import dataclasses

import numpy as np
import pytest
from judge import prove_right, run_with_index, within

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import CapacityError, NmmError, OutOfBoundsError, SpecError
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.kernels.experts.schedule import ExpertsSchedule
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


MANY = dataclasses.replace(SMALL, m=150, groups=5)
MANY_INDEXES = {
    "none": [[-1, -1]] * 150,
    "one token": [[-1, -1]] * 149 + [[2, 4]],
    "all in one": [[3, -1]] * 150,
    "one twice": [[4, 4], [1, -1]] * 75,
    "empty groups": [[0, 4]] * 31 + [[4, 2]] * 33 + [[-1, 2]] * 86,
}


def ways(spec, target="trn2"):
    """Return one schedule for each way through the groups."""
    firsts = {}
    for choice in rank(spec, get(target)):
        way = choice.schedule.way, choice.schedule.at_once
        firsts.setdefault(way, choice.schedule)
    return firsts


def in_blocks(tokens, at_once, **fields):
    return ExpertsSchedule(
        way="blocks", at_once=at_once, tokens=tokens, block=128, down_block=256, **fields
    )


PLAIN = [
    {"m": 1, "top_k": 4},
    {"m": 1, "k": 200, "n": 200, **GPT_OSS},
    {"m": 3, "k": 320, "n": 96, "dtype": "float16", **GPT_OSS},
    {"m": 40, "groups": 3, "top_k": 1, "activation": "gelu_tanh"},
    {"m": 128, "groups": 2, "dtype": "float32", "n": 64},
    {"weight_layout": "col", "n": 200, "k": 136},
    {"m": 1, "lnc": 2, "n": 192, "k": 384, "down_bias": True},
    {"m": 1, "lnc": 2, "top_k": 3, "n": 192, "k": 384, "down_bias": True},
    {"m": 40, "lnc": 2, "groups": 4, "top_k": 3, **GPT_OSS},
    {"m": 2, "groups": 300, "top_k": 3},
    {"m": 1, "lnc": 2, "top_k": 6, "n": 40},
    {"m": 7, "lnc": 2, "n": 32, "k": 520, "activation": "gelu_tanh"},
    {"m": 40, "lnc": 2, "groups": 8, "top_k": 4, "n": 16},
    {"m": 140, "groups": 3, "n": 64},
    {"m": 129, "groups": 140, "k": 200, "n": 136, **GPT_OSS},
    {"m": 300, "groups": 2, "top_k": 1, "dtype": "float32", "k": 128, "n": 96},
    {"m": 131, "lnc": 2, "n": 96, "top_k": 4, "weight_layout": "col", "down_bias": True},
    {"m": 257, "lnc": 2, "n": 320, **GPT_OSS},
]
JOINED = {**GPT_OSS, "halves": "joined"}
STORED = [
    {"weight": "fp8"},
    {"weight": "fp8", "k": 200, "n": 200, **GPT_OSS},
    {"weight": "fp8", "m": 1, "k": 200, "ranks": (16, 8)},
    {"weight": "fp8", "m": 1, "lnc": 2, "top_k": 3, "n": 320, "ranks": (8, 8), "down_bias": True},
    {"weight": "fp8", "m": 150, "groups": 5},
    {"weight": "fp8", "m": 150, "groups": 5, "ranks": (16, 40), **GPT_OSS},
    # sums of x u that take turns, and a v of down whose parts share the partitions
    {"weight": "fp8", "m": 1, "lnc": 2, "top_k": 3, "k": 512, "n": 1024, "ranks": (64, 32)},
    {"weight": "factors", "ranks": (16, 24)},
    {"weight": "factors", "m": 1, "lnc": 2, "top_k": 3, "ranks": (16, 24)},
    {"weight": "factors", "m": 40, "lnc": 2, "groups": 4, "ranks": (8, 24), **JOINED},
    {"weight": "factors", "m": 140, "groups": 4, "ranks": (160, 24), "dtype": "float32"},
    {"ranks": (16, 0)},
    {"ranks": (0, 24), "weight_layout": "col", "m": 140, "groups": 3, "down_bias": True},
]
BLOCKS_OF_32 = [
    {"weight": "mxfp4"},
    {"weight": "mxfp4", "m": 1, "lnc": 2, "top_k": 3, "n": 512},
    {"weight": "mxfp4", "m": 2, "groups": 4, "k": 2048, "n": 256, "ranks": (32, 32), **JOINED},
    {"weight": "mxfp4", "m": 3, "k": 288, "n": 640, "ranks": (16, 40)},
    {"weight": "mxfp4", "m": 5, "groups": 4, "k": 512, "n": 512, "ranks": (32, 64)},
    {"weight": "mxfp4", "m": 40, "lnc": 2, "groups": 4, "ranks": (8, 0), "dtype": "float16"},
    {"weight": "mxfp8", "m": 150, "groups": 5, "k": 320, "n": 1100, **JOINED},
    {
        "weight": "mxfp8_e5m2",
        "m": 140,
        "groups": 4,
        "k": 288,
        "n": 644,
        "ranks": (16, 40),
        **JOINED,
    },
]


@pytest.mark.parametrize(
    ("fields", "target"),
    [(fields, "trn2") for fields in PLAIN + STORED]
    + [(fields, "trn3") for fields in (PLAIN + STORED)[::6] + BLOCKS_OF_32],
    ids=str,
)
def test_the_kernel_is_right_against_float64(fields, target):
    prove_right(build_kernel(dataclasses.replace(SMALL, **fields), target))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"weight": "int8"}, "weight"),
        ({"weight": "factors", "ranks": (8, 0)}, "ranks are"),
        ({"weight": "fp8", "weight_layout": "col"}, "layout 'row'"),
        ({"weight": "fp8", "dtype": "float32"}, "bfloat16 or float16"),
        ({"weight": "mxfp4", "halves": "interleaved"}, "'joined'"),
        ({"weight": "mxfp4", "k": 250}, "whole 32s"),
        ({"top_k": 13}, "top_k is 13 of 12 groups"),
        ({"slope": 1.7}, "belong to a limit"),
        ({"limit": -1.0}, "number of 0 or more"),
    ],
    ids=str,
)
def test_forms_that_no_kernel_takes_are_refused(fields, said):
    with pytest.raises(NmmError, match=said):
        dataclasses.replace(SMALL, **fields)


def test_fewer_bytes_are_read_and_take_less_time():
    """Qwen3-30B-A3B's experts, one token."""
    times, read = [], []
    for weight, ranks in (("", (0, 0)), ("fp8", (0, 0)), ("mxfp4", (32, 32)), ("mxfp4", (0, 0))):
        spec = ExpertsSpec(m=1, k=2048, n=768, groups=128, top_k=8, weight=weight, ranks=ranks)
        times.append(choose(spec, get("trn3"))[0].simulated_us)
        read.append(spec.minimal_hbm_bytes())
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.45 * times[0]
    assert read == sorted(read, reverse=True)
    assert read[-1] < 0.28 * read[0]
    assert times[-2] < 1.35 * times[-1]  # 1.16 by bytes; 1.48 where sums and loads wait


@pytest.mark.parametrize("way", [("distinct", 1), ("distinct", 2), ("distinct", 8)])
@pytest.mark.parametrize(("lnc", "n"), [(1, 128), (2, 40)])
@pytest.mark.parametrize("name", INDEXES)
def test_any_index_of_groups_in_every_way(way, lnc, n, name):
    spec = dataclasses.replace(SMALL, lnc=lnc, n=n)
    assert within(spec, *run_with_index(spec, INDEXES[name], ways(spec)[way]))


@pytest.mark.parametrize(
    ("tokens", "at_once", "lnc"), [(32, 8, 1), (64, 1, 2), (128, 4, 2), (512, 2, 1)]
)
@pytest.mark.parametrize("name", MANY_INDEXES)
def test_any_index_of_groups_in_blocks(name, tokens, at_once, lnc):
    spec, split = dataclasses.replace(MANY, lnc=lnc), {"split": "groups"} if lnc == 2 else {}
    schedule = in_blocks(tokens, at_once, **split)
    assert within(spec, *run_with_index(spec, MANY_INDEXES[name], schedule))


@pytest.mark.parametrize("beyond", [-2, "groups", 1 << 30])
def test_an_index_out_of_range_is_an_error(beyond):
    every = [(dataclasses.replace(SMALL, m=1), None)]
    every += [(SMALL, schedule) for schedule in ways(SMALL).values()]
    for lnc, split in ((1, {}), (2, {"split": "groups"})):
        every.append((dataclasses.replace(MANY, lnc=lnc), in_blocks(64, 2, **split)))
    for spec, schedule in every:
        index = np.zeros((spec.m, 2), np.int32)
        index[-spec.m // 2, 1] = spec.groups if beyond == "groups" else beyond
        with pytest.raises(OutOfBoundsError, match="runtime index"):
            run_with_index(spec, index, schedule)


@pytest.mark.parametrize("m", [1, 8, 150])
def test_two_cores_take_less_time_than_one(m):
    """Narrow experts too, as tensor parallelism leaves them."""
    one = ExpertsSpec(m=m, k=1024, n=192, groups=32, top_k=8)
    two = dataclasses.replace(one, lnc=2)
    assert choose(two)[0].simulated_us < 0.8 * choose(one)[0].simulated_us


def bytes_read(kernel, indexes, figure="hbm_read_bytes"):
    """Return what a kernel reads for each of several indexes, by its name."""
    read = {}
    for name, index in indexes.items():
        arrays = list(random_arrays(kernel.spec))
        arrays[-2] = np.asarray(index, np.int32)
        read[name] = getattr(kernel.simulate(*arrays).profile, figure)
    return read


def test_blocks_read_each_group_once():
    read = bytes_read(build_kernel(MANY, "trn2", in_blocks(512, 1)), MANY_INDEXES)
    block = (3 * 128 + 512) * 256 * 2  # weights, and the rows of x
    assert read["all in one"] - read["none"] == block
    assert read["empty groups"] - read["none"] == 3 * block


@pytest.mark.parametrize("n", [128, 24])
def test_one_token_with_picks_of_none(n):
    spec = dataclasses.replace(SMALL, m=1, n=n)
    for index in ([[3, -1]], [[-1, -1]], [[4, 4]]):
        assert within(spec, *run_with_index(spec, index))


def test_one_token_with_most_picks_elsewhere_reads_those_that_are_here():
    spec = ExpertsSpec(m=1, k=256, n=128, groups=12, top_k=4, distinct=1.0)
    schedule = choose(spec)[0].schedule
    assert schedule.way == "distinct"
    for index in ([[3, -1, -1, -1]], [[-1] * 4], [[4, 4, 2, 0]]):
        assert within(spec, *run_with_index(spec, index, schedule))
    assert choose(dataclasses.replace(spec, lnc=2))[0].schedule.way == "picks"


def test_narrow_groups_share_the_products():
    """A stack of four groups takes hardly more time than the first of them."""
    spec = ExpertsSpec(m=8, k=4096, n=32, groups=128, top_k=8)
    alone = choose(dataclasses.replace(spec, down_bias=True))[0]  # with a bias each is alone
    assert choose(spec)[0].simulated_us < 0.5 * alone.simulated_us


def test_each_chosen_group_is_read_once():
    kernel = build_kernel(SMALL, "trn2", ways(SMALL)["distinct", 1])
    one = 3 * 256 * 128 * 2
    for figure in ("hbm_read_bytes", "minimal_hbm_bytes"):
        read = bytes_read(kernel, INDEXES, figure)
        assert read["one for all"] - read["none"] == one
        assert read["some"] - read["none"] == 5 * one


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


def test_a_prompt_reads_experts_once_at_four_fifths_of_the_roofline():
    qwen = ExpertsSpec(m=512, k=2048, n=768, groups=128, top_k=8)
    assert qwen.minimal_hbm_bytes() < 1.01 * 128 * 3 * 2048 * 768 * 2
    kernel = build_kernel(qwen)
    assert kernel.schedule.way == "blocks"
    assert qwen.roofline_us(get("trn2")) >= 0.8 * kernel.profile().latency_us


@pytest.mark.parametrize("m", [1, 32, 512])
def test_whole_experts_of_mixtral_fit(m):
    """A panel of 512 outputs of down, of which two stand in SBUF, would fill it."""
    assert rank(ExpertsSpec(m=m, k=4096, n=14336, groups=8, top_k=2), get("trn2"))


def test_schedules_that_are_refused():
    for spec, schedule, words in (
        (SMALL, in_blocks(32, 1), "more than 32 tokens"),
        (MANY, in_blocks(48, 1), "pass tokens as one of"),
        (MANY, ways(SMALL)["distinct", 1], "more than 128 tokens have 'blocks'"),
        (dataclasses.replace(MANY, m=1 << 16, groups=2), in_blocks(32, 1), "split the tokens"),
    ):
        with pytest.raises((CapacityError, SpecError), match=words):
            schedule.check(spec, get("trn2"))


@pytest.mark.parametrize(
    ("weight", "target", "words"), [("mxfp4", "trn2", "multiplied by trn3"), ("", "trn1", "trn2")]
)
def test_what_a_target_lacks_is_refused(weight, target, words):
    with pytest.raises(SpecError, match=words):
        build_kernel(dataclasses.replace(SMALL, weight=weight), target)
