"""Profile: figures by hand, JSON round trip, and Chrome traces of one and several timelines."""

import dataclasses
import itertools
import json

import pytest
from trace_builder import Builder, Scene, profile_trace

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import OutputError, SimulationError
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec
from nmm_compiler.simulator.timing.profile import Profile, minimal_hbm_bytes, write_trace

TRN2 = targets.get("trn2")


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
    return profile_trace(Scene(text).trace, TRN2)


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
    assert f"{profile.error_band.worst:.0%} worst" in str(profile)


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
