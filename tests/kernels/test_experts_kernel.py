"""Experts and adapters: an index chooses weights for each token, in one kernel."""

import dataclasses

import numpy as np
import pytest

from kernels.judge import first_kernel, first_us, prove_right, run_with_index, spec_of, within
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import choose, rank, refusal
from nmm_compiler.errors import CapacityError, OutOfBoundsError, SpecError
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.kernels.experts.schedule import ExpertsSchedule
from nmm_compiler.kernels.linear.specs import AdaptersSpec, MatmulSpec
from nmm_compiler.targets import get

GPT_OSS = "gate_up_bias down_bias limit=7.0 slope=1.702 plus=1.0 halves=interleaved"


EXPERTS = "experts m=5 k=256 n=128 groups=12 top_k=2"
ADAPTERS = "adapters m=8 k=256 n=384 r=16 groups=4"


def small(fields=""):
    return spec_of(f"{EXPERTS} {fields}")


SMALL, MANY = small(), small("m=150 groups=5")
INDEXES = {
    "none": [[-1, -1]] * 5,
    "one for all": [[7, -1]] * 5,
    "some": [[0, 11], [11, 0], [-1, 3], [3, 0], [5, 6]],
}


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
    "m=1 top_k=4",
    f"m=1 k=200 n=200 {GPT_OSS}",
    f"m=3 k=320 n=96 dtype=float16 {GPT_OSS}",
    "m=40 groups=3 top_k=1 activation=gelu_tanh",
    "m=128 groups=2 dtype=float32 n=64",
    "weight_layout=col n=200 k=136",
    "m=1 lnc=2 n=192 k=384 down_bias",
    "m=1 lnc=2 top_k=3 n=192 k=384 down_bias",
    f"m=40 lnc=2 groups=4 top_k=3 {GPT_OSS}",
    "m=2 groups=300 top_k=3",
    "m=1 lnc=2 top_k=6 n=40",
    "m=7 lnc=2 n=32 k=520 activation=gelu_tanh",
    "m=40 lnc=2 groups=8 top_k=4 n=16",
    "m=140 groups=3 n=64",
    "m=300 groups=2 top_k=1 dtype=float32 k=128 n=96",
    "m=131 lnc=2 n=96 top_k=4 weight_layout=col down_bias",
]
SLOW = [f"m=129 groups=130 k=136 n=72 {GPT_OSS}", f"m=257 lnc=2 n=320 {GPT_OSS}"]
JOINED = f"{GPT_OSS} halves=joined"
STORED = [
    "weight=fp8",
    f"weight=fp8 k=200 n=200 {GPT_OSS}",
    "weight=fp8 m=1 k=200 ranks=16,8",
    "weight=fp8 m=1 lnc=2 top_k=3 n=320 ranks=8,8 down_bias",
    "weight=fp8 m=150 groups=5",
    f"weight=fp8 m=150 groups=5 ranks=16,40 {GPT_OSS}",
    # sums of x u that take turns, and a v of down whose parts share the partitions
    "weight=fp8 m=1 lnc=2 top_k=3 k=512 n=1024 ranks=64,32",
    "weight=factors ranks=16,24",
    "weight=factors m=1 lnc=2 top_k=3 ranks=16,24",
    f"weight=factors m=40 lnc=2 groups=4 ranks=8,24 {JOINED}",
    "weight=factors m=140 groups=4 ranks=160,24 dtype=float32",
    "ranks=16,0",
    "ranks=0,24 weight_layout=col m=140 groups=3 down_bias",
]
BLOCKS_OF_32 = [
    "weight=mxfp4",
    "weight=mxfp4 m=1 lnc=2 top_k=3 n=512",
    f"weight=mxfp4 m=2 groups=4 k=2048 n=256 ranks=32,32 {JOINED}",
    "weight=mxfp4 m=5 groups=4 k=512 n=512 ranks=32,64",
    "weight=mxfp4 m=40 lnc=2 groups=4 ranks=8,0 dtype=float16",
    f"weight=mxfp8_e5m2 m=140 groups=4 k=288 n=644 ranks=16,40 {JOINED}",
]
SLOW_BLOCKS = [
    "weight=mxfp4 m=3 k=288 n=640 ranks=16,40",
    f"weight=mxfp8 m=150 groups=5 k=320 n=1100 {JOINED}",
]


ADAPTED = [
    ("m=1 r=5", "trn3"),
    ("m=64 bias activation=gelu dtype=float16", "trn2"),
    ("k=200 n=200 u_layout=row v_layout=col out_layout=col", "trn2"),
    ("m=150 groups=12 r=24 residual w_layout=col", "trn2"),
    ("no_base x_layout=col dtype=float32", "trn2"),
    ("groups=20 m=3 k=300 norm=rms norm_gain", "trn3"),
    ("groups=40 m=20 n=1100 r=16", "trn2"),
    ("groups=30 m=1 r=64 out_layout=col", "trn2"),
    ("m=4 lnc=2", "trn2"),
    ("m=4 lnc=2 groups=9 bias", "trn2"),
    ("m=130 lnc=2 no_base", "trn3"),
]


@pytest.mark.parametrize(
    ("line", "target"),
    [(f"{EXPERTS} {fields}", "trn2") for fields in PLAIN + STORED]
    + [(f"{EXPERTS} {fields}", "trn3") for fields in BLOCKS_OF_32]
    + [(f"{ADAPTERS} {fields}", target) for fields, target in ADAPTED]
    + [
        pytest.param(f"{EXPERTS} {fields}", target, marks=pytest.mark.long)
        for target, slow in {"trn2": SLOW, "trn3": (PLAIN + STORED)[::6] + SLOW_BLOCKS}.items()
        for fields in slow
    ],
)
def test_the_kernel_is_right_against_float64(line, target):
    prove_right(first_kernel(spec_of(line), target))


def test_fewer_bytes_are_read_and_take_less_time():
    """Qwen3-30B-A3B's experts, one token."""
    times, read = [], []
    for weight, ranks in (("", (0, 0)), ("fp8", (0, 0)), ("mxfp4", (32, 32)), ("mxfp4", (0, 0))):
        spec = ExpertsSpec(m=1, k=2048, n=768, groups=128, top_k=8, weight=weight, ranks=ranks)
        times.append(first_us(spec, "trn3"))
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
    spec = small(f"lnc={lnc} n={n}")
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
    every = [(small("m=1"), None)]
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
    assert first_us(dataclasses.replace(one, lnc=2)) < 0.8 * first_us(one)


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
    spec = small(f"m=1 n={n}")
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
    alone = dataclasses.replace(spec, down_bias=True)  # with a bias each is alone
    assert first_us(spec) < 0.5 * first_us(alone)


def test_each_chosen_group_is_read_once():
    kernel = build_kernel(SMALL, "trn2", ways(SMALL)["distinct", 1])
    one = 3 * 256 * 128 * 2
    for figure in ("hbm_read_bytes", "minimal_hbm_bytes"):
        read = bytes_read(kernel, INDEXES, figure)
        assert read["one for all"] - read["none"] == one
        assert read["some"] - read["none"] == 5 * one


def test_expected_groups_follow_tokens_and_picks():
    assert small("m=1").expected == pytest.approx(2)
    assert SMALL.expected == pytest.approx(12 * (1 - (5 / 6) ** 5))
    assert small("distinct=3.0").expected == 3.0
    fewer = small("m=4 distinct=2.0")
    assert fewer.minimal_hbm_bytes() < small("m=4").minimal_hbm_bytes()


@pytest.mark.parametrize(
    "fields",
    [f"m=1 k=2880 n=2880 groups=32 top_k=4 {GPT_OSS}", "m=1 k=2048 n=768 groups=128 top_k=8"],
    ids=["gpt-oss", "qwen"],
)
def test_selected_experts_keep_three_quarters_of_the_roofline(fields):
    spec = small(fields)
    assert spec.roofline_us(get("trn2")) >= 0.75 * first_us(spec)


@pytest.mark.long
def test_a_prompt_reads_experts_once_at_four_fifths_of_the_roofline():
    qwen = ExpertsSpec(m=512, k=2048, n=768, groups=128, top_k=8)
    assert qwen.minimal_hbm_bytes() < 1.01 * 128 * 3 * 2048 * 768 * 2
    kernel = build_kernel(qwen)
    assert kernel.schedule.way == "blocks"
    assert qwen.roofline_us(get("trn2")) >= 0.8 * kernel.profile().latency_us


@pytest.mark.parametrize("m", [1, 32, 512, 2048, 16384])
@pytest.mark.parametrize(
    "sizes",
    [
        "k=4096 n=14336 groups=8 top_k=2", "k=4096 n=3584 groups=8 top_k=2",  # Mixtral
        "k=6144 n=16384 groups=8 top_k=2", "k=7168 n=2048 groups=256 top_k=8",  # DeepSeek-V3
        "k=5120 n=8192 groups=16", "k=4096 n=1536 groups=128 top_k=8",
        "k=2880 n=2880 groups=32 top_k=4 weight=fp8 limit=7 gate-up-bias down-bias",
    ],
)  # fmt: skip
def test_whole_experts_of_models_fit(m, sizes):
    """Where SBUF holds no panel of 512 outputs, or no block of 256 tokens, smaller ones do."""
    assert refusal(spec_of(f"experts m={m} {sizes}"), get("trn2")) is None


def test_schedules_that_are_refused():
    for spec, schedule, words in (
        (SMALL, in_blocks(32, 1), r"one of \[.distinct.\]"),
        (MANY, in_blocks(48, 1), "tokens as one of"),
        (MANY, ways(SMALL)["distinct", 1], r"one of \[.blocks.\]"),
        (dataclasses.replace(MANY, m=1 << 16, groups=2), in_blocks(32, 1), "split the tokens"),
    ):
        with pytest.raises((CapacityError, SpecError), match=words):
            schedule.check(spec, get("trn2"))


# Adapters of a batch in one kernel: each token has the branch that its index names, or none.

LOADED, GATHERED = spec_of(ADAPTERS), spec_of(f"{ADAPTERS} groups=20")


@pytest.mark.parametrize("spec", [LOADED, GATHERED], ids=["loaded", "gathered"])
@pytest.mark.parametrize(
    "index", [[-1] * 8, [3] * 8, [0, -1, 0, 3, 3, -1, 0, 0]], ids=["none", "one for all", "some"]
)
def test_any_index_of_adapters(spec, index):
    assert within(spec, *run_with_index(spec, index))


@pytest.mark.parametrize("spec", [LOADED, GATHERED], ids=["loaded", "gathered"])
@pytest.mark.parametrize("beyond", [-2, "groups"])
def test_an_index_of_no_adapter_is_an_error(spec, beyond):
    one = spec.groups if beyond == "groups" else beyond
    with pytest.raises(OutOfBoundsError, match="runtime index"):
        run_with_index(spec, [0, 1, 2, one, 0, 1, 2, 3])


def test_few_tokens_read_the_factors_of_their_own_adapters():
    assert (LOADED.slots, GATHERED.slots) == (0, 8)
    one = 16 * (256 + 384) * 2
    dense = MatmulSpec(m=8, k=256, n=384).minimal_hbm_bytes()
    for spec in (LOADED, GATHERED):
        small = 4 * (8 + 16 * spec.groups)
        assert spec.minimal_hbm_bytes() == dense + min(8, spec.groups) * one + small


def test_eight_adapters_cost_an_eighth_of_the_base_at_most():
    base = build_kernel(MatmulSpec(m=8, k=4096, n=4096)).profile().latency_us
    for groups in (8, 32):
        spec = AdaptersSpec(m=8, k=4096, n=4096, r=16, groups=groups)
        assert build_kernel(spec).profile().latency_us <= 1.12 * base
