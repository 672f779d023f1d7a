"""What each kind of instruction and transfer takes, by tiny traces worked out by hand."""

import dataclasses
import itertools

import pytest
from simulator_kernels import run
from trace_builder import STEADY, TRN1, TRN2, Scene, load, matmuls, starts, stops, transfers, us

from nmm_compiler.simulator.timing.costs import dma_cost, other_cost
from nmm_compiler.simulator.timing.schedule import time_trace, time_traces

B, F = "bfloat16", "float32"
ROW, BF16, SUM = "sbuf float32 512", "sbuf bfloat16 512", "psum float32 512"
FROM_HBM = 362e9 / 16  # an engine's share


def one(text):
    """Return an instruction: `engine op key=value: memory dtype columns step, ...`; the result is
    the first operand."""
    head, _, operands = text.partition(": ")
    engine, op, *flags = head.split()
    scene, views = "", []
    for number, operand in enumerate(operands.split(", ")):
        memory, dtype, columns, *step = operand.split()
        apart = int(*step or "1")
        scene += f"{memory} t{number} 128x{int(columns) * apart} {dtype}\n"
        views.append(f"t{number}[:,::{apart}]")
    scene += " ".join((engine, *views, f"op={op}", *flags))
    return Scene(scene).trace.instructions[0]


def cycles(instruction, target=TRN2):
    """Return the cycles that an instruction holds its engine for, without the overhead."""
    clocks = {"vector": target.vector_clock_hz, "scalar": target.scalar_clock_hz}
    hz = clocks.get(instruction.engine, target.gpsimd_clock_hz)
    interval = other_cost(target, instruction)[0]
    return interval * hz / 1e6 - target.engine_streaming_overhead_cycles


def dma(rows, columns, memories="sbuf hbm", dtype=B, first=0, flags=""):
    """Return a DMA of [rows, columns], into or from partition `first` on."""
    to, of = (f"{memory} {end} 128x{columns} {dtype}\n"
              for end, memory in zip("ab", memories.split(), strict=True))  # fmt: skip
    part = f"[{first}:{first + rows},:]"
    return Scene(f"{to}{of}dma a{part} b{part} {flags}").trace.instructions[0]


# -- TensorE ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "n", "dtype", "flags", "cycles"),
    [
        (STEADY, 512, B, "", 512 + 9),
        (STEADY, 16, B, "", 64 + 9),
        (STEADY, 512, F, "", 4 * 512 + 16),
        (STEADY, 16, F, "", 4 * 128 + 16),
        (STEADY, 128, F, "is_transpose=1", 2 * 128 + 16),
        (STEADY, 128, F, "onezero=1", 2 * 128 + 16),
        (TRN1, 512, B, "", 512 + 12),
        (TRN1, 512, F, "", 4 * 512 + 340),
        (TRN1, 128, F, "is_transpose=1", 4 * 128 + 340),  # it has no transpose mode
        # weights wider than the moving tile, where they load slowly
        (dataclasses.replace(STEADY, stationary_load_speedup=1.0), 16, B, "", 128 + 9),
    ],
)
def test_matmul_interval(target, n, dtype, flags, cycles):
    timeline = time_trace(matmuls(3, n, dtype, flags), target)
    held = pytest.approx(us(cycles, target.tensor_clock_hz))
    assert starts(timeline)[2] - starts(timeline)[1] == held
    fill = target.tensor_latency_seconds * 1e6
    assert timeline.end[2] - starts(timeline)[2] - fill == held
    assert timeline.tensor_throttled_us == 0.0


@pytest.mark.parametrize(
    ("rows", "step", "fraction"), [(128, 1, 1), (96, 1, 1), (64, 1, 0.5), (32, 1, 0.5), (128, 8, 1)]
)
def test_products_of_half_the_rows_run_at_half_clock(rows, step, fraction):
    product = f"""
        psum out 128x512
        tensor out weight[:{rows},:] moving[:{rows},::{step}]
    """
    scene = f"sbuf weight 128x128\nsbuf moving 128x{512 * step}\n" + 20 * product
    found = starts(time_trace(Scene(scene).trace, TRN2))
    assert found[19] - found[18] == pytest.approx(us(4 * 512 + 16, fraction * 2.4e9))  # 1,707 ns


def test_clock_ramp_starts_at_half_and_ends():
    timeline = time_trace(matmuls(40), TRN2)
    full = us(521, 2.4e9)
    intervals = [b - a for a, b in itertools.pairwise(starts(timeline))]
    assert intervals[0] == pytest.approx(2 * full)
    assert {round(i / full, 6) for i in intervals} == {2.0, 1.0}  # half the clock, then all
    assert all(b < a + 1e-9 for a, b in itertools.pairwise(intervals))
    slow = sum(interval > full * 1.001 for interval in intervals)
    ramp = sum(intervals[:slow])
    assert ramp == pytest.approx(3.7, abs=intervals[0])  # microseconds, measured: 3.5 to 3.9
    assert timeline.tensor_throttled_us == pytest.approx(starts(timeline)[-1] + full - 40 * full)


@pytest.mark.parametrize(
    ("gap_columns", "later", "slow_again"), [(600, 0, False), (2600, 0, True), (2600, 5, False)]
)
def test_clock_ramp_engages_again_after_an_idle_gap(gap_columns, later, slow_again):
    """600 fp32 columns of VectorE are 0.8 us, 2600 are 2.9 us; the limit is half of 3 us. Products
    that come later in the program fill the gap, so that it is none."""
    product = "psum sum 128x512\ntensor sum weight tile\n"
    timeline = time_trace(Scene(f"""
        sbuf weight 128x128 bfloat16
        sbuf tile 128x512 bfloat16
        {product * 40}
        sbuf source moving 128x{gap_columns}
        sbuf stationary 128x128
        psum out 128x512
        vector moving source sum
        tensor out stationary moving[:,:512]
        {product * later}
    """).trace, TRN2)  # fmt: skip
    full = us(521 if later else 4 * 512 + 16, 2.4e9)
    took = stops(timeline)[-1] - starts(timeline)[-1]
    assert took == pytest.approx(2 * full if slow_again else full)


# -- VectorE, ScalarE, GpSimd ----------------------------------------------------------------


# Cycles on trn1 and on trn2, "-" where only the other one is looked at.
CYCLES = """
vector tensor_copy: BF16, BF16                                       | 512  | 128
vector tensor_copy: BF16, BF16 2                                     | -    | 256
vector tensor_copy: BF16, psum bfloat16 512                          | -    | 256
vector tensor_copy: psum bfloat16 512, BF16                          | -    | 256
vector tensor_copy: psum bfloat16 512, psum bfloat16 512             | -    | 512
vector tensor_copy: BF16, SUM                                        | -    | 512
vector tensor_copy: ROW, ROW                                         | -    | 256
vector tensor_copy: BF16, ROW                                        | -    | 256
vector tensor_copy: ROW, BF16                                        | -    | 512
vector tensor_copy: sbuf float32 8, sbuf float32 8                   | 44   | 44   64 in all
vector tensor_copy: sbuf float32 64 4, sbuf float32 64               | 128  | -    a wide stride
vector tensor_scalar: BF16, BF16, sbuf float32 1                     | -    | 128
vector tensor_tensor function=add: ROW, ROW, ROW                     | 1024 | 512
vector tensor_tensor function=add: ROW, ROW, SUM                     | 512  | 512
vector tensor_tensor function=add: ROW, SUM, SUM                     | 1024 | 512  one port, too
vector tensor_tensor function=add: BF16, BF16, BF16                  | -    | 256
vector tensor_tensor_scan: ROW, ROW, ROW                             | -    | 1024
vector tensor_copy_predicated: ROW, ROW, ROW                         | 1024 | 512
vector tensor_copy_predicated: ROW, ROW, SUM                         | 512  | 512
vector reciprocal: ROW, ROW                                          | -    | 3072 6 passes
vector tensor_scalar_reduce: ROW, ROW                                | -    | 576
vector tensor_reduce function=add: sbuf bfloat16 1, BF16             | -    | 256
vector tensor_reduce function=min: sbuf bfloat16 1, BF16             | -    | 512
vector bn_aggr: sbuf float32 2, sbuf float32 48                      | -    | 208  13 * 16
vector topk k=16: ROW, ROW                                           | -    | 2064 4 * 512 + 16
vector memset: BF16                                                  | -    | 256
vector memset: ROW                                                   | -    | 409.6
scalar activation: ROW, ROW                                          | -    | 512
scalar activation reduces=1: ROW, ROW                                | -    | 576  with its sums
gpsimd iota: sbuf int32 512                                          | -    | 662  150 + 512
gpsimd affine_select: ROW, ROW                                       | -    | 662
gpsimd tensor_partition_reduce: ROW, ROW                             | -    | 8342 150 + 16 * 512
"""


@pytest.mark.parametrize("line", CYCLES.strip().splitlines())
def test_cycles(line):
    text, *expected = line.replace("BF16", BF16).replace("ROW", ROW).replace("SUM", SUM).split("|")
    for target, words in zip((TRN1, TRN2), expected, strict=True):
        number = words.split()[0]
        if number != "-":
            assert cycles(one(text.strip()), target) == pytest.approx(float(number))


@pytest.mark.parametrize("engine", ["unknown", "vector", "gpsimd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_only_zeros_of_16_bits_are_filled_two_at_a_time(engine, dtype):
    """NKI 0.1's table of costs: N cycles, N/2 for zeros of 16 bits."""
    body = f"""
    for value in (0, 1, -2, 0):
        t = nl.ndarray((128, 4096), nl.{dtype}, nl.sbuf)
        nisa.memset(dst=t, value=value, engine=nisa.engine.{engine})
    return out(t)
    """
    trace = run(body, mode="timing").trace
    fills = [i for i in trace.instructions if i.op == "memset"]
    took = [other_cost(TRN2, fill)[0] for fill in fills]
    zero, one = took[:2]
    assert took == [zero, one, one, zero]
    clock = TRN2.gpsimd_clock_hz if engine == "gpsimd" else TRN2.vector_clock_hz
    cycles = (one - zero) * clock / 1e6
    assert cycles == pytest.approx(2048 if dtype in ("bfloat16", "float16") else 0)


@pytest.mark.parametrize(("flag", "reads_bias"), [("", 0), ("function=exp", 108)])
def test_scalar_answers_later_than_vector(flag, reads_bias):
    latency = other_cost(TRN2, one(f"scalar activation {flag}: {ROW}, {ROW}"))[1]
    assert latency == pytest.approx(us(512 + 228 + reads_bias, 1.2e9))


def test_a_table_loads_when_the_function_changes_and_is_work_of_scalar():
    calls = "".join(
        f"sbuf out 128x512\nscalar out source op=activation function={function}\n"
        for function in ("exp", "exp", "copy", "gelu", "exp")
    )
    trace = Scene("sbuf source 128x512\n" + calls).trace
    timeline = time_trace(trace, TRN2)
    assert starts(timeline)[0] == pytest.approx(1.3)
    loads = [held.stop - held.start for held in timeline.held("table")]
    assert loads == [pytest.approx(1.3)] * 3
    del trace.instructions[1:]
    alone = time_trace(trace, TRN2).busy_us["scalar"]
    assert alone == pytest.approx(1.3 + us(512 + 228 + 108, 1.2e9))


@pytest.mark.parametrize(
    ("dtype", "elements", "cycles_each"), [(F, 1, 8.0), (F, 32, 39.0), (B, 1, 8.0), (B, 32, 19.5)]
)
def test_a_gather_on_chip_pays_for_each_index_and_less_for_longer_runs(
    dtype, elements, cycles_each
):
    """nki.isa.local_gather: 28 / 4 cycles for an index, 1 for each of its elements of 4 bytes."""
    took = [
        cycles(one(
            f"gpsimd local_gather indices={count} elements={elements}: "
            f"sbuf {dtype} {count * elements}, sbuf {dtype} 4096, sbuf uint16 8"
        ))
        for count in (128, 256)
    ]  # fmt: skip
    assert took[1] - took[0] == pytest.approx(128 * cycles_each)


@pytest.mark.parametrize(("columns", "filled"), [(3, True), (512, False)])
def test_independent_work_fills_the_stalls_of_tiny_instructions(columns, filled):
    """Pairs of dependent instructions: the scheduler interleaves them if that is worth it."""
    trace = Scene(f"sbuf source 128x{columns}\n" + 50 * f"""
        sbuf middle out 128x{columns}
        vector middle source op=tensor_reduce
        vector out middle op=tensor_reduce
    """).trace  # fmt: skip
    interval = us(max(columns + 20, 64), 1.12e9)
    stalled = us(columns + 100, 1.12e9) - interval
    moved, kept = (time_trace(trace, TRN1, reorder=order) for order in (True, False))
    assert max(stops(kept)) == pytest.approx(100 * interval + 50 * stalled)
    least = 100 * interval + (0 if filled else 50 * stalled)
    assert max(stops(moved)) == pytest.approx(least, abs=2 * (interval + stalled))


@pytest.mark.parametrize(("target", "on_scalar"), [(TRN1, 3), (TRN2, 0)])
def test_open_engines_are_placed_as_profiles_show(target, on_scalar):
    pairs = ("multiply", ""), ("multiply", "add"), ("add", ""), ("maximum", ""), ("add", "multiply")
    trace = Scene("".join(
        "sbuf a b 128x512\n"
        f"vector a b op=tensor_scalar function={first} function1={second} unset=1\n"
        for first, second in pairs
    )).trace  # fmt: skip
    engines = [*map(time_trace(trace, target).engine, range(len(pairs)))]
    assert engines == ["scalar"] * on_scalar + ["vector"] * (len(pairs) - on_scalar)


def test_cores_wait_for_each_other_at_a_barrier():
    copy, barrier = "vector b a\n", "gpsimd flag flag op=core_barrier cores=2\n"
    tensors, after = "sbuf a b 128x512\nhbm flag 1x1\n", "vector a b"
    short, long = (Scene(tensors + n * copy + barrier + after).trace for n in (1, 9))
    lines = time_traces([short, long], TRN2)
    arrival = max(lines[1].end[:9])
    assert starts(lines[0])[-1] >= arrival > max(lines[0].end[:1])
    assert starts(lines[1])[-1] >= arrival
    assert starts(time_trace(short, TRN2))[-1] < arrival


# -- transfers -------------------------------------------------------------------------------


def test_one_load():
    timeline = load(128, 512)
    ((issue, part),) = transfers(timeline).values()
    assert timeline.work(0).dma.descriptors == 128
    assert issue.stop - issue.start == pytest.approx(0.485 + 128 * 0.95e-3)
    assert part.row == -1  # all 16 alike
    start, stop = part.start, part.stop
    assert start == pytest.approx(1.3)  # start latency
    # eight rows of 2 KiB per engine, 6 ns each and a sixteenth of the core's 362 GB/s
    assert stop - start == pytest.approx(8 * (0.006 + 2048 / FROM_HBM * 1e6))
    # the engines start one after another, over 0.3 us
    # and the data of a load is there 0.305 of its ideal time (8 x 2 KiB at 23 GB/s) later
    assert timeline.latency_us == pytest.approx(stop + 0.3 + 0.305 * 8 * 2048 / 23e3)
    assert timeline.busy_us["dma"] == pytest.approx(stop - start + 0.3)
    assert timeline.dma_engine_busy_us == pytest.approx(16 * (stop - start))


@pytest.mark.parametrize(
    ("rows", "columns", "fraction"), [(128, 1024, 0.96), (128, 128, 0.78), (128, 64, 0.27)]
)
def test_short_rows_waste_the_engines(rows, columns, fraction):
    rate = rows * columns * 4 / load(rows, columns).dma_engine_busy_us * 1e6
    assert rate / 23e9 == pytest.approx(fraction, abs=0.025)  # bytes per engine-second


def test_strided_elements_are_descriptors_of_their_own():
    scene = Scene("hbm source 128x64\nsbuf tile 128x32\ndma tile source[:,::2]")
    cost = dma_cost(TRN2, scene.trace.instructions[0])
    assert cost.descriptors == 128 * 32
    assert cost.uniform_us == pytest.approx(8 * 32 * 0.041)  # 41 ns each, from software


@pytest.mark.parametrize(
    ("first", "last", "engines"),
    [(0, 4, {0: 4}), (64, 72, {8: 8}), (0, 12, {0: 8, 1: 4}), (32, 64, {4: 8, 5: 8, 6: 8, 7: 8})],
)
def test_partitions_choose_the_dma_engines_which_start_one_after_another(first, last, engines):
    scene = Scene(f"""
        hbm source 128x4096 {B}
        sbuf tile 128x4096 {B}
        dma tile[{first}:{last},:] source[{first}:{last},:]
    """)
    ((_, *parts),) = transfers(time_trace(scene.trace, TRN2)).values()
    row = 0.006 + 8192 / FROM_HBM * 1e6
    assert {part.row: part.stop - part.start for part in parts} == {
        engine: pytest.approx(rows * row) for engine, rows in engines.items()
    }
    starts = [part.start for part in parts]
    assert starts == pytest.approx([starts[0] + rank * 0.3 / 15 for rank in range(len(starts))])


SOFTWARE = 0.485 + 128 * 0.95e-3
NONE, SWDGE, HWDGE = (f"dge_mode={mode}" for mode in ("none", "swdge", "hwdge"))


def in_modes(columns, *modes):
    """Return the timeline of a load in each mode, `columns` wide."""
    loads = "".join(f"sbuf a 128x{columns}\ndma a source {mode}\n" for mode in modes)
    return time_trace(Scene(f"hbm source 128x{columns}\n" + loads).trace, TRN2)


@pytest.mark.parametrize(
    ("modes", "queues", "second"),
    [
        ([NONE] * 2, {"static"}, 0.6),
        ([HWDGE] * 2, {"hwdge-sync"}, 0.6),
        ([HWDGE, HWDGE + " issuer=scalar"], {"hwdge-sync", "hwdge-scalar"}, 0.0),
        ([""] * 2, {"software"}, SOFTWARE),
        (["", SWDGE], {"software"}, SOFTWARE),
        (["", NONE], {"software", "static"}, 0.0),
    ],
)
def test_descriptor_modes_issue_through_the_generators_there_are(modes, queues, second):
    found = transfers(in_modes(64, *modes))
    assert {issue.row for issue, *_ in found.values()} == queues
    assert found[1][0].start == pytest.approx(second)


def test_many_small_transfers_are_no_faster_than_their_generators():
    """Two hardware generators, GpSimd, and descriptors in HBM: no mixture beats their number."""

    def latency(*modes):
        return in_modes(1, *modes * (300 // len(modes))).latency_us

    hardware = [f"{HWDGE} issuer={issuer}" for issuer in ("sync", "scalar")]
    single = [latency(mode) for mode in ("", SWDGE, NONE, *hardware)]
    assert latency("", SWDGE) >= min(single[:2])
    assert min(single) / 2.1 < latency("", NONE) < min(single)
    assert min(single) / 4.1 < latency("", NONE, *hardware) < min(single) / 2


def test_a_copy_within_hbm_shares_its_bandwidth_between_reading_and_writing():
    cost = dma_cost(TRN2, dma(128, 2048, "hbm hbm"))
    assert cost.hbm_read_bytes == cost.hbm_write_bytes == 128 * 4096
    runs = -(-128 * 4096 // 65536)  # 512 KiB without a gap: whole descriptors
    each = 0.006 + 65536 / (FROM_HBM / 2) * 1e6
    # half a descriptor an engine is one descriptor: no engine carries less than one
    assert (runs, cost.uniform_us) == (8, pytest.approx(each))


@pytest.mark.parametrize(
    ("rows", "columns", "memory", "dtype", "rate"),
    [
        (128, 128, "hbm", B, 0.9 * FROM_HBM),
        (128, 128, "sbuf", B, 0.5 * 23e9),
        (128, 128, "hbm", F, 0.45 * FROM_HBM),
        # ragged rows waste the rest of 16
        (128, 112, "hbm", B, 0.9 * FROM_HBM),
        (128, 20, "hbm", B, 0.9 * FROM_HBM * 20 / 32),
        (128, 1, "hbm", B, 0.9 * FROM_HBM / 16),
        # few partitions use their share of the path: as long as into all, for less data
        *((rows, 128, "hbm", B, 0.9 * FROM_HBM * rows / 128) for rows in (64, 32, 16)),
        *((rows, 128, "sbuf", B, 0.5 * 23e9 * rows / 128) for rows in (64, 32, 16)),
    ],
)
def test_dma_transpose_rates(rows, columns, memory, dtype, rate):
    moved = dma(rows, columns, f"sbuf {memory}", dtype, flags="transpose=1")
    cost = dma_cost(TRN2, moved)
    size = rows * columns * (2 if dtype == B else 4)
    assert cost.uniform_us == pytest.approx(size / 16 / rate * 1e6)


def test_only_an_index_is_no_data():
    scene = Scene("""
        hbm out 128x64 int32
        sbuf left right 128x64 int32
        sbuf index 1x1 int32
        dma out left right op=dma_compute
        dma out left index
        dma out left right indirect=1
    """)
    rows = [dma_cost(TRN2, ins).descriptors for ins in scene.trace.instructions]
    assert rows == [2 * 128, 128, 128]
