"""Profile: figures by hand, JSON round trip, and Chrome traces of one and several timelines."""

import dataclasses
import gc
import itertools
import json
import weakref

import numpy as np
import pytest
from simulator_kernels import kernel_file
from trace_builder import Builder, Scene, profile_trace, starts, stops

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import OutputError, SimulationError
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.simulator.run import simulate
from nmm_compiler.simulator.timing.advice import Advice, advice_table
from nmm_compiler.simulator.timing.causes import WHY, critical_path, waits
from nmm_compiler.simulator.timing.profile import Profile, minimal_hbm_bytes, write_trace
from nmm_compiler.simulator.trace import Trace

PRODUCT = """
    hbm weights 128x128 {dtype}
    hbm inputs 128x512 {dtype}
    hbm output 128x512
    sbuf stationary 128x128 {dtype}
    psum bank 128x512
    sbuf result 128x512
    dma stationary weights
    {turns}
    vector result bank
    dma output result
"""
TURN = """
    sbuf moving 128x512 {dtype}
    dma moving inputs
    tensor bank stationary moving
"""


def profiled(text):
    return profile_trace(Scene(text).trace, targets.get("trn2"))


def product(repeats=1, dtype="bfloat16", more=""):
    """The profile of a 128 x 128 x 512 product, the moving operand loaded `repeats` times."""
    turns = repeats * TURN.format(dtype=dtype)
    return profiled(PRODUCT.format(dtype=dtype, turns=turns) + more)


def test_figures_of_one_product():
    profile = product()
    assert profile.target == "trn2"
    assert profile.hbm_read_bytes == 128 * 128 * 2 + 128 * 512 * 2
    assert profile.hbm_write_bytes == 128 * 512 * 4
    assert profile.flops == 2 * 128 * 128 * 512
    assert profile.transpose_flops == 0
    peak = 2 * 128 * 128 * 2.4e9
    assert profile.compute_us == pytest.approx(profile.flops / peak * 1e6)
    assert profile.mfu == pytest.approx(profile.compute_us / profile.latency_us)
    moved = profile.hbm_read_bytes + profile.hbm_write_bytes
    assert profile.minimal_hbm_bytes == moved
    assert profile.memory_us == pytest.approx(moved / 362e9 * 1e6)
    assert profile.mbu == pytest.approx(moved / 362e9 * 1e6 / profile.latency_us)
    assert (profile.bound, profile.roofline_us) == ("memory", profile.memory_us)
    assert profile.start_stop_us == pytest.approx(10.0)
    assert profile.device_us == profile.latency_us + profile.start_stop_us
    assert profile.instructions == {
        "dma": {"dma_copy": 3},
        "tensor": {"nc_matmul": 1},
        "vector": {"tensor_copy": 1},
    }
    assert set(profile.engine_busy_us) == {"tensor", "vector", "scalar", "gpsimd", "dma"}


def test_scratch_and_reloads_are_not_minimal_traffic():
    more = """
        hbm scratch 128x512
        sbuf tile 128x512
        dma scratch result
        dma tile scratch
    """
    assert product(3, more=more).minimal_hbm_bytes == product().minimal_hbm_bytes


def test_what_an_index_chooses_is_minimal_traffic_up_to_the_whole_tensor():
    builder = Builder()
    table = builder.tensor("hbm", 64, 128, "bfloat16").all
    tile = builder.tensor("sbuf", 128, 512, "bfloat16").all
    rows = dataclasses.replace(table, pattern=((256, 16), (2, 128)))  # anywhere in the table
    for wanted in (1, 2, 3, 4, 4, 4):
        builder.add("dma_copy", "dma", [tile], [rows])
        assert minimal_hbm_bytes(builder.trace) == wanted * 16 * 256


def test_transposes_are_counted_by_place():
    profile = profiled("""
        hbm source 128x128 bfloat16
        sbuf tile 128x128 bfloat16
        psum bank 128x128 bfloat16
        sbuf small 32x32 bfloat16
        dma tile source op=dma_transpose transpose=1
        tensor bank tile tile is_transpose=1
        tensor bank tile op=nc_transpose k=128 m=128 n=128 is_transpose=1
        vector small tile[:32,:32] op=nc_transpose is_transpose=1
    """)
    assert profile.transposes == {"dma": 1, "tensor": 2, "vector": 1}
    assert profile.flops == 0
    assert profile.transpose_flops == 2 * 2 * 128**3
    assert profile.hfu > profile.mfu == 0.0


def test_json_round_trip():
    profile = product(2)
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.digest() == profile.digest()
    assert profile.timeline.latency_us == profile.latency_us
    with pytest.raises(SimulationError, match="simulate the kernel again"):
        _ = again.timeline
    with pytest.raises(SimulationError):
        again.to_chrome_trace("unused.json")


def test_chrome_trace(tmp_path):
    more = "sbuf narrow 8x64\nhbm few 8x64\ndma narrow few dge_mode=hwdge issuer=scalar"
    path = product(2, more=more).to_chrome_trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    rows = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert {"TensorE", "VectorE", "ScalarE", "GpSimd"} <= set(rows.values())
    assert {"queue software (issue)", "queue hwdge-scalar (issue)"} <= set(rows.values())
    assert {"DMA engines, all alike", "DMA engine 0"} <= set(rows.values())
    slices = [e for e in events if e["ph"] == "X"]
    assert all((e["pid"], e["tid"]) in rows for e in slices)
    matmul = next(e for e in slices if e["name"] == "nc_matmul")
    assert matmul["args"]["source"] == "kernel.py:3"
    assert matmul["args"]["n"] == 512


def test_an_empty_kernel_has_a_profile():
    profile = profiled("")
    assert profile.latency_us == 0.0
    assert (profile.mfu, profile.mbu) == (0.0, 0.0)


ONE_PRODUCT = """
    sbuf weight 128x128 {0}
    sbuf moving 128x512 {0}
    psum sum 128x512
    tensor sum weight moving
"""


@pytest.mark.parametrize(
    ("target", "text", "starts"),
    [
        ("trn2", ONE_PRODUCT.format("bfloat16"), []),
        ("trn2", """
            sbuf a b c 128x40000
            sbuf d e 8x64
            hbm small source 8x64
            dma d source
            vector a b unset=yes
            vector c a b op=tensor_tensor
            dma e small dge_mode=hwdge issuer=sync
            gpsimd small small op=core_barrier
         """, ["spills: ", "barriers: 1 ", "mixed DMA generators: ", "unknown engine: 1 "]),
        ("trn2", "banks 9", ["spills: live sums take 9 PSUM banks of 8"]),
        # float32 fills TensorE; small copies fill the run
        ("trn2", ONE_PRODUCT.format("float32") * 20, ["TensorE's power limit: 20 "]),
        ("trn2", ONE_PRODUCT.format("bfloat16") * 20, []),
        ("trn1", ONE_PRODUCT.format("float32") * 20, []),
        ("trn2", "sbuf a 128x8\n" + "sbuf b 128x8\nvector b a\n" * 50, ["tiny instructions: 50 "]),
        ("trn2", "sbuf a 128x512\n" + "sbuf b 128x512\nvector b a\n" * 50, []),
    ],
)  # fmt: skip
def test_a_profile_names_what_is_not_modelled(target, text, starts):
    said = profile_trace(Scene(text).trace, targets.get(target)).unmodelled
    assert [text[: len(start)] for text, start in zip(said, starts, strict=True)] == starts


def test_failures_are_named(tmp_path):
    with pytest.raises(SimulationError):
        write_trace({"old": Profile.from_json(product().to_json())}, tmp_path / "t.json")
    with pytest.raises(OutputError, match="nowhere"):
        write_trace({"one": product()}, tmp_path / "nowhere" / "t.json")


def perfetto_ns(us):
    """Perfetto's reading of a JSON number of microseconds."""
    return int(us * 1000.0)


SPECS = [
    (LowRankSpec(m=64, k=512, r=128, n=768), "trn2"),
    (LowRankSpec(m=1, k=256, r=128, n=384, dtype="float32"), "trn1"),
    (GatedMLPSpec(m=128, k=256, r=128, n=512, activation="silu"), "trn2"),
]


@pytest.fixture(scope="module", params=SPECS, ids=lambda p: f"{p[0].family}-{p[1]}")
def events(request, tmp_path_factory):
    spec, target = request.param
    path = tmp_path_factory.mktemp("trace") / "t.json"
    built = build_kernel(spec, target).profile()
    write_trace({"a": built, "b": built}, path)
    return json.loads(path.read_text())["traceEvents"]


def test_no_two_slices_of_a_row_overlap_as_perfetto_reads_them(events):
    """Each profile has its own processes."""
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.partition(":")[0] for name in processes] == ["a", "a", "b", "b"]
    rows = {}
    for event in events:
        if event["ph"] == "X":
            start, length = perfetto_ns(event["ts"]), perfetto_ns(event["dur"])
            rows.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    assert len(rows) > 6
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def placed():
    """Copies that the compiler puts on ScalarE, between loads and a sum on VectorE."""
    turn = """
        hbm source 128x512
        sbuf tile copy total 128x512
        dma tile source
        vector copy tile unset=1
        vector total copy tile op=tensor_tensor function=add
        vector tile total
    """
    return profile_trace(Scene(3 * turn).trace, targets.get("trn1"))


def test_arrows_lead_forward_from_slice_to_slice(events):
    check_arrows(events)


def test_placed_work_is_shown_on_the_engine_that_it_runs_on(tmp_path):
    made = placed()
    timeline = made.timeline
    assert "scalar" in map(timeline.engine, range(len(timeline.end)))
    events = json.loads(made.to_chrome_trace(tmp_path / "t.json").read_text())["traceEvents"]
    check_arrows(events)
    ends = {(e["tid"], perfetto_ns(e["ts"])) for e in events if e["ph"] == "f" and e["pid"] == 1}
    starts = {(e["tid"], perfetto_ns(e["ts"])) for e in events if e["ph"] == "X"}
    assert {row for row, _ in ends} == {2, 3}
    assert ends <= starts
    used = {(share.name, share.engine): share.instructions for share in made.by_instruction()}
    assert used["tensor_copy", "scalar"] == used["tensor_copy", "vector"] == 3


def check_arrows(events):
    slices = {}
    for event in events:
        if event["ph"] == "X":
            start, length = perfetto_ns(event["ts"]), perfetto_ns(event["dur"])
            slices.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    ends = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(event)
            at = perfetto_ns(event["ts"])
            spans = slices[event["pid"], event["tid"]]
            assert any(start <= at < stop for start, stop in spans), event
    names = {pair[0]["name"] for pair in ends.values()}
    assert names == {"semaphore", "load to use"}
    for start, stop in ends.values():
        assert (start["ph"], stop["ph"]) == ("s", "f")
        assert perfetto_ns(start["ts"]) <= perfetto_ns(stop["ts"])
        assert start["pid"] // 10 == stop["pid"] // 10, "an arrow between two timelines"


# What would save time: each advice is what the kernel gains when it follows it.

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


ON_CHIP = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def copied(x, other):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    for i in range(64):
        copy = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.sbuf)
        if i % 2 == 0 and other:
            nisa.activation(dst=copy, op=nl.copy, data=tile)
        else:
            nisa.tensor_copy(dst=copy, src=tile, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=copy)
    return out
"""


def test_every_second_copy_on_the_idle_engine_saves_half_of_their_time():
    x = np.ones((128, 512), np.float32)
    busy, shared = (
        simulate(f"{kernel_file(ON_CHIP)}:copied", x, other=other).profile
        for other in (False, True)
    )
    (advice,) = (a for a in busy.advice() if a.remedy == "every second one on ScalarE")
    assert advice.seen == "64 copies on VectorE while ScalarE idles"
    assert 0 < advice.gain_us <= busy.engine_busy_us["vector"] / 2
    assert shared.latency_us < busy.latency_us


def test_bfloat16_saves_what_the_bfloat16_kernel_saves_on_tensor_e():
    slow = build_kernel(LowRankSpec(m=128, k=512, r=128, n=512, dtype="float32")).profile()
    advice = next(a for a in slow.advice() if a.remedy == "bfloat16 operands")
    assert 0 < advice.gain_us < slow.engine_busy_us["tensor"] * 0.8
    assert advice.error == slow.error_band.mean
    assert advice.gain == slow.latency_us / (slow.latency_us - advice.gain_us)
    assert not advice.at_most


def test_advice_within_the_error_of_its_class_says_so():
    advice = Advice(seen="a", remedy="b", gain_us=1.0, gain=1.1, error=0.12, at_most=False)
    assert advice.unsure == "not told apart from none (error 12 %): "
    surer = dataclasses.replace(advice, gain=1.2, lines=(1, 2, 3, 4), at_most=True)
    assert advice_table([advice, surer]).rows == (
        ("~ 1.00", "-", f"{advice.unsure}a: b"), ("<= 1.00", "1, 2, 3, ...", "a: b")
    )  # fmt: skip


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

WAITING = [
    LowRankSpec(m=512, k=512, r=256, n=1024),
    LowRankSpec(m=16, k=512, r=128, n=768, dtype="float32"),
    GatedMLPSpec(m=128, k=512, r=128, n=1024, activation="silu"),
    MatmulSpec(m=256, k=1024, n=512),
]


@pytest.fixture(params=[(s, t) for s in WAITING for t in ("trn1", "trn2")], ids=str)
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
            us = stops(timeline)[index] - starts(timeline)[index]
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
    trace = build_kernel(WAITING[1], "trn2").profile().timeline.trace
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
