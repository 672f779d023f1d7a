"""The laws that were taken from public measurements, each by a trace worked out by hand."""

import dataclasses

import pytest
from trace_builder import Builder

from nmm_compiler import targets
from nmm_compiler.simulator.timing.timeline import time_trace, time_traces

TRN1, TRN2 = targets.get("trn1"), targets.get("trn2")


def us(cycles, hz):
    return cycles / hz * 1e6


STEADY = dataclasses.replace(TRN2, tensor_ramp_seconds=0.0)  # trn2 without the clock ramp


def test_many_small_transfers_are_no_faster_than_their_generators():
    """Two hardware generators, GpSimd, and descriptors in HBM: no mixture beats their number."""

    def latency(modes):
        builder = Builder()
        source = builder.tensor("hbm", 128, 1)
        for index in range(300):
            mode = modes[index % len(modes)]
            builder.dma(builder.tensor("sbuf", 128, 1).all, source.all, **mode)
        return time_trace(builder.trace, TRN2).latency_us

    software = [{}, {"dge_mode": "swdge"}]
    prebuilt = [{"dge_mode": "none"}]
    hardware = [{"dge_mode": "hwdge", "issuer": issuer} for issuer in ("sync", "scalar")]
    single = [latency([mode]) for mode in (*software, *prebuilt, *hardware)]
    assert latency(software) >= min(single[:2])
    assert min(single) / 2.1 < latency([*software[:1], *prebuilt]) < min(single)
    assert min(single) / 4.1 < latency([*software[:1], *prebuilt, *hardware]) < min(single) / 2


@pytest.mark.parametrize(("columns", "filled"), [(3, True), (512, False)])
def test_independent_work_fills_the_stalls_of_tiny_instructions(columns, filled):
    """Pairs of dependent instructions: the scheduler interleaves them if that is worth it."""
    builder = Builder()
    source = builder.tensor("sbuf", 128, columns)
    for _ in range(50):
        middle, out = builder.tensor("sbuf", 128, columns), builder.tensor("sbuf", 128, columns)
        builder.add("tensor_reduce", "vector", [middle.all], [source.all])
        builder.add("tensor_reduce", "vector", [out.all], [middle.all])
    interval = us(max(columns + 20, 64), 1.12e9)
    stalled = us(columns + 100, 1.12e9) - interval
    moved = time_trace(builder.trace, TRN1)
    kept = time_trace(builder.trace, TRN1, reorder=False)
    assert max(kept.interval_end) == pytest.approx(100 * interval + 50 * stalled)
    least = 100 * interval + (0 if filled else 50 * stalled)
    assert max(moved.interval_end) == pytest.approx(least, abs=2 * (interval + stalled))


def store_then_load():
    builder = Builder()
    source, sink = builder.tensor("hbm", 256, 512), builder.tensor("hbm", 128, 512)
    one, two, out = (builder.tensor("sbuf", 128, 512) for _ in range(3))
    builder.dma(one.all, source[:128, :])
    builder.copy(out.all, one.all)
    return builder, builder.dma(sink.all, out.all), builder.dma(two.all, source[128:, :])


def test_program_order_is_kept_on_request():
    """A load behind a store that waits: it passes the store, or waits for its turn."""
    builder, store, after = store_then_load()
    moved = time_trace(builder.trace, TRN2)
    kept = time_trace(builder.trace, TRN2, reorder=False)
    assert moved.start[after] < moved.start[store]
    assert kept.start[after] >= kept.start[store]
    assert kept.latency_us > moved.latency_us
    builder.trace.ordered = [(0, len(builder.trace.instructions))]
    assert time_trace(builder.trace, TRN2).start == kept.start


def test_an_accumulation_waits_until_the_last_one_comes_through():
    """64 columns issue in 30 ns, but the sum that they add to takes 203 ns to come back."""

    def step(columns, same):
        builder = Builder()
        weight = builder.tensor("sbuf", 128, 128, "bfloat16")
        moving = builder.tensor("sbuf", 128, columns, "bfloat16")
        sums = [builder.tensor("psum", 128, columns) for _ in range(2)]
        for index in range(2):
            builder.matmul(sums[0 if same else index].all, weight.all, moving.all)
        return time_trace(builder.trace, STEADY).start[1]

    assert step(64, True) == pytest.approx(0.203)
    assert step(64, False) == pytest.approx(us(64 + 9, 2.4e9))
    assert step(512, True) == pytest.approx(us(512 + 9, 2.4e9))


def test_short_contractions_slow_float32_products():
    def interval(rows, step):
        builder = Builder()
        weight = builder.tensor("sbuf", 128, 128)
        moving = builder.tensor("sbuf", 128, 512 * step)
        for _ in range(2):
            out = builder.tensor("psum", 128, 512)
            builder.matmul(out.all, weight[:rows, :], moving[:rows, ::step])
        return time_trace(builder.trace, STEADY).start[1]

    assert interval(128, 1) == interval(65, 1) == pytest.approx(us(4 * 512 + 16, 2.4e9))
    assert interval(64, 1) == pytest.approx(us(8 * 512 + 16, 2.4e9))  # 1,707 ns measured
    assert interval(128, 8) == interval(128, 1)


def open_engine(target, *pairs):
    """Return the engines of tensor_scalar instructions that leave theirs open."""
    builder = Builder()
    for first, second in pairs:
        tiles = [builder.tensor("sbuf", 128, 512).all for _ in range(2)]
        builder.add(
            "tensor_scalar", "vector", tiles[:1], tiles[1:], function=first, function1=second,
            unset=True,
        )  # fmt: skip
    timeline = time_trace(builder.trace, target)
    return [timeline.placed.get(i, "vector") for i in range(len(pairs))]


def test_open_engines_are_placed_as_profiles_show():
    pairs = ("multiply", ""), ("multiply", "add"), ("add", ""), ("maximum", ""), ("add", "multiply")
    assert open_engine(TRN1, *pairs) == ["scalar"] * 3 + ["vector"] * 2
    assert open_engine(TRN2, *pairs) == ["vector"] * 5


def test_cores_wait_for_each_other_at_a_barrier():
    def program(copies):
        builder = Builder()
        a, b = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
        for _ in range(copies):
            builder.copy(b.all, a.all)
        flag = builder.tensor("hbm", 1, 1).all
        builder.add("core_barrier", "gpsimd", [flag], [flag], cores=2)
        return builder, builder.copy(a.all, b.all)

    (short, after_short), (long, after_long) = program(1), program(9)
    lines = time_traces([short.trace, long.trace], TRN2)
    arrival = max(lines[1].end[:9])
    assert lines[0].start[after_short] >= arrival > max(lines[0].end[:1])
    assert lines[1].start[after_long] >= arrival
    assert time_trace(short.trace, TRN2).start[after_short] < arrival


def test_products_pass_one_that_waits_but_sums_keep_their_order():
    builder = Builder()
    weight, moving = (builder.tensor("sbuf", 128, n, "bfloat16") for n in (128, 512))
    late, source = builder.tensor("sbuf", 128, 512, "bfloat16"), builder.tensor("hbm", 128, 512)
    sums = [builder.tensor("psum", 128, 512) for _ in range(2)]
    builder.dma(late.all, source.all)
    waits = builder.matmul(sums[0].all, weight.all, late.all)
    adds = builder.matmul(sums[0].all, weight.all, moving.all)
    passes = builder.matmul(sums[1].all, weight.all, moving.all)
    moved = time_trace(builder.trace, STEADY)
    assert moved.start[passes] == 0.0
    assert moved.start[adds] >= moved.interval_end[waits] > moved.end[0]
    kept = time_trace(builder.trace, STEADY, reorder=False)
    assert kept.start[waits] < kept.start[adds] < kept.start[passes]


@pytest.mark.parametrize("op", ["tensor_tensor", "tensor_copy_predicated"])
def test_two_inputs_in_sbuf_take_two_passes_on_trn1(op):
    def cycles(*memories):
        builder = Builder()
        views = [builder.tensor(memory, 128, 512).all for memory in ("sbuf", *memories)]
        builder.add(op, "vector", views[:1], views[1:], function="add")
        timeline = time_trace(builder.trace, TRN1)
        return timeline.interval_end[0] * TRN1.vector_clock_hz / 1e6 - 20

    assert cycles("sbuf", "sbuf") == pytest.approx(1024)
    assert cycles("sbuf", "psum") == pytest.approx(512)
    if op == "tensor_tensor":  # the two share the port of PSUM as well
        assert cycles("psum", "psum") == pytest.approx(1024)


@pytest.mark.parametrize(
    ("dtype", "elements", "cycles_each"),
    [("float32", 1, 8.0), ("float32", 32, 39.0), ("bfloat16", 1, 8.0), ("bfloat16", 32, 19.5)],
)
def test_a_gather_on_chip_pays_for_each_index_and_less_for_longer_runs(
    dtype, elements, cycles_each
):
    """nki.isa.local_gather: 28 / 4 cycles for an index, 1 for each of its elements of 4 bytes."""

    def latency(indices):
        builder = Builder()
        source = builder.tensor("sbuf", 128, 4096, dtype)
        index = builder.tensor("sbuf", 128, indices // 16, "uint16")
        result = builder.tensor("sbuf", 128, indices * elements, dtype)
        builder.add(
            "local_gather", "gpsimd", [result.all], [source.all, index.all],
            indices=indices, elements=elements,
        )  # fmt: skip
        return time_trace(builder.trace, TRN2).latency_us

    more = latency(256) - latency(128)
    assert more == pytest.approx(us(128 * cycles_each, TRN2.gpsimd_clock_hz))
