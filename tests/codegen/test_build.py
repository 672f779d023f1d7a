"""build_kernel: choosing, refusing, caching, and what the key is made of."""

import dataclasses
import shlex

import pytest
from kernels.judge import prove_right, spec_of

from nmm_compiler.cli.kernels import _of_linear, make_spec
from nmm_compiler.codegen import build
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.choose import choose, on_device, rank
from nmm_compiler.errors import CapacityError, SpecError, UnknownNameError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.linear.specs import (
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.nki_api.lint import lint_source
from nmm_compiler.options import Options
from nmm_compiler.targets import get

SPEC = LowRankSpec(m=200, k=300, r=70, n=900)


def test_a_kernel_carries_what_it_was_made_of_and_is_kept_in_memory_and_on_disk(tmp_path):
    kernel = build_kernel(SPEC, "trn2")
    assert kernel.path.read_text() == kernel.source
    assert f"def {kernel.name}(x, u, v):" in kernel.source
    assert (kernel.spec, kernel.schedule) == (SPEC, choose(SPEC, "trn2")[0].schedule)
    assert lint_source(kernel.source) == ()
    assert build_kernel(SPEC, get("trn2")) is kernel
    build._KERNELS.clear()
    again = build_kernel(SPEC, "trn2")
    assert again is not kernel
    assert again.schedule == kernel.schedule
    assert (again.source, again.path) == (kernel.source, kernel.path)
    assert len({build_kernel(SPEC, target).name for target in ("trn1", "trn2", "trn3")}) == 3
    apart = build_kernel(SPEC, "trn2", options=Options(cache=f"off:{tmp_path}/none"))
    assert apart.path.is_file()
    assert not (tmp_path / "none").exists()


def test_choices_are_ranked_and_legal():
    target, spec = get("trn2"), spec_of("lowrank m=512 k=512 r=256 n=1024 x_layout=col")
    choices = choose(spec, "trn2")
    assert len([c for c in choices if c.simulated_us is not None]) >= 2
    for choice in choices:
        choice.schedule.check(spec, target)
    kernel = build_kernel(spec, "trn2")
    assert kernel.predicted.latency_us == pytest.approx(choices[0].simulated_us, rel=1e-9)
    assert kernel.predicted == kernel.profile()


SEVERAL = [
    "lowrank m=600 k=1024 r=384 n=1536 x_layout=col bias",
    "matmul m=600 k=1024 n=1536 out_layout=col",
    "gated_mlp m=300 k=512 r=128 n=1024",
    "lowrank_shared m=600 k=1024 pairs=256:1024 pairs=128:256 pairs=128:256",
]
OF_FP8 = [
    "lowrank m=600 k=1000 r=384 n=1500 bias activation=silu",
    "matmul m=600 k=1000 n=1500 bias activation=silu",
    "gated_mlp m=300 k=512 r=128 n=1000",
    "gated_mlp_up m=300 k=512 r=128 n=1000 gate_bias up_bias",
]


@pytest.mark.parametrize(
    ("line", "target"),
    [(line, target) for line in SEVERAL for target in ("trn1", "trn2", "trn3")]
    + [(f"{line} dtype=float8_e4m3 scales=channel x_layout=col", "trn2") for line in OF_FP8],
)
def test_sbuf_and_psum_stay_within_what_the_schedule_says(line, target):
    spec = spec_of(line)
    kernel = build_kernel(spec, target, rank(spec, get(target))[0].schedule)
    profile = kernel.profile()
    assert profile.sbuf_peak_bytes <= sum(kernel.schedule.sbuf_bytes(spec.layer).values())
    assert profile.sbuf_peak_bytes <= get(target).sbuf_usable_bytes_per_partition
    assert profile.psum_peak_banks <= get(target).psum_banks


@pytest.mark.parametrize("layout", ["row", "col"])
def test_no_transpose_when_x_comes_as_it_is_wanted(layout):
    spec = LowRankSpec(m=130, k=256, r=128, n=512, x_layout="col", out_layout=layout)
    assert sum(build_kernel(spec, "trn2").profile().transposes.values()) == 0
    turned = dataclasses.replace(spec, x_layout="row")
    assert sum(build_kernel(turned, "trn2").profile().transposes.values()) > 0


WIDE = LowRankSpec(m=512, k=2048, r=512, n=4096, x_layout="col")


@pytest.mark.parametrize(
    ("spec", "changes", "error", "words"),
    [
        (WIDE, {"banks": 12}, CapacityError, "need 12 PSUM banks, trn2 has 8; lower banks from 12"),
        (WIDE, {"m_block": 100}, SpecError, "m_block is 100; pass a multiple of 128"),
        (WIDE, {"x_load": "dma"}, UnknownNameError, r"unknown x_load 'dma' \(known: rows\)"),
        (WIDE, {"x_load": "row"}, UnknownNameError, "did you mean 'rows'"),
        (WIDE, {"banks": 0}, CapacityError, "lower banks from 0"),
        (LowRankSpec(m=4096, k=8192, r=512, n=4096, x_layout="col"), {"m_block": 2048},
         CapacityError, r"SBUF partition \(x 262,144, .*lower m_block from 2048"),
        (MatmulSpec(m=4, k=4_000_000, n=128, bias=True), None, CapacityError,
         r"no schedule fits trn2; the nearest: .* lower"),
        (LowRankSpec(m=16, k=16, r=1, n=10**30), None, CapacityError, "compiles at most 5,000,000"),
        (MatmulSpec(m=10**20, k=256, n=256), None, CapacityError, "chip holds 154,618,822,656"),
    ],
)  # fmt: skip
def test_illegal_schedules_say_why_and_what_to_lower(spec, changes, error, words):
    schedule = changes and dataclasses.replace(choose(spec, "trn2")[0].schedule, **changes)
    with pytest.raises(error, match=words):
        build_kernel(spec, "trn2", schedule)


def test_another_family_s_schedule_and_unknown_targets_are_refused():
    other = choose(AttentionSpec(m=8, d=16), "trn2")[0].schedule
    with pytest.raises(SpecError, match="lowrank takes a LinearSchedule"):
        build_kernel(SPEC, "trn2", other)
    with pytest.raises(UnknownNameError, match="did you mean 'trn2'"):
        build_kernel(SPEC, "trn22")


@pytest.mark.parametrize(
    "line",
    [
        "lowrank m=64 k=512 r=128 n=512 dtype=float32 bias scale=-1.5 lnc=2",
        "lowrank m=64 k=512 r=128 n=512 tp=4 tp_axis=rows",
        "lowrank_shared m=8 k=64 pairs=8:64 pairs=16:32,32 bias=true,false,true",
        "linear m=8 k=512 n=512,256 rank=32,0",
        "experts m=8 k=128 n=128 groups=4 top_k=2 limit=7.0 gate_up_bias",
    ],
)
def test_the_command_of_a_kernel_says_its_spec(line):
    """Cache misses name it: `nmm kernel` has to take it and to mean the same kernel."""
    spec = spec_of(line)
    _, _, family, *words, option, target = shlex.split(build._command(spec, get("trn2")))
    assert (option, target) == ("--target", "trn2")
    assert make_spec(_of_linear(family, words), words) == spec


# Kernels stay within the budget of instructions: blocks of tokens become a loop on the device.


# More tokens than a block, a last block that is smaller, both layouts of x and y.
@pytest.mark.parametrize(
    "line",
    [
        "lowrank m=2100 k=512 r=256 n=640 x_layout=col bias",
        "matmul m=2100 k=512 n=640",
        "gated_mlp m=2100 k=256 n=384 r=256 x_layout=col",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (
                "lowrank m=2100 k=512 r=256 n=640 out_layout=col",
                "gated_mlp_up m=2100 k=256 n=384 r=256 x_layout=col out_layout=col",
            )
        ),
    ],
)
def test_a_kernel_past_the_budget_loops_on_the_device_and_is_right(line):
    spec = spec_of(line)
    budget = 3 * min(choice.instructions for choice in rank(spec, get("trn2"))) // 4
    kernel = build_kernel(spec, "trn2", options=Options(instruction_budget=budget, cache="off"))
    profile = kernel.profile()
    run = sum(sum(ops.values()) for ops in profile.instructions.values())
    assert kernel.schedule.m_loop
    assert "nl.fori_loop(0, nisa.register_alloc(" in kernel.source
    assert profile.program_instructions <= budget < run
    prove_right(kernel)


def test_the_search_predicts_what_the_whole_loop_takes():
    spec = LowRankSpec(m=4200, k=512, r=256, n=1024, x_layout="col")
    best = choose(spec, "trn2", 200)[0]
    assert best.schedule.m_loop
    whole = build_kernel(spec, "trn2", best.schedule).predicted
    assert best.simulated_us == pytest.approx(whole.latency_us, rel=1e-6)


def test_only_whole_blocks_can_loop():
    spec = LowRankSpec(m=1300, k=300, r=200, n=640)
    plain = dataclasses.replace(choose(spec, "trn2")[0].schedule, m_block=512)
    assert not plain.m_loop, "the budget leaves small kernels alone"
    looped = on_device(spec, plain, get("trn2"))
    turns = looped.loop_turns(spec.layer)
    assert [(times, block.m) for times, block in turns] == [(2, 512), (1, 276)]
    with pytest.raises(SpecError, match=r"m_loop needs .* 2 blocks of 1024 tokens"):
        dataclasses.replace(looped, m_block=1024).check(spec, get("trn2"))
    large = on_device(spec, dataclasses.replace(plain, m_block=1408), get("trn2"))
    assert large.m_block == 640, "half of it, in whole tiles"
