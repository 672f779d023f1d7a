"""Kernels stay within the budget of instructions: blocks of tokens become a loop on the device."""

import dataclasses

import pytest
from kernels.judge import prove_right

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.choose import choose, on_device, rank
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, LowRankSpec, MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.targets import get

# More tokens than a block, a last block that is smaller, both layouts of x and y.
SPECS = [
    LowRankSpec(m=2100, k=512, r=256, n=640, x_layout="col", bias=True),
    LowRankSpec(m=2100, k=512, r=256, n=640, out_layout="col"),
    MatmulSpec(m=2100, k=512, n=640),
    GatedMLPUpSpec(m=2100, k=256, n=384, r=256, x_layout="col", out_layout="col"),
    GatedMLPSpec(m=2100, k=256, n=384, r=256, x_layout="col"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.family}-{spec.out_layout}")
def test_a_kernel_past_the_budget_loops_on_the_device_and_is_right(spec):
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
    whole = build_kernel(spec, "trn2", best.schedule).profile().latency_us
    assert best.simulated_us == pytest.approx(whole, rel=0.05)


def test_only_whole_blocks_can_loop():
    spec = LowRankSpec(m=1300, k=300, r=200, n=640)
    chosen = choose(spec, "trn2")[0].schedule
    assert not chosen.m_loop, "the budget leaves small kernels alone"
    plain = dataclasses.replace(chosen, m_block=512)
    looped = on_device(spec, plain, get("trn2"))
    turns = looped.loop_turns(spec.layer)
    assert [(times, block.m) for times, block in turns] == [(2, 512), (1, 276)]
    with pytest.raises(SpecError, match="m_loop needs at least two whole blocks"):
        looped.changed({"m_block": 1024}).check(spec, get("trn2"))
    large = on_device(spec, dataclasses.replace(plain, m_block=1408), get("trn2"))
    assert large.m_block == 640, "half of it, in whole tiles"
