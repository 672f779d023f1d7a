"""The best candidate of a small kernel is improved size by size, and stays legal and right."""

import pytest

from nmm_compiler.codegen import choose as chooser
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import choose, rank, search, simulated
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.options import INSTRUCTION_BUDGET, Options
from nmm_compiler.targets import get

TRN2 = get("trn2")
FP8 = {"dtype": "float8_e4m3", "scales": "channel"}


def test_steps_find_what_no_candidate_has(monkeypatch):
    spec = LowRankSpec(m=512, k=4096, r=256, n=2048, x_layout="col")
    stepped = search(spec, TRN2, INSTRUCTION_BUDGET, simulated)[0]
    assert stepped.schedule not in {choice.schedule for choice in rank(spec, TRN2)}
    monkeypatch.setattr(chooser, "STEPPED_INSTRUCTIONS", 0)
    plain = search(spec, TRN2, INSTRUCTION_BUDGET, simulated)[0]
    assert stepped.simulated_us < 0.85 * plain.simulated_us


def test_an_odd_shape_has_more_than_two_candidates():
    timed: list[object] = []

    def timing(spec, schedule, target):
        timed.append(schedule)
        return simulated(spec, schedule, target)

    spec = LowRankSpec(m=17, k=1021, r=61, n=509, x_layout="col")
    search(spec, TRN2, INSTRUCTION_BUDGET, timing)
    assert len(set(timed)) == len(timed) > 8


def test_a_program_too_long_to_be_timed_does_not_keep_others_from_it():
    """The closed form prices a loop on the device about the same; only a timing tells."""
    spec = GatedMLPSpec(m=2048, k=4096, n=14336, r=2560, x_layout="col")
    timed = []

    def timing(spec, schedule, target):
        timed.append(schedule)
        return 1000.0 + len(timed), 40_000, 1000.0 + len(timed)

    assert rank(spec, TRN2)[0].instructions > chooser.SIMULATED_INSTRUCTIONS
    best = search(spec, TRN2, INSTRUCTION_BUDGET, timing)[0]
    assert len(timed) > 1
    assert best.schedule == timed[0]
    assert all(schedule.m_loop for schedule in timed)


def test_steps_may_lead_through_schedules_that_program_order_costs():
    spec = LowRankSpec(m=129, k=2048, r=512, n=2048, x_layout="col")
    seen = []

    def timing(spec, schedule, target):
        found = simulated(spec, schedule, target)
        seen.append((schedule, found))
        return found

    best = search(spec, TRN2, INSTRUCTION_BUDGET, timing)[0]
    assert best.in_order_us <= 1.05 * best.simulated_us
    assert any(kept > 1.05 * free for _, (free, _, kept) in seen)


def test_loads_of_x_are_whole_loads_of_the_first_weight_in_every_step():
    spec = LowRankSpec(m=129, k=2048, r=512, n=2048, x_layout="col")
    schedule = rank(spec, TRN2)[0].schedule.changed({"u.chunk": 384, "x.chunk": 1152})
    for name in ("x.chunk", "aside"):
        assert all(step.x.chunk % 384 == 0 for step in schedule.steps(name, spec))


def test_steps_of_a_schedule_differ_in_one_size():
    spec = LowRankSpec(m=512, k=2048, r=256, n=2048, x_layout="col")
    schedule = rank(spec, TRN2)[0].schedule
    blocks = [step.v.block for step in schedule.steps("v.block", spec)]
    assert len(blocks) > 1
    assert schedule.v.block not in blocks
    for step in schedule.steps("u.chunk", spec):
        assert not step.x.chunk % step.u.chunk


@pytest.mark.parametrize(
    "spec",
    [
        LowRankSpec(m=5, k=1100, r=17, n=256, x_layout="col"),  # four sums take turns
        LowRankSpec(m=77, k=1024, r=96, n=200, x_layout="col", u_layout="col"),
        LowRankSpec(m=530, k=256, r=96, n=128, x_layout="col", out_layout="col"),  # two parts
        MatmulSpec(m=3, k=700, n=640, x_layout="col", **FP8),  # x arrives packed
        LowRankSpec(m=3, k=600, r=256, n=384, x_layout="col", **FP8),
        GatedMLPSpec(m=3, k=512, n=512, r=128, x_layout="col", **FP8),
        GatedMLPUpSpec(m=520, k=256, n=256, r=128, x_layout="col", out_layout="col"),
    ],
    ids=lambda spec: spec.short(),
)
def test_chosen_kernels_are_right(spec):
    assert prove(build_kernel(spec, "trn2", options=Options(cache="off"))).passed


def test_few_tokens_by_rows_are_not_loaded_an_element_at_a_time():
    one, two = (choose(LowRankSpec(m=m, k=2048, r=512, n=2048), TRN2)[0] for m in (1, 2))
    assert two.simulated_us < 1.1 * one.simulated_us


def test_one_token_more_than_a_bank_is_moved_in_two_even_parts():
    def us(m):
        spec = GatedMLPUpSpec(m=m, k=1024, n=1024, r=256, x_layout="col", out_layout="col")
        return choose(spec, TRN2)[0].simulated_us

    assert us(513) < 1.1 * us(512)


def test_a_gated_mlp_keeps_no_weight_resident():
    spec = GatedMLPUpSpec(m=256, k=256, n=256, r=128, x_layout="col")
    schedule = rank(spec, TRN2)[0].schedule.changed({"m_block": 128, "v.resident": True})
    with pytest.raises(SpecError, match="drop resident"):
        schedule.check(spec, TRN2)


def test_a_dense_gate_counts_x_beside_its_panels():
    spec = GatedMLPUpSpec(m=512, k=4096, n=2048, x_layout="col", out_layout="col")
    assert build_kernel(spec, "trn2", options=Options(cache="off")).profile().latency_us > 0


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_an_odd_shape_has_candidates_that_differ_in_time(target):
    """Loads of u and panels of v of several sizes: the best is none that a rounding would give."""
    spec = LowRankSpec(m=17, k=1021, r=61, n=509, x_layout="col")
    chip = get(target)
    times = {round(simulated(spec, c.schedule, chip)[0], 3) for c in rank(spec, chip)}
    assert len(times) > 2
    assert choose(spec, target)[0].simulated_us <= 1.02 * min(times)
