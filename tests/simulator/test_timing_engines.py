"""How long TensorE, VectorE and ScalarE take, by tiny traces with answers worked out by hand."""

import itertools

import pytest
from trace_builder import STEADY, TRN1, TRN2, Builder, matmuls, us

from nmm_compiler.simulator.timing.timeline import time_trace


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
        ("memset", [("sbuf", F, 512, 1)], 0.8 * 512),
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


def test_a_onezero_operand_halves_float32():
    timeline = time_trace(matmuls(2, 128, "float32", onezero=True), STEADY)
    assert timeline.start[1] == pytest.approx(us(2 * 128 + 16, 2.4e9))
