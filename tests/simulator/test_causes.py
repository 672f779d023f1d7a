"""Why instructions wait, and the critical path: nothing is left unexplained."""

import dataclasses
import gc
import itertools
import weakref

import pytest
from trace_builder import profile_trace

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.simulator.timing.causes import WHY, critical_path, waits
from nmm_compiler.simulator.trace import Trace

SPECS = [
    LowRankSpec(m=512, k=512, r=256, n=1024),
    LowRankSpec(m=16, k=512, r=128, n=768, dtype="float32"),
    GatedMLPSpec(m=128, k=512, r=128, n=1024, activation="silu"),
    MatmulSpec(m=256, k=1024, n=512),
]


@pytest.fixture(params=[(s, t) for s in SPECS for t in ("trn1", "trn2")], ids=str)
def timeline(request):
    spec, target = request.param
    return build_kernel(spec, target).profile().timeline


def test_the_path_covers_the_whole_time_and_nothing_is_unexplained(timeline):
    path = critical_path(timeline)
    assert path[0].start_us == pytest.approx(0.0, abs=1e-6)
    assert path[-1].stop_us == timeline.latency_us
    for before, after in itertools.pairwise(path):
        assert before.stop_us == pytest.approx(after.start_us, abs=1e-6)
    assert not [step for step in path if "other" in (step.what, step.why)]


def test_waits_and_work_of_each_engine_tile_the_latency(timeline):
    worked = {}
    for index, instruction in enumerate(timeline.trace.instructions):
        if instruction.engine != "dma":
            engine = timeline.placed.get(index, instruction.engine)
            us = timeline.interval_end[index] - timeline.start[index]
            worked[engine] = worked.get(engine, 0.0) + us
    idle = waits(timeline)
    assert set(idle) == set(worked)
    for engine, us in worked.items():
        assert us + sum(idle[engine].values()) == pytest.approx(timeline.latency_us, abs=1e-3)


def test_a_wait_ends_with_the_signal_of_the_one_that_is_blamed(timeline):
    for index, instruction in enumerate(timeline.trace.instructions):
        kind, other, ended = timeline.waited[index]
        assert kind in WHY
        if instruction.engine != "dma" and kind in ("load", "result"):
            assert 0 <= timeline.start[index] - ended < 3
            blamed = timeline.trace.instructions[other]
            assert (blamed.engine == "dma") == (kind == "load")


class Watched(Trace):
    """A trace that a weak reference can point to."""


@pytest.mark.parametrize(
    "ask",
    [
        lambda profile, folder: profile.by_line(),
        lambda profile, folder: profile.by_instruction(),
        lambda profile, folder: profile.waits(),
        lambda profile, folder: profile.critical_path(),
        lambda profile, folder: profile.advice(),
        lambda profile, folder: profile.page_parts(),
        lambda profile, folder: profile.to_chrome_trace(folder / "t.json"),
    ],
)
def test_a_profile_that_is_let_go_keeps_no_trace_in_memory(ask, tmp_path):
    trace = build_kernel(SPECS[1], "trn2").profile().timeline.trace
    fields = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.init}
    profile = profile_trace(Watched(**fields), targets.get("trn2"))
    trace = weakref.ref(profile.timeline.trace)
    gc.disable()
    try:
        ask(profile, tmp_path)
        assert trace() is not None
        del profile
        assert trace() is None
    finally:
        gc.enable()
