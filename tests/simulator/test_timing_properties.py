"""Whatever the program: dependences hold, nothing is in two places, nothing is lost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_builder import Builder, Scene, touched

from nmm_compiler import targets
from nmm_compiler.simulator.timing.dependence import ENGINES, WRITE, Storage, wake_us
from nmm_compiler.simulator.timing.dma import stagger_us
from nmm_compiler.simulator.timing.regions import overlaps
from nmm_compiler.simulator.timing.resources import Slots
from nmm_compiler.simulator.timing.timeline import time_trace

TARGETS = [targets.get(name) for name in targets.names()]
TINY = 1e-9


@st.composite
def programs(draw):
    """A random program over a few shared tensors, with loads, stores, products and copies."""
    builder = Builder()
    hbm = [builder.tensor("hbm", 128, 256) for _ in range(2)]
    sbuf = [builder.tensor("sbuf", 128, draw(st.sampled_from([256, 20000]))) for _ in range(3)]
    psum = [builder.tensor("psum", 128, 256) for _ in range(2)]

    def part(tensor):
        rows = draw(st.sampled_from([(0, 128), (0, 32), (32, 64), (64, 128)]))
        columns = draw(
            st.sampled_from([(0, 256, 1), (0, 128, 1), (128, 256, 1), (0, 256, 2), (1, 256, 2)])
        )
        return tensor[slice(*rows), slice(*columns)]

    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["load", "store", "copy", "matmul", "fresh"]))
        if kind == "load":
            builder.dma(part(draw(st.sampled_from(sbuf))), part(draw(st.sampled_from(hbm))))
        elif kind == "store":
            builder.dma(part(draw(st.sampled_from(hbm))), part(draw(st.sampled_from(sbuf))))
        elif kind == "copy":
            engine = draw(st.sampled_from(["vector", "scalar", "gpsimd"]))
            source = draw(st.sampled_from(sbuf if engine == "gpsimd" else sbuf + psum))
            builder.copy(part(draw(st.sampled_from(sbuf))), part(source), engine=engine)
        elif kind == "matmul":
            out = part(draw(st.sampled_from(psum)))
            builder.matmul(out, sbuf[0][:, :128], part(draw(st.sampled_from(sbuf))))
        else:
            tile = builder.tensor("sbuf", 128, 256)
            builder.dma(tile.all, hbm[0].all)
            builder.copy(part(draw(st.sampled_from(sbuf))), tile.all)
    return builder.trace


def meets(first, second):
    start = max(first.partition_start, second.partition_start)
    rows = start < min(first.partition_stop, second.partition_stop)
    same = first.storage == second.storage and rows
    return same and not touched(first).isdisjoint(touched(second))


def last(span):
    return span[1]


def no_overlap(spans):
    return all(a[1] <= b[0] + TINY for a, b in itertools.pairwise(sorted(spans)))


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(TARGETS), st.booleans())
def test_dependences_hold(trace, target, reorder):
    timeline = time_trace(trace, target, reorder=reorder)
    wake = wake_us(target)
    code = {name: number for number, name in enumerate(ENGINES)}
    for late, second in enumerate(trace.instructions):
        for early, first in enumerate(trace.instructions[:late]):
            a, b = code[first.engine], code[second.engine]
            same = a == b and first.engine != "dma"
            raw = any(meets(w, r) for w in first.writes for r in second.reads)
            waw = any(meets(w, x) for w in first.writes for x in second.writes)
            war = any(meets(r, w) for r in first.reads for w in second.writes)
            begin = timeline.start[late]
            if raw and not (same and first.engine == "tensor"):
                assert begin >= timeline.end[early] + wake[b][a] - TINY
            if waw:
                least = timeline.interval_end[early] if same else timeline.end[early] + wake[b][a]
                assert begin >= least - TINY
            if war:
                least = timeline.interval_end[early] + (0.0 if same else wake[b][a])
                assert begin >= least - TINY


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(TARGETS), st.booleans())
def test_nothing_does_two_things_at_once(trace, target, reorder):
    timeline = time_trace(trace, target, reorder=reorder)
    for engine in ENGINES[:-1]:
        indices = [i for i, ins in enumerate(trace.instructions) if ins.engine == engine]
        spans = [(timeline.start[i], timeline.interval_end[i]) for i in indices]
        if not reorder:
            assert spans == sorted(spans)  # program order
            assert no_overlap(spans)
        # work that fills stalls in pieces: never more of it than time has passed
        done = itertools.accumulate(stop - start for start, stop in sorted(spans, key=last))
        for spent, (_, stop) in zip(done, sorted(spans, key=last), strict=True):
            assert spent <= stop + TINY
    transfers = timeline.transfers.values()
    for queue in {t.cost.queue for t in transfers}:
        issued = [(t.issue_start, t.issue_end) for t in transfers if t.cost.queue == queue]
        assert no_overlap(issued)
    for engine in range(target.dma_engines):
        assert no_overlap(
            [
                (start + shift, stop + shift)
                for transfer in transfers
                for which, start, stop, _ in transfer.parts
                if which in (-1, engine)
                for shift in [engine * stagger_us(target) if which < 0 else 0.0]
            ]
        )


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(TARGETS))
def test_totals_add_up(trace, target):
    timeline = time_trace(trace, target)
    dmas = [i for i, ins in enumerate(trace.instructions) if ins.engine == "dma"]
    assert sorted(timeline.transfers) == dmas
    for index, transfer in timeline.transfers.items():
        instruction = trace.instructions[index]
        for side, counted in (
            (instruction.reads, transfer.cost.hbm_read_bytes),
            (instruction.writes, transfer.cost.hbm_write_bytes),
        ):
            assert counted == sum(4 * a.elements_per_partition for a in side if a.memory == "hbm")
        assert transfer.issue_start >= 0.0
        assert min(start for _, start, _, _ in transfer.parts) >= transfer.issue_end - TINY
    assert timeline.latency_us == max(timeline.end)
    for engine, busy in timeline.busy_us.items():
        assert busy <= timeline.latency_us + TINY, engine


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(TARGETS), st.data())
def test_nothing_crosses_the_edge_of_a_turn(trace, target, data):
    """All that comes before an edge has ended when the first instruction behind it starts."""
    count = len(trace.instructions)
    trace.loop_edges = sorted(data.draw(st.sets(st.integers(0, count), max_size=4)))
    timeline = time_trace(trace, target)
    for edge in trace.loop_edges:
        ended = max(timeline.end[:edge], default=0.0)
        for index in range(edge, count):
            assert timeline.start[index] >= ended - TINY


@pytest.mark.parametrize("name", targets.names())
def test_faster_parts_never_make_it_slower_and_more_work_never_faster(name):
    target = targets.get(name)

    def matmul(repeats, columns):
        turn = f"""
            sbuf weight 128x128 bfloat16
            sbuf moving 128x{columns} bfloat16
            psum out 128x{columns}
            sbuf result 128x{columns}
            dma weight source[:,:128]
            dma moving source
            tensor out weight moving
            vector result out
            dma sink result
        """
        ends = f"hbm source 128x{columns} bfloat16\nhbm sink 128x{columns}\n"
        return time_trace(Scene(ends + turn * repeats).trace, target).latency_us

    assert matmul(1, 128) < matmul(1, 512) < matmul(2, 512) < matmul(8, 512)


regions = st.tuples(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 5)), min_size=1, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(regions, regions)
def test_overlap_is_exact(first, second):
    """Against the sets of bytes, for patterns of up to three dimensions."""
    from nmm_compiler.simulator.trace import Access

    def access(start, dims):
        pattern = tuple((step, count) for step, count in dims)
        last = start + sum(step * (count - 1) for step, count in pattern)
        return Access(1, "hbm", 0, 1, start, last + 2, pattern, "bfloat16", 2)

    a, b = access(*first), access(*second)
    assert overlaps(a, b) == meets(a, b)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_accesses_are_found_and_forgotten_among_many(data):
    """Mostly tiles of one grid, in HBM or on chip; also rows, elements, columns, strided ones.

    A write hides what it covers.
    """
    memory = data.draw(st.sampled_from(["hbm", "sbuf"]))
    tensor = Builder().tensor(memory, 64, 96)
    kinds = st.sampled_from(["tile"] * 6 + ["odd", "row", "element", "column", "strided"])
    starts = st.tuples(st.integers(0, 7), st.integers(0, 5), st.sampled_from([0, 0, 0, 3]))
    storage, kept = Storage(0, 0, 64 * 96 * 4), []
    for number, (kind, (row, column, shift)) in enumerate(
        data.draw(st.lists(st.tuples(kinds, starts), min_size=5, max_size=120))
    ):
        first = 0 if memory == "sbuf" else row * 8
        at = column * 16 + shift
        access = {
            "tile": tensor[first : first + 8, at : at + 16],
            "odd": tensor[first : first + 5, at : at + 32],
            "row": tensor[first : first + 1, :],
            "element": tensor[first : first + 1, at : at + 1],
            "column": tensor[:, at : at + 1],
            "strided": tensor[first : first + 8 : 2 if memory == "hbm" else 1, at : at + 16 : 4],
        }[kind]
        region = storage.region(access)
        found = [use for near in region.near for use in near.uses.values()]
        assert sorted(found) == sorted(use for old, use in kept if overlaps(old, access))
        use = float(number), 5, number
        if data.draw(st.booleans()):
            region.written(use)
            kept = [(old, use) for old, use in kept if not _inside(old, access)]
        else:
            region.read(use)  # the last one of an engine counts
            kept = [
                (old, use) for old, use in kept if old != access or use == region.uses.get(WRITE)
            ]
        kept.append((access, use))


def _inside(old, new):
    """Tell whether `new`, one run of bytes or the same region, covers `old`."""
    if new.partition_start > old.partition_start or new.partition_stop < old.partition_stop:
        return False
    if new.dense:
        return new.byte_start <= old.byte_start and old.byte_stop <= new.byte_stop
    return new.byte_start == old.byte_start and new.pattern == old.pattern


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 5)), max_size=60))
def test_work_takes_the_first_gap_that_is_long_enough(work):
    """Against a walk over all gaps; those of 0.02 us and less are not kept."""
    slots, gaps, tail = Slots(), [], 0.0

    def kept(*found):
        return [(start, stop) for start, stop in found if stop - start > 0.02]

    for ready, duration in work:
        for place, (start, stop) in enumerate(gaps):
            at = max(start, ready)
            if at + duration <= stop:
                gaps[place : place + 1] = kept((start, at), (at + duration, stop))
                break
        else:
            at = max(tail, ready)
            gaps += kept((tail, at))
            tail = at + duration
        assert slots.place(ready, duration) == at
