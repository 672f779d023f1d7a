"""Each mechanism of the timing pass by a tiny trace with an answer worked out by hand."""

import dataclasses
import itertools

import pytest
from trace_builder import Builder

from nmm_compiler import targets
from nmm_compiler.simulator.timing.repeats import repeated_work
from nmm_compiler.simulator.timing.timeline import time_trace

TRN1, TRN2, TRN3 = (targets.get(name) for name in ("trn1", "trn2", "trn3"))
STEADY = dataclasses.replace(TRN2, tensor_ramp_seconds=0.0)  # trn2 without the clock ramp


def us(cycles, hz):
    return cycles / hz * 1e6


def matmuls(count, n=512, dtype="bfloat16", m=128, **attributes):
    builder = Builder()
    stationary = builder.tensor("sbuf", 128, m, dtype)
    moving = builder.tensor("sbuf", 128, n, dtype)
    for _ in range(count):
        out = builder.tensor("psum", m, n)
        builder.matmul(out.all, stationary.all, moving.all, **attributes)
    return builder.trace


@pytest.mark.parametrize(
    ("target", "n", "dtype", "cycles"),
    [
        (STEADY, 512, "bfloat16", 512 + 9),
        (STEADY, 16, "bfloat16", 64 + 9),
        (STEADY, 512, "float32", 4 * 512 + 16),
        (STEADY, 16, "float32", 4 * 128 + 16),
        (TRN1, 512, "bfloat16", 512 + 12),
        (TRN1, 512, "float32", 4 * 512 + 340),
    ],
)
def test_matmul_interval(target, n, dtype, cycles):
    timeline = time_trace(matmuls(3, n, dtype), target)
    assert timeline.start[2] - timeline.start[1] == pytest.approx(
        us(cycles, target.tensor_clock_hz)
    )
    latency = timeline.end[2] - timeline.start[2]
    fill = target.tensor_latency_seconds * 1e6
    assert latency == pytest.approx(us(cycles, target.tensor_clock_hz) + fill)


def test_transpose_mode_halves_the_passes_of_float32():
    plain = time_trace(matmuls(2, 128, "float32"), STEADY)
    turned = time_trace(matmuls(2, 128, "float32", is_transpose=True), STEADY)
    assert plain.start[1] == pytest.approx(us(4 * 128 + 16, 2.4e9))
    assert turned.start[1] == pytest.approx(us(2 * 128 + 16, 2.4e9))


def test_weights_load_behind_the_previous_matmul_and_show_after_a_wait():
    builder = Builder()
    weight = builder.tensor("sbuf", 128, 128, "bfloat16")
    moving = builder.tensor("sbuf", 128, 512, "bfloat16")
    source = builder.tensor("sbuf", 128, 512, "bfloat16")
    out = builder.tensor("psum", 128, 512)
    builder.copy(moving.all, source.all)
    builder.matmul(out.all, weight.all, moving.all)
    timeline = time_trace(builder.trace, STEADY)
    # the matmul waits for the copy, so its 128 columns of weights load in the open: 32 cycles
    expected = us(512 + 9, 2.4e9) + 0.203 + us(128 / 4, 2.4e9)
    assert timeline.end[1] - timeline.start[1] == pytest.approx(expected)


def test_clock_ramp_starts_at_half_and_ends():
    timeline = time_trace(matmuls(40), TRN2)
    full = us(521, 2.4e9)
    intervals = [b - a for a, b in zip(timeline.start, timeline.start[1:], strict=False)]
    assert intervals[0] == pytest.approx(2 * full)
    assert {round(i / full, 6) for i in intervals} == {2.0, 1.0}  # half the clock, then all
    assert all(b < a + 1e-9 for a, b in itertools.pairwise(intervals))
    assert intervals[-1] == pytest.approx(full)
    slow = sum(interval > full * 1.001 for interval in intervals)
    ramp = sum(intervals[:slow])
    assert ramp == pytest.approx(3.7, abs=intervals[0])  # microseconds, measured: 3.5 to 3.9
    assert timeline.tensor_throttled_us == pytest.approx(timeline.start[-1] + full - 40 * full)


@pytest.mark.parametrize(("gap_columns", "slow_again"), [(600, False), (2600, True)])
def test_clock_ramp_engages_again_after_an_idle_gap(gap_columns, slow_again):
    """600 fp32 columns of VectorE are 0.8 us, 2600 are 2.9 us; the limit is half of 3 us."""
    trace = matmuls(40)
    builder = Builder()
    builder.trace = trace
    source = builder.tensor("sbuf", 128, gap_columns)
    moving = builder.tensor("sbuf", 128, gap_columns)
    stationary = builder.tensor("sbuf", 128, 128)
    last = trace.instructions[-1].writes[0]
    builder.add("tensor_copy", "vector", [moving.all], [source.all, last])
    out = builder.tensor("psum", 128, 512)
    builder.matmul(out.all, stationary.all, moving[:, :512])
    timeline = time_trace(trace, TRN2)
    full = us(4 * 512 + 16, 2.4e9)
    took = timeline.interval_end[-1] - timeline.start[-1]
    assert took == pytest.approx(2 * full if slow_again else full)


def test_trn1_has_no_ramp():
    timeline = time_trace(matmuls(3), TRN1)
    assert timeline.tensor_throttled_us == 0.0


def load(rows, columns, dtype="float32", target=TRN2, **attributes):
    builder = Builder()
    source = builder.tensor("hbm", rows, columns, dtype)
    tile = builder.tensor("sbuf", rows, columns, dtype)
    builder.dma(tile.all, source.all, **attributes)
    return time_trace(builder.trace, target)


def test_one_load():
    timeline = load(128, 512)
    (transfer,) = timeline.transfers
    assert transfer.descriptors == 128
    assert transfer.issue_end - transfer.issue_start == pytest.approx(0.485 + 128 * 0.95e-3)
    ((engine, start, stop),) = transfer.parts
    assert engine == -1  # all 16 alike
    assert start == pytest.approx(1.3)  # start latency
    # eight rows of 2 KiB per engine, 6 ns each and a sixteenth of the core's 362 GB/s
    assert stop - start == pytest.approx(8 * (0.006 + 2048 / (362e9 / 16) * 1e6))
    # the engines start one after another, over 0.3 us
    # and the data of a load is there 0.305 of its ideal time (8 x 2 KiB at 23 GB/s) later
    assert timeline.latency_us == pytest.approx(stop + 0.3 + 0.305 * 8 * 2048 / 23e3)
    assert timeline.busy_us["dma"] == pytest.approx(stop - start + 0.3)
    assert timeline.dma_engine_busy_us == pytest.approx(16 * (stop - start))


@pytest.mark.parametrize(
    ("rows", "columns", "fraction"), [(128, 1024, 0.96), (128, 128, 0.78), (128, 64, 0.27)]
)
def test_short_rows_waste_the_engines(rows, columns, fraction):
    timeline = load(rows, columns)
    seconds = timeline.dma_engine_busy_us / 1e6
    rate = rows * columns * 4 / seconds  # bytes per engine-second
    assert rate / 23e9 == pytest.approx(fraction, abs=0.025)


def test_strided_elements_are_descriptors_of_their_own():
    builder = Builder()
    source = builder.tensor("hbm", 128, 64)
    tile = builder.tensor("sbuf", 128, 32)
    builder.dma(tile.all, source[:, ::2])
    (transfer,) = time_trace(builder.trace, TRN2).transfers
    assert transfer.descriptors == 128 * 32
    start, stop = transfer.parts[0][1:]
    assert stop - start == pytest.approx(8 * 32 * 0.041)  # 41 ns each, from software


@pytest.mark.parametrize(
    ("first", "last", "engines"),
    [(0, 4, {0: 4}), (64, 72, {8: 8}), (0, 12, {0: 8, 1: 4}), (32, 64, {4: 8, 5: 8, 6: 8, 7: 8})],
)
def test_partitions_choose_the_dma_engine(first, last, engines):
    builder = Builder()
    source = builder.tensor("hbm", 128, 4096, "bfloat16")
    tile = builder.tensor("sbuf", 128, 4096, "bfloat16")
    builder.dma(tile[first:last, :], source[first:last, :])
    (transfer,) = time_trace(builder.trace, TRN2).transfers
    row = 0.006 + 8192 / (362e9 / 16) * 1e6
    assert {engine: stop - start for engine, start, stop in transfer.parts} == {
        engine: pytest.approx(rows * row) for engine, rows in engines.items()
    }


def test_loads_issue_one_after_another_and_overlap():
    builder = Builder()
    source = builder.tensor("hbm", 256, 64)
    for at in (0, 128):
        builder.dma(builder.tensor("sbuf", 128, 64).all, source[at : at + 128, :])
    one, two = time_trace(builder.trace, TRN2).transfers
    assert two.issue_start == pytest.approx(one.issue_end)
    assert two.parts[0][1] == pytest.approx(1.3 + 0.485 + 128 * 0.95e-3)


@pytest.mark.parametrize(
    ("modes", "queues", "second"),
    [
        ([{"dge_mode": "none"}] * 2, {"software"}, 0.6),
        ([{"dge_mode": "hwdge"}] * 2, {"hwdge-sync"}, 0.6),
        (
            [{"dge_mode": "hwdge", "issuer": "sync"}, {"dge_mode": "hwdge", "issuer": "scalar"}],
            {"hwdge-sync", "hwdge-scalar"},
            0.0,
        ),
        ([{}] * 2, {"software"}, 0.485 + 128 * 0.95e-3),
        ([{}, {"dge_mode": "none"}], {"software"}, 0.485 + 128 * 0.95e-3),
    ],
)
def test_descriptor_modes_issue_through_the_generators_there_are(modes, queues, second):
    builder = Builder()
    source = builder.tensor("hbm", 128, 64)
    for mode in modes:
        builder.dma(builder.tensor("sbuf", 128, 64).all, source.all, **mode)
    transfers = time_trace(builder.trace, TRN2).transfers
    assert {t.queue for t in transfers} == queues
    assert transfers[1].issue_start == pytest.approx(second)


def test_trn1_descriptors_are_prebuilt():
    builder = Builder()
    source = builder.tensor("hbm", 128, 64)
    for _ in range(2):
        builder.dma(builder.tensor("sbuf", 128, 64).all, source.all)
    transfers = time_trace(builder.trace, TRN1).transfers
    assert transfers[1].issue_start == pytest.approx(0.35)


def test_software_descriptors_occupy_gpsimd():
    builder = Builder()
    source = builder.tensor("hbm", 128, 64)
    builder.dma(builder.tensor("sbuf", 128, 64).all, source.all, dge_mode="swdge")
    builder.add("iota", "gpsimd", [builder.tensor("sbuf", 128, 64, "int32").all])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == pytest.approx(0.05)  # GpSimd has written the descriptors


def test_dma_transpose_rates():
    def turned(memory, dtype):
        builder = Builder()
        source = builder.tensor(memory, 128, 128, dtype)
        tile = builder.tensor("sbuf", 128, 128, dtype)
        builder.add("dma_transpose", "dma", [tile.all], [source.all], transpose=True)
        timeline = time_trace(builder.trace, TRN2)
        return 128 * 128 * (2 if dtype == "bfloat16" else 4) / timeline.dma_engine_busy_us * 1e6

    assert turned("hbm", "bfloat16") == pytest.approx(0.9 * 362e9 / 16)
    assert turned("sbuf", "bfloat16") == pytest.approx(0.5 * 23e9)
    assert turned("hbm", "float32") == pytest.approx(0.45 * 362e9 / 16)


@pytest.mark.parametrize("memory", ["hbm", "sbuf"])
@pytest.mark.parametrize("partitions", [16, 32, 64, 128])
def test_a_dma_transpose_into_few_partitions_takes_as_long_as_into_all(memory, partitions):
    """The rate falls with the partitions that are written: the same time, less data."""

    def busy(columns):
        builder = Builder()
        source = builder.tensor(memory, 128, columns, "bfloat16")
        tile = builder.tensor("sbuf", columns, 128, "bfloat16")
        builder.add("dma_transpose", "dma", [tile.all], [source.all], transpose=True)
        return time_trace(builder.trace, TRN2).dma_engine_busy_us

    assert busy(partitions) == pytest.approx(busy(128))


def test_consumer_waits_for_the_dma_and_its_semaphore():
    builder = Builder()
    source = builder.tensor("hbm", 128, 512)
    tile, out = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
    builder.dma(tile.all, source.all)
    builder.copy(out.all, tile.all)
    builder.dma(builder.tensor("hbm", 128, 512).all, out.all)
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == pytest.approx(timeline.end[0] + 0.32)
    assert timeline.start[2] == pytest.approx(timeline.end[1] + 0.1)


def test_only_overlapping_regions_wait():
    builder = Builder()
    source = builder.tensor("hbm", 128, 4096)
    tile = builder.tensor("sbuf", 128, 4096)
    out = builder.tensor("sbuf", 128, 64)
    builder.dma(tile.all, source.all)
    half = builder.tensor("sbuf", 128, 128)
    builder.copy(out.all, half[:, 0:128:2])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == 0.0


def test_interleaved_columns_do_not_wait_for_each_other():
    builder = Builder()
    tile = builder.tensor("sbuf", 128, 256)
    source = builder.tensor("sbuf", 128, 128)
    out = builder.tensor("sbuf", 128, 128)
    builder.copy(tile[:, 0::2], source.all, engine="gpsimd")
    builder.copy(out.all, tile[:, 1::2], engine="vector")
    builder.copy(out.all, tile[:, 0::2], engine="vector")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == 0.0
    assert timeline.start[2] == pytest.approx(timeline.end[0] + 0.1)


def test_write_waits_for_the_readers_of_what_it_overwrites():
    builder = Builder()
    tile = builder.tensor("sbuf", 128, 512)
    source, out = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
    builder.copy(out.all, tile.all, engine="gpsimd")
    builder.copy(tile.all, source.all, engine="vector")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == pytest.approx(timeline.interval_end[0] + 0.1)


def test_dependent_instructions_pay_the_fixed_overhead_and_independent_ones_do_not():
    builder = Builder()
    a, b, c, d = (builder.tensor("sbuf", 128, 512) for _ in range(4))
    builder.copy(b.all, a.all)
    builder.copy(d.all, a.all)
    builder.copy(c.all, d.all)
    timeline = time_trace(builder.trace, TRN2)
    # two float32 elements a cycle from SBUF to SBUF
    assert timeline.start[1] == pytest.approx(us(256 + 20, 0.96e9))
    assert timeline.start[2] - timeline.start[1] == pytest.approx(us(256 + 150, 0.96e9))


def test_matmuls_accumulate_without_waiting():
    builder = Builder()
    stationary = builder.tensor("sbuf", 128, 128, "bfloat16")
    moving = builder.tensor("sbuf", 128, 512, "bfloat16")
    out = builder.tensor("psum", 128, 512)
    for _ in range(2):
        builder.matmul(out.all, stationary.all, moving.all)
    timeline = time_trace(builder.trace, STEADY)
    assert timeline.start[1] == pytest.approx(us(521, 2.4e9))


def store_then_load():
    builder = Builder()
    source, sink = builder.tensor("hbm", 256, 512), builder.tensor("hbm", 128, 512)
    one, two, out = (builder.tensor("sbuf", 128, 512) for _ in range(3))
    builder.dma(one.all, source[:128, :])
    builder.copy(out.all, one.all)
    store = builder.dma(sink.all, out.all)
    after = builder.dma(two.all, source[128:, :])
    return builder, store, after


def test_loads_pass_a_store_that_is_not_ready():
    builder, store, after = store_then_load()
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[after] == pytest.approx(0.485 + 128 * 0.95e-3)
    assert timeline.start[store] > timeline.start[after]
    assert [t.index for t in timeline.transfers] == [0, store, after]


def test_a_load_of_what_a_store_writes_waits_for_it():
    builder, store, _ = store_then_load()
    sink = builder.trace.instructions[store].writes[0]
    tile = builder.tensor("sbuf", 128, 512)
    again = builder.dma(tile.all, sink)
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[again] == pytest.approx(timeline.end[store] + 0.32)


def rotating(columns, tiles):
    """Load, copy into one small tensor; every tile is allocated afresh."""
    builder = Builder()
    source = builder.tensor("hbm", 128, columns)
    out = builder.tensor("sbuf", 128, 1)
    loads, copies = [], []
    for _ in range(tiles):
        tile = builder.tensor("sbuf", 128, columns)
        loads.append(builder.dma(tile.all, source.all))
        copies.append(builder.copy(out.all, tile[:, :1]))
    return builder.trace, loads, copies


def test_capacity_bounds_how_far_loads_run_ahead():
    trace, loads, copies = rotating(20000, 4)  # 80,000 B each, two fit in 212,472
    timeline = time_trace(trace, TRN2)
    issue = 0.485 + 157 * 0.95e-3  # 10,240,000 bytes in descriptors of at most 64 KiB
    assert timeline.start[loads[1]] == pytest.approx(issue)
    assert timeline.start[loads[2]] >= timeline.interval_end[copies[0]]
    assert timeline.start[loads[3]] >= timeline.interval_end[copies[1]]
    assert timeline.sbuf_overflow_bytes == 0


def test_small_tiles_all_load_ahead():
    trace, loads, _ = rotating(1000, 4)
    timeline = time_trace(trace, TRN2)
    issue = 0.485 + 128 * 0.95e-3
    assert timeline.start[loads[3]] == pytest.approx(3 * issue)


def test_more_live_than_fits_is_reported_and_still_timed():
    builder = Builder()
    source = builder.tensor("hbm", 128, 30000)
    one, two = builder.tensor("sbuf", 128, 30000), builder.tensor("sbuf", 128, 30000)
    builder.dma(one.all, source.all)
    builder.dma(two.all, source.all)
    builder.add("tensor_tensor", "vector", [one.all], [one.all, two.all])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.sbuf_overflow_bytes == 240000 - TRN2.sbuf_usable_bytes_per_partition
    assert timeline.latency_us > 0


def test_psum_banks_rotate():
    """With 8 banks the ninth accumulation waits for the first to be copied out."""
    builder = Builder()
    stationary = builder.tensor("sbuf", 128, 128, "bfloat16")
    moving = builder.tensor("sbuf", 128, 512, "bfloat16")
    out = builder.tensor("sbuf", 128, 512)
    products, copies = [], []
    for _ in range(16):
        bank = builder.tensor("psum", 128, 512)
        products.append(builder.matmul(bank.all, stationary.all, moving.all))
        copies.append(builder.copy(out.all, bank.all))
    timeline = time_trace(builder.trace, STEADY)
    assert timeline.start[products[7]] == pytest.approx(7 * us(521, 2.4e9))
    assert timeline.start[products[8]] == pytest.approx(
        max(8 * us(521, 2.4e9), timeline.interval_end[copies[0]] + 0.1)
    )
    assert timeline.start[products[15]] == pytest.approx(timeline.interval_end[copies[7]] + 0.1)
    assert timeline.start[products[15]] > timeline.interval_end[products[14]]


def vector_op(op, operands, target=TRN2, engine="vector", **attributes):
    """Return cycles; operands are (memory, dtype, columns, column step), the result first."""
    builder = Builder()
    accesses = []
    for memory, dtype, columns, step in operands:
        tensor = builder.tensor(memory, 128, columns * step, dtype)
        accesses.append(tensor[:, ::step])
    builder.add(op, engine, accesses[:1], accesses[1:], **attributes)
    timeline = time_trace(builder.trace, target)
    clock = {"vector": target.vector_clock_hz, "scalar": target.scalar_clock_hz}
    hz = clock.get(engine, target.gpsimd_clock_hz)
    took = (timeline.interval_end[0] - timeline.start[0]) * hz / 1e6
    return took - target.engine_streaming_overhead_cycles


B, F = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("op", "operands", "cycles"),
    [
        ("tensor_copy", [("sbuf", B, 512, 1), ("sbuf", B, 512, 1)], 128),
        ("tensor_copy", [("sbuf", B, 512, 1), ("sbuf", B, 512, 2)], 256),
        ("tensor_copy", [("sbuf", B, 512, 1), ("psum", B, 512, 1)], 256),
        ("tensor_copy", [("sbuf", B, 512, 1), ("psum", F, 512, 1)], 512),
        ("tensor_copy", [("sbuf", F, 512, 1), ("sbuf", F, 512, 1)], 256),
        ("tensor_copy", [("sbuf", B, 512, 1), ("sbuf", F, 512, 1)], 256),
        ("tensor_copy", [("sbuf", F, 512, 1), ("sbuf", B, 512, 1)], 512),
        ("tensor_scalar", [("sbuf", B, 512, 1), ("sbuf", B, 512, 1), ("sbuf", F, 1, 1)], 128),
        ("tensor_tensor", [("sbuf", F, 512, 1)] + 2 * [("sbuf", F, 512, 1)], 512),
        ("tensor_tensor", [("sbuf", F, 512, 1), ("sbuf", F, 512, 1), ("psum", F, 512, 1)], 512),
        ("tensor_tensor", [("sbuf", B, 512, 1)] + 2 * [("sbuf", B, 512, 1)], 256),
        ("tensor_tensor_scan", [("sbuf", F, 512, 1)] + 2 * [("sbuf", F, 512, 1)], 1024),
        ("reciprocal", [("sbuf", F, 512, 1), ("sbuf", F, 512, 1)], 6 * 512),
        ("tensor_scalar_reduce", [("sbuf", F, 512, 1), ("sbuf", F, 512, 1)], 576),
        ("memset", [("sbuf", B, 512, 1)], 256),
        ("memset", [("sbuf", F, 512, 1)], 512),
    ],
)
def test_vector_cycles_on_trn2(op, operands, cycles):
    assert vector_op(op, operands) == pytest.approx(cycles)


def test_trn1_has_no_fast_modes():
    copy = [("sbuf", B, 512, 1), ("sbuf", B, 512, 1)]
    assert vector_op("tensor_copy", copy, TRN1) == pytest.approx(512)
    tiny = [("sbuf", F, 8, 1), ("sbuf", F, 8, 1)]
    assert vector_op("tensor_copy", tiny, TRN1) + 20 == pytest.approx(64)  # the least, all in all


def test_trn1_wide_strides_halve_the_bandwidth():
    took = vector_op("tensor_copy", [("sbuf", F, 64, 4), ("sbuf", F, 64, 1)], TRN1)
    assert took == pytest.approx(128)


def test_activation_reads_its_sums_out():
    operands = [("sbuf", F, 512, 1), ("sbuf", F, 512, 1)]
    plain = vector_op("activation", operands, engine="scalar")
    summed = vector_op("activation", operands, engine="scalar", reduces=True)
    assert (plain, summed) == (pytest.approx(512), pytest.approx(576))


def test_table_loads_when_the_function_changes():
    builder = Builder()
    source = builder.tensor("sbuf", 128, 512)
    for function in ("exp", "exp", "copy", "gelu", "exp"):
        out = builder.tensor("sbuf", 128, 512)
        builder.add("activation", "scalar", [out.all], [source.all], function=function)
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[0] == pytest.approx(1.3)
    assert [stop - start for start, stop in timeline.table_loads] == [pytest.approx(1.3)] * 3


def test_table_load_hides_behind_a_load():
    builder = Builder()
    source = builder.tensor("hbm", 128, 512)
    tile, out = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
    builder.dma(tile.all, source.all)
    builder.add("activation", "scalar", [out.all], [tile.all], function="exp")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == pytest.approx(timeline.end[0] + 0.32)


@pytest.mark.parametrize(("target", "parallel"), [(TRN1, False), (TRN2, True)])
def test_trn1_keeps_two_engines_out_of_one_memory(target, parallel):
    builder = Builder()
    psum = [builder.tensor("psum", 128, 512) for _ in range(2)]
    outs = [builder.tensor("sbuf", 128, 512) for _ in range(4)]
    builder.copy(outs[0].all, psum[0].all, engine="vector")
    builder.copy(outs[1].all, psum[1].all, engine="scalar")
    builder.copy(outs[3].all, outs[2].all, engine="gpsimd")
    timeline = time_trace(builder.trace, target)
    if parallel:
        assert timeline.start == [0.0, 0.0, 0.0]
    else:
        assert timeline.start[1] == pytest.approx(timeline.interval_end[0])
        assert timeline.start[2] == pytest.approx(timeline.interval_end[0])


def test_trn3_is_timed_too():
    timeline = time_trace(matmuls(4), TRN3)
    assert timeline.latency_us > 0


def test_named_predecessors_are_waited_for():
    builder = Builder()
    tensors = [builder.tensor("sbuf", 128, 512) for _ in range(4)]
    builder.copy(tensors[0].all, tensors[1].all, engine="vector")
    builder.copy(tensors[2].all, tensors[3].all, engine="gpsimd")
    first, second = builder.trace.instructions
    second.depends_on(first)
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[1] == pytest.approx(timeline.end[0] + 0.1)


def test_no_reorder_keeps_a_load_behind_a_store():
    builder, store, after = store_then_load()
    builder.trace.ordered.append((0, len(builder.trace.instructions)))
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[after] >= timeline.start[store]


@pytest.mark.parametrize(("address", "waits"), [((0, 0), True), ((0, 2048), False)])
def test_tensors_at_one_manual_address_wait_for_each_other(address, waits):
    builder = Builder()
    source, out = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
    one, two = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
    builder.trace.allocations[one.storage].address = (0, 0)
    builder.trace.allocations[two.storage].address = address
    builder.copy(one.all, source.all, engine="vector")
    builder.copy(out.all, one.all, engine="vector")
    builder.copy(two.all, source.all, engine="gpsimd")
    timeline = time_trace(builder.trace, TRN2)
    assert (timeline.start[2] >= timeline.interval_end[1]) is waits


def test_a_onezero_operand_halves_float32():
    timeline = time_trace(matmuls(2, 128, "float32", onezero=True), STEADY)
    assert timeline.start[1] == pytest.approx(us(2 * 128 + 16, 2.4e9))


def products(change):
    """The product of two tiles twice, each used once; `change` acts between the two."""
    builder = Builder()
    left, right = builder.tensor("sbuf", 128, 512), builder.tensor("sbuf", 128, 512)
    sink = builder.tensor("sbuf", 128, 1024)
    for at in (0, 512):
        result = builder.tensor("sbuf", 128, 512)
        function = "multiply" if change != "function" or not at else "add"
        builder.add(
            "tensor_tensor", "vector", [result.all], [left.all, right.all], function=function
        )
        builder.copy(sink[:, at : at + 512], result.all, engine="gpsimd")
        if change == "operand":
            builder.add("memset", "gpsimd", [left[:, 5:6]])
        if change == "result":
            builder.add("memset", "gpsimd", [result.all])
    return builder.trace


@pytest.mark.parametrize("change", ["nothing", "function", "operand", "result"])
def test_the_same_product_twice_is_computed_once(change):
    timeline = time_trace(products(change), TRN2)
    if change == "nothing":
        assert timeline.repeated == {2: 0}
        assert timeline.busy_us["vector"] == pytest.approx(us(512 + 150, 0.96e9))
        assert timeline.start[3] >= timeline.end[0]
    else:
        assert timeline.repeated == {}
        assert timeline.busy_us["vector"] > us(2 * 512, 0.96e9)


@pytest.mark.parametrize(("between", "reused"), [(998, True), (999, True), (1000, False)])
def test_a_result_is_kept_for_a_thousand_instructions(between, reused):
    builder = Builder()
    left, right = builder.tensor("sbuf", 128, 8), builder.tensor("sbuf", 128, 8)
    for again in (False, True):
        result = builder.tensor("sbuf", 128, 8)
        at = builder.add("tensor_tensor", "vector", [result.all], [left.all, right.all])
        for _ in range(0 if again else between):
            builder.add("memset", "gpsimd", [builder.tensor("sbuf", 128, 8).all])
    assert at == between + 1
    assert repeated_work(builder.trace) == ({at: 0} if reused else {})


@pytest.mark.parametrize("edge", [True, False])
def test_a_load_does_not_cross_the_edge_of_a_turn(edge):
    builder = Builder()
    for _ in range(2):
        source, tile = builder.tensor("hbm", 128, 512), builder.tensor("sbuf", 128, 512)
        builder.dma(tile.all, source.all)
    builder.trace.loop_edges = [1] if edge else []
    timeline = time_trace(builder.trace, TRN2)
    assert (timeline.start[1] >= timeline.end[0]) is edge
