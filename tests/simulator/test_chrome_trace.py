"""Several timelines in one Chrome trace file."""

import itertools
import json

import pytest
from trace_builder import Scene, profile_trace

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import OutputError, SimulationError
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec
from nmm_compiler.simulator.timing.profile import Profile, write_trace


def profile(columns):
    """One copy on VectorE."""
    trace = Scene(f"sbuf a b 128x{columns}\nvector a b").trace
    return profile_trace(trace, targets.get("trn2"))


def test_each_profile_has_its_own_processes(tmp_path):
    path = write_trace({"wide": profile(512), "narrow": profile(64)}, tmp_path / "t.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["wide", "wide", "narrow", "narrow"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len({e["pid"] for e in slices}) == 2
    assert slices[0]["dur"] > slices[1]["dur"]
    assert not list(tmp_path.glob("*.part"))


def test_failures_are_named(tmp_path):
    with pytest.raises(SimulationError):
        write_trace({"old": Profile.from_json(profile(8).to_json())}, tmp_path / "t.json")
    with pytest.raises(OutputError, match="nowhere"):
        write_trace({"one": profile(8)}, tmp_path / "nowhere" / "t.json")


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
