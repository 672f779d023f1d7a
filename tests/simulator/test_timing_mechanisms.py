"""When instructions start: dependences, memories and queues, by tiny traces worked out by hand."""

import pytest
from trace_builder import STEADY, TRN1, TRN2, TRN3, Builder, matmuls, us

from nmm_compiler.simulator.timing.resources import Pool
from nmm_compiler.simulator.timing.timeline import time_trace


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


@pytest.mark.parametrize("edge", [True, False])
def test_a_load_does_not_cross_the_edge_of_a_turn(edge):
    builder = Builder()
    for _ in range(2):
        source, tile = builder.tensor("hbm", 128, 512), builder.tensor("sbuf", 128, 512)
        builder.dma(tile.all, source.all)
    builder.trace.loop_edges = [1] if edge else []
    timeline = time_trace(builder.trace, TRN2)
    assert (timeline.start[1] >= timeline.end[0]) is edge


@pytest.mark.parametrize(("store_ready", "free_from"), [(10.0, 20.0), (60.0, 50.0)])
def test_a_tile_whose_store_was_put_off_is_free_before_what_dies_later(store_ready, free_from):
    """100 bytes: 60 die at 50; 40 are read by a store, ready at store_ready and 10 us long."""
    waiting = [store_ready]

    def settle(before):
        if not waiting or waiting[0] >= before:
            return False
        pool.release(40, waiting.pop() + 10.0, 1)
        return True

    pool = Pool(100, settle)
    assert pool.take(60) == pool.take(40) == 0.0
    pool.release(60, 50.0, 0)
    assert pool.take(40) == free_from
    assert pool.freed_by == (store_ready < 50.0)
    assert bool(waiting) == (store_ready > 50.0)
    assert pool.overflow == 0
