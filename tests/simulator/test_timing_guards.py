"""What no kernel shows by itself: each trace is one that a slip of the timing model gets wrong."""

import dataclasses

import pytest
from trace_builder import Builder

from nmm_compiler import targets
from nmm_compiler.simulator.timing.costs import ComputeCosts
from nmm_compiler.simulator.timing.dma import DmaCosts
from nmm_compiler.simulator.timing.timeline import time_trace

TRN1, TRN2 = targets.get("trn1"), targets.get("trn2")
STEADY = dataclasses.replace(TRN2, tensor_ramp_seconds=0.0)  # trn2 without the clock ramp
B, F = "bfloat16", "float32"


def us(cycles, hz):
    return cycles / hz * 1e6


def one(op, engine, operands, **attributes):
    """Return an instruction; operands are (memory, dtype, columns), the result first."""
    builder = Builder()
    views = [builder.tensor(memory, 128, n, dtype).all for memory, dtype, n in operands]
    builder.add(op, engine, views[:1], views[1:], **attributes)
    return builder.trace.instructions[0]


def cycles(instruction, target=TRN2):
    """Return the cycles that an instruction holds its engine for, without the overhead."""
    clocks = {"vector": target.vector_clock_hz, "scalar": target.scalar_clock_hz}
    hz = clocks.get(instruction.engine, target.gpsimd_clock_hz)
    interval = ComputeCosts(target).other(instruction)[0]
    return interval * hz / 1e6 - target.engine_streaming_overhead_cycles


def matmul(n, dtype=B, m=128, **attributes):
    builder = Builder()
    tensors = builder.tensor("psum", m, n), builder.tensor("sbuf", 128, m, dtype)
    moving = builder.tensor("sbuf", 128, n, dtype)
    builder.matmul(tensors[0].all, tensors[1].all, moving.all, **attributes)
    return builder.trace.instructions[0]


def dma(rows, columns, memories=("sbuf", "hbm"), dtype=B, first=0, **attributes):
    """Return a DMA of [rows, columns], into or from partition `first` on."""
    builder = Builder()
    ends = [builder.tensor(memory, 128, columns, dtype) for memory in memories]
    builder.dma(*(end[first : first + rows, :] for end in ends), **attributes)
    return builder.trace.instructions[0]


# -- costs depend on each of these -----------------------------------------------------------

PAIR = [("sbuf", F, 512), ("sbuf", F, 512)]


@pytest.mark.parametrize(
    ("cost", "variants"),
    [
        (ComputeCosts.tensor, [matmul(128, F), matmul(128, F, is_transpose=True), matmul(256, F)]),
        (ComputeCosts.tensor, [matmul(128, F), matmul(128, B), matmul(128, F, onezero=True)]),
        (ComputeCosts.other, [one("activation", "scalar", PAIR, reduces=v) for v in (0, 1)]),
        (
            ComputeCosts.other,
            [one("memset", "vector", [("sbuf", B, 512)], nonzero=v) for v in (False, True)],
        ),
        (ComputeCosts.other, [one("reciprocal", engine, PAIR) for engine in ("vector", "gpsimd")]),
        (
            ComputeCosts.other,
            [
                one("tensor_reduce", "vector", [("sbuf", B, 1), ("sbuf", B, 512)], function=f)
                for f in ("add", "multiply")
            ],
        ),
        (
            ComputeCosts.other,
            [
                one("tensor_copy", "vector", [(memory, dtype, 512), ("sbuf", B, 512)])
                for memory, dtype in (("sbuf", B), ("psum", B), ("sbuf", F))
            ],
        ),
        (DmaCosts.cost, [dma(128, 128), dma(128, 128, transpose=True), dma(128, 256)]),
        (DmaCosts.cost, [dma(128, 128, dge_mode="hwdge", issuer=i) for i in ("sync", "scalar")]),
        (DmaCosts.cost, [dma(128, 128, dge_mode=mode) for mode in ("none", "hwdge", "swdge")]),
        (DmaCosts.cost, [dma(8, 128), dma(8, 128, first=64)]),
        (
            DmaCosts.cost,
            [dma(64, 128), dma(64, 128, ("hbm", "hbm")), dma(64, 128, ("hbm", "sbuf"))],
        ),
    ],
)
def test_these_differ_in_cost(cost, variants):
    owner = DmaCosts if cost is DmaCosts.cost else ComputeCosts
    found = [cost(owner(TRN2), instruction) for instruction in variants]
    assert len(set(found)) == len(found)


# -- engines ---------------------------------------------------------------------------------


def test_weights_wider_than_the_moving_tile_show_where_they_load_slowly():
    slow = dataclasses.replace(TRN2, stationary_load_speedup=1.0)
    interval, _ = ComputeCosts(slow).tensor(matmul(16))
    assert interval == pytest.approx(us(128 + 9, 2.4e9))


def test_a_generation_without_transpose_mode_transposes_float32_in_four_passes():
    interval, _ = ComputeCosts(TRN1).tensor(matmul(128, F, is_transpose=True))
    assert interval == pytest.approx(us(4 * 128 + 340, TRN1.tensor_clock_hz))


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (one("tensor_copy", "vector", [("psum", B, 512), ("psum", B, 512)]), 512),
        (one("tensor_copy", "vector", [("psum", B, 512), ("sbuf", B, 512)]), 256),
        (one("tensor_tensor", "vector", [("sbuf", F, 512)] + 2 * [("psum", F, 512)]), 512),
        (one("tensor_reduce", "vector", [("sbuf", B, 1), ("sbuf", B, 512)], function="add"), 256),
        (one("tensor_reduce", "vector", [("sbuf", B, 1), ("sbuf", B, 512)], function="min"), 512),
        (one("bn_aggr", "vector", [("sbuf", F, 2), ("sbuf", F, 48)]), 13 * 16),
        (one("tensor_copy_predicated", "vector", PAIR), 512),
        (one("tensor_copy_predicated", "vector", [("sbuf", F, 512), ("psum", F, 512)]), 512),
        (one("topk", "vector", PAIR, k=16), 4 * 512 + 16),
        (one("iota", "gpsimd", [("sbuf", "int32", 512)]), 150 + 512),
        (one("affine_select", "gpsimd", PAIR), 150 + 512),
        (one("tensor_partition_reduce", "gpsimd", PAIR), 150 + 16 * 512),
    ],
    ids=lambda value: getattr(value, "op", value),
)
def test_cycles_on_trn2(instruction, expected):
    assert cycles(instruction) == pytest.approx(expected)


def test_scalar_answers_later_than_vector():
    latency = ComputeCosts(TRN2).other(one("activation", "scalar", PAIR))[1]
    assert latency == pytest.approx(us(512 + 228, 1.2e9))
    latency = ComputeCosts(TRN2).other(one("activation", "scalar", PAIR, function="exp"))[1]
    assert latency == pytest.approx(us(512 + 228 + 108, 1.2e9))


def test_loads_of_activation_tables_are_work_of_scalar():
    builder = Builder()
    tile = builder.tensor("sbuf", 128, 512)
    out = builder.tensor("sbuf", 128, 512)
    builder.add("activation", "scalar", [out.all], [tile.all], function="exp")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.busy_us["scalar"] == pytest.approx(1.3 + us(512 + 228 + 108, 1.2e9))


# -- transfers -------------------------------------------------------------------------------


def test_a_copy_within_hbm_shares_its_bandwidth_between_reading_and_writing():
    cost = DmaCosts(TRN2).cost(dma(128, 2048, ("hbm", "hbm")))
    assert cost.hbm_read_bytes == cost.hbm_write_bytes == 128 * 4096
    runs = -(-128 * 4096 // 65536)  # 512 KiB without a gap: whole descriptors
    each = 0.006 + 65536 / (362e9 / 16 / 2) * 1e6
    # half a descriptor an engine is one descriptor: no engine carries less than one
    assert (runs, cost.uniform_us) == (8, pytest.approx(each))


@pytest.mark.parametrize(("columns", "share"), [(128, 1.0), (112, 1.0), (20, 20 / 32), (1, 1 / 16)])
def test_a_transpose_of_ragged_rows_wastes_the_rest_of_16(columns, share):
    cost = DmaCosts(TRN2).cost(dma(128, columns, transpose=True))
    rate = 0.9 * 362e9 / 16 * share
    assert cost.uniform_us == pytest.approx(128 * columns * 2 / 16 / rate * 1e6)


@pytest.mark.parametrize("rows", [128, 64, 16])
def test_a_transpose_into_few_partitions_uses_their_share_of_the_path(rows):
    cost = DmaCosts(TRN2).cost(dma(rows, 128, transpose=True))
    rate = 0.9 * 362e9 / 16 * rows / 128
    assert cost.uniform_us == pytest.approx(rows * 128 * 2 / 16 / rate * 1e6)


def test_engines_of_a_partial_transfer_start_one_after_another():
    builder = Builder()
    source, tile = builder.tensor("hbm", 128, 512), builder.tensor("sbuf", 128, 512)
    builder.dma(tile[32:64, :], source[32:64, :])
    (transfer,) = time_trace(builder.trace, TRN2).transfers
    starts = [start for _, start, _ in transfer.parts]
    assert starts == pytest.approx([starts[0] + rank * 0.3 / 15 for rank in range(4)])


def test_only_an_index_is_no_data():
    builder = Builder()
    out = builder.tensor("hbm", 128, 64, "int32")
    left, right = (builder.tensor("sbuf", 128, 64, "int32") for _ in range(2))
    index = builder.tensor("sbuf", 1, 1, "int32")
    builder.add("dma_compute", "dma", [out.all], [left.all, right.all])
    builder.add("dma_copy", "dma", [out.all], [left.all, index.all])
    builder.add("dma_copy", "dma", [out.all], [left.all, right.all], indirect=True)
    read = [DmaCosts(TRN2).cost(ins).read_bytes for ins in builder.trace.instructions]
    assert read == [2 * 128 * 256, 128 * 256, 128 * 256]


# -- waiting ---------------------------------------------------------------------------------


def tiles(builder, count, columns=512, memory="sbuf"):
    return [builder.tensor(memory, 128, columns) for _ in range(count)]


def test_a_partial_cover_of_a_manual_address_forgets_nothing():
    builder = Builder()
    source, out, whole = tiles(builder, 3)
    left, right = tiles(builder, 2, 256)
    for tensor, byte in ((whole, 0), (left, 0), (right, 1024)):
        builder.trace.allocations[tensor.storage].address = (0, byte)
    builder.copy(whole.all, source.all)
    reader = builder.copy(out.all, whole.all, engine="gpsimd")
    builder.copy(left.all, source[:, :256])
    late = builder.copy(right.all, source[:, :256], engine="scalar")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[late] >= timeline.interval_end[reader]


def test_manual_memory_is_not_written_before_a_store_that_waits_has_read_it():
    builder = Builder()
    source, first, second = tiles(builder, 3)
    for tensor in (first, second):
        builder.trace.allocations[tensor.storage].address = (0, 0)
    builder.copy(first.all, source.all)
    store = builder.dma(builder.tensor("hbm", 128, 512).all, first.all)
    again = builder.copy(second.all, source.all, engine="gpsimd")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[again] >= timeline.end[store]


def test_what_a_store_that_waits_reads_is_not_overwritten():
    builder = Builder()
    source, out = tiles(builder, 2)
    builder.copy(out.all, source.all)
    store = builder.dma(builder.tensor("hbm", 128, 512).all, out.all)
    again = builder.copy(out.all, source.all, engine="gpsimd")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[again] == pytest.approx(timeline.end[store] + 0.32)


def test_memory_is_not_given_away_before_a_store_that_waits_has_read_it():
    builder = Builder()
    tile, kept = tiles(builder, 2, 25000)  # 100,000 B each: two fit, three do not
    source, out = builder.tensor("hbm", 128, 25000), builder.tensor("sbuf", 128, 1)
    builder.copy(tile.all, kept.all)
    store = builder.dma(builder.tensor("hbm", 128, 25000).all, tile.all)
    builder.copy(out.all, tile[:, :1])  # the last reader, in program order
    late = builder.dma(builder.tensor("sbuf", 128, 25000).all, source.all)
    builder.copy(out.all, kept[:, :1])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[late] >= timeline.end[store]


def test_memory_is_used_again_when_its_last_reader_has_signalled():
    builder = Builder()
    source, out = builder.tensor("hbm", 128, 20000), builder.tensor("sbuf", 128, 1)
    loads, copies = [], []
    for _ in range(3):  # 80,000 B each: two fit
        tile = builder.tensor("sbuf", 128, 20000)
        loads.append(builder.dma(tile.all, source.all))
        copies.append(builder.copy(out.all, tile[:, :1]))
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[loads[2]] == pytest.approx(timeline.interval_end[copies[0]] + 0.1)


def test_the_smallest_tile_takes_a_whole_psum_bank():
    builder = Builder()
    weight, moving = builder.tensor("sbuf", 128, 128, B), builder.tensor("sbuf", 128, 64, B)
    out = builder.tensor("sbuf", 128, 64)
    products, copies = [], []
    for _ in range(9):
        bank = builder.tensor("psum", 128, 64)  # 256 of its 2,048 bytes
        products.append(builder.matmul(bank.all, weight.all, moving.all))
        copies.append(builder.copy(out.all, bank.all))
    timeline = time_trace(builder.trace, STEADY)
    assert timeline.start[products[8]] >= timeline.interval_end[copies[0]] + 0.1


def test_reads_of_other_columns_are_remembered_apart():
    builder = Builder()
    tile, out, source = tiles(builder, 3)
    builder.copy(out[:, :8], tile[:, :8], engine="gpsimd")
    wide = builder.copy(out.all, tile.all, engine="gpsimd")
    again = builder.copy(tile[:, 256:], source[:, 256:])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[again] == pytest.approx(timeline.interval_end[wide] + 0.1)


def test_a_strided_write_forgets_no_reader_of_the_columns_between():
    builder = Builder()
    tile, out, source = tiles(builder, 3)
    reader = builder.copy(out[:, 1:254:2], tile[:, 1:254:2], engine="gpsimd")
    builder.copy(tile[:, 0:256:2], source[:, 0:256:2], engine="scalar")
    again = builder.copy(tile[:, 1:2], source[:, 1:2])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[again] == pytest.approx(timeline.interval_end[reader] + 0.1)


def test_a_write_to_some_partitions_forgets_no_write_to_others():
    builder = Builder()
    tile, out, source = tiles(builder, 3)
    whole = builder.copy(tile.all, source.all, engine="gpsimd")
    builder.copy(tile[:64, :], source[:64, :], engine="scalar")
    reader = builder.copy(out[64:, :], tile[64:, :])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[reader] >= timeline.end[whole] + 0.1


@pytest.mark.parametrize("halves", [(slice(0, 64), slice(64, 128)), (slice(64, 128), slice(0, 64))])
def test_neighbouring_partitions_do_not_wait_for_each_other(halves):
    builder = Builder()
    tile, out, source = tiles(builder, 3)
    builder.copy(tile[halves[0], :], source[halves[0], :], engine="gpsimd")
    builder.copy(out[halves[1], :], tile[halves[1], :])
    assert time_trace(builder.trace, TRN2).start == [0.0, 0.0]


def test_the_peak_is_the_largest_use_and_not_the_last():
    builder = Builder()
    large, small, out = (builder.tensor("sbuf", 128, n) for n in (30000, 100, 1))
    builder.copy(out.all, large[:, :1])
    builder.copy(out.all, small[:, :1])
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.sbuf_peak_bytes == 4 * 30001


def test_nothing_crosses_the_edge_of_a_loop_on_the_device():
    """The next turn uses the tensors of this one again: its first load waits for all of this."""
    builder = Builder()
    source, held = builder.tensor("hbm", 128, 512), tiles(builder, 4)
    slow = builder.copy(held[0].all, held[1].all)
    builder.trace.loop_edges.append(slow + 1)
    load = builder.dma(held[2].all, source.all)
    other = builder.copy(held[3].all, held[1].all, engine="gpsimd")
    timeline = time_trace(builder.trace, TRN2)
    assert timeline.start[load] == timeline.start[other] == timeline.end[slow] > 0.0
