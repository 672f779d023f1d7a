"""How long DMAs take, by tiny traces with answers worked out by hand."""

import pytest
from trace_builder import TRN1, TRN2, Builder, load

from nmm_compiler.simulator.timing.timeline import time_trace


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
        ([{"dge_mode": "none"}] * 2, {"static"}, 0.6),
        ([{"dge_mode": "hwdge"}] * 2, {"hwdge-sync"}, 0.6),
        (
            [{"dge_mode": "hwdge", "issuer": "sync"}, {"dge_mode": "hwdge", "issuer": "scalar"}],
            {"hwdge-sync", "hwdge-scalar"},
            0.0,
        ),
        ([{}] * 2, {"software"}, 0.485 + 128 * 0.95e-3),
        ([{}, {"dge_mode": "swdge"}], {"software"}, 0.485 + 128 * 0.95e-3),
        ([{}, {"dge_mode": "none"}], {"software", "static"}, 0.0),
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
