"""What would save time: each advice is what the kernel gains when it follows it."""

import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest
from simulator_kernels import kernel_file
from trace_builder import profile_trace

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.simulator.run import simulate
from nmm_compiler.simulator.timing.advice import Advice
from nmm_compiler.simulator.timing.causes import WHY, critical_path, waits
from nmm_compiler.simulator.trace import Trace

LOADS = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def copies(x, columns):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for at in range(0, x.shape[1], columns):
        tile = nl.ndarray((128, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[0:128, at : at + columns])
        nisa.dma_copy(dst=out[0:128, at : at + columns], src=tile)
    return out
"""


def copies(columns, total=8192):
    x = np.ones((128, total), np.float32)
    return simulate(f"{kernel_file(LOADS)}:copies", x, columns=columns).profile


def test_the_gain_of_wider_rows_bounds_that_of_the_kernel_with_wider_rows():
    narrow, wide = copies(64, 2048), copies(256, 2048)
    found = {advice.remedy: advice for advice in narrow.advice()}
    rows = found["1 KiB rows"]
    assert rows.seen == "rows of 256 B"
    assert rows.lines == (12, 13)
    assert rows.at_most
    assert 0 < narrow.latency_us - rows.gain_us <= wide.latency_us < narrow.latency_us
    assert rows.gain_us > found["fewer, larger ones"].gain_us
    assert "1 KiB rows" not in {advice.remedy for advice in wide.advice()}


def test_bfloat16_saves_what_the_bfloat16_kernel_saves_on_tensor_e():
    slow = build_kernel(LowRankSpec(m=128, k=512, r=128, n=512, dtype="float32")).profile()
    advice = next(a for a in slow.advice() if a.remedy == "bfloat16 operands")
    assert 0 < advice.gain_us < slow.engine_busy_us["tensor"] * 0.8
    assert advice.error == slow.error_band.mean
    assert advice.gain == slow.latency_us / (slow.latency_us - advice.gain_us)
    assert str(advice).endswith(f"would save about {advice.gain_us:.2f} us")


def test_advice_within_the_error_of_its_class_says_so():
    advice = Advice(seen="a", remedy="b", gain_us=1.0, gain=1.1, error=0.12, at_most=False)
    assert str(advice) == "not told apart from none (error 12 %): a: b would save about 1.00 us"
    assert str(dataclasses.replace(advice, gain=1.2)) == "a: b would save about 1.00 us"


def test_shares_add_up_to_the_latency():
    profile = copies(64)
    for shares in (profile.by_line(), profile.by_instruction()):
        assert sum(share.path_us for share in shares) == pytest.approx(profile.latency_us)
        moved = profile.hbm_read_bytes + profile.hbm_write_bytes
        assert sum(share.hbm_bytes for share in shares) == moved
    lines = {share.line: share for share in profile.by_line()}
    assert set(lines) == {12, 13}
    assert lines[12].instructions == 128


# Why instructions wait, and the critical path: nothing is left unexplained.

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
            engine = timeline.engine(index)
            us = timeline.interval_end[index] - timeline.start[index]
            worked[engine] = worked.get(engine, 0.0) + us
    idle = waits(timeline)
    assert set(idle) == set(worked)
    for engine, us in worked.items():
        assert us + sum(idle[engine].values()) == pytest.approx(timeline.latency_us, abs=1e-3)


def test_a_wait_ends_with_the_signal_of_the_one_that_is_blamed(timeline):
    for index, instruction in enumerate(timeline.trace.instructions):
        held = timeline.bookings[index][0]
        assert held.why in WHY
        if instruction.engine != "dma" and held.why in ("load", "result"):
            assert 0 <= held.start - held.since < 3
            assert (held.cause.kind == "dma engines") == (held.why == "load")


class Watched(Trace):
    """A trace that a weak reference can point to."""


def test_a_profile_that_is_let_go_keeps_no_trace_in_memory(tmp_path):
    trace = build_kernel(SPECS[1], "trn2").profile().timeline.trace
    fields = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.init}
    profile = profile_trace(Watched(**fields), targets.get("trn2"))
    trace = weakref.ref(profile.timeline.trace)
    asked = "by_line", "by_instruction", "waits", "critical_path", "advice", "page_parts"
    gc.disable()
    try:
        for name in asked:
            getattr(profile, name)()
        profile.to_chrome_trace(tmp_path / "t.json")
        assert trace() is not None
        del profile
        assert trace() is None
    finally:
        gc.enable()
