"""When instructions start: whatever the program, and in tiny traces that are worked out by hand.

Dependences hold, nothing is in two places, nothing is lost.
"""

import itertools

import pytest
from hypothesis import given, settings, strategies as st
from trace_builder import STEADY, TRN1, TRN2, Builder, Scene, starts, stops, touched, transfers

from nmm_compiler import targets
from nmm_compiler.simulator.timing.costs import ENGINES
from nmm_compiler.simulator.timing.regions import Region, Tracked, distinct_bytes, overlaps
from nmm_compiler.simulator.timing.resources import Pool, Slots
from nmm_compiler.simulator.timing.schedule import time_trace, wake_us
from nmm_compiler.simulator.timing.timeline import Booking, stagger_us
from nmm_compiler.simulator.trace import Access

TARGETS = [targets.get(name) for name in targets.names()]
TINY = 1e-9


ROWS = st.sampled_from(["0:128", "0:32", "32:64", "64:128"])
COLUMNS = st.sampled_from(["0:256", "0:128", "128:256", "0:256:2", "1:256:2"])


def part(*names):
    return st.builds("{}[{},{}]".format, st.sampled_from(names), ROWS, COLUMNS)


HBM, SBUF, PSUM = part("h0", "h1"), part("s0", "s1", "s2"), part("p0", "p1")
LINES = st.one_of(
    st.builds("dma {} {}".format, SBUF, HBM),
    st.builds("dma {} {}".format, HBM, SBUF),
    st.builds("{} {} {}".format, st.sampled_from(["vector", "scalar"]), SBUF, SBUF | PSUM),
    st.builds("gpsimd {} {}".format, SBUF, SBUF),
    st.builds("tensor {} s0[:,:128] {}".format, PSUM, SBUF),
    st.builds("sbuf fresh 128x256\ndma fresh h0\nvector {} fresh".format, SBUF),
)
TENSORS = "hbm h0 h1 128x256\npsum p0 p1 128x256\nsbuf s0 128x{}\nsbuf s1 128x{}\nsbuf s2 128x{}"


@st.composite
def programs(draw):
    """A random program over a few shared tensors, with loads, stores, products and copies."""
    widths = draw(st.tuples(*[st.sampled_from([256, 20000])] * 3))
    lines = draw(st.lists(LINES, min_size=1, max_size=25))
    return Scene("\n".join([TENSORS.format(*widths), *lines])).trace


def meets(first, second):
    start = max(first.partition_start, second.partition_start)
    rows = start < min(first.partition_stop, second.partition_stop)
    same = first.storage == second.storage and rows
    return same and not touched(first).isdisjoint(touched(second))


def last(span):
    return span[1]


def no_overlap(spans):
    return all(a[1] <= b[0] + TINY for a, b in itertools.pairwise(sorted(spans)))


@settings(deadline=None)
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
            begin = starts(timeline)[late]
            if raw and not (same and first.engine == "tensor"):
                assert begin >= timeline.end[early] + wake[b][a] - TINY
            if waw:
                least = stops(timeline)[early] if same else timeline.end[early] + wake[b][a]
                assert begin >= least - TINY
            if war:
                least = stops(timeline)[early] + (0.0 if same else wake[b][a])
                assert begin >= least - TINY


@settings(deadline=None)
@given(programs(), st.sampled_from(TARGETS), st.booleans())
def test_nothing_does_two_things_at_once(trace, target, reorder):
    timeline = time_trace(trace, target, reorder=reorder)
    for engine in ENGINES[:-1]:
        indices = [i for i, ins in enumerate(trace.instructions) if ins.engine == engine]
        spans = [(starts(timeline)[i], stops(timeline)[i]) for i in indices]
        if not reorder:
            assert spans == sorted(spans)  # program order
            assert no_overlap(spans)
        # work that fills stalls in pieces: never more of it than time has passed
        done = itertools.accumulate(stop - start for start, stop in sorted(spans, key=last))
        for spent, (_, stop) in zip(done, sorted(spans, key=last), strict=True):
            assert spent <= stop + TINY
    moved = transfers(timeline).values()
    for queue in {issue.row for issue, *_ in moved}:
        issued = [(one.start, one.stop) for one, *_ in moved if one.row == queue]
        assert no_overlap(issued)
    for engine in range(target.dma_engines):
        assert no_overlap(
            [
                (part.start + shift, part.stop + shift)
                for _, *parts in moved
                for part in parts
                if part.row in (-1, engine)
                for shift in [engine * stagger_us(target) if part.row < 0 else 0.0]
            ]
        )


@settings(deadline=None)
@given(programs(), st.sampled_from(TARGETS))
def test_totals_add_up(trace, target):
    timeline = time_trace(trace, target)
    dmas = [i for i, ins in enumerate(trace.instructions) if ins.engine == "dma"]
    assert sorted(transfers(timeline)) == dmas
    for index, (issue, *parts) in transfers(timeline).items():
        instruction, cost = trace.instructions[index], timeline.work(index).dma
        for side, counted in (
            (instruction.reads, cost.hbm_read_bytes),
            (instruction.writes, cost.hbm_write_bytes),
        ):
            assert counted == sum(4 * a.elements_per_partition for a in side if a.memory == "hbm")
        assert issue.start >= 0.0
        assert min(part.start for part in parts) >= issue.stop - TINY
    assert timeline.latency_us == max(timeline.end)
    for engine, busy in timeline.busy_us.items():
        assert busy <= timeline.latency_us + TINY, engine


@settings(deadline=None)
@given(programs(), st.sampled_from(TARGETS), st.data())
def test_nothing_crosses_the_edge_of_a_turn(trace, target, data):
    """All that comes before an edge has ended when the first instruction behind it starts."""
    count = len(trace.instructions)
    trace.turns = [
        (edge, edge, range(0), False)
        for edge in sorted(data.draw(st.sets(st.integers(0, count), max_size=4)))
    ]
    timeline = time_trace(trace, target)
    for edge, *_ in trace.turns:
        ended = max(timeline.end[:edge], default=0.0)
        for index in range(edge, count):
            assert starts(timeline)[index] >= ended - TINY


def patterns(steps):
    """Return regions: where they begin, and up to three dimensions of a step and a count."""
    dims = st.lists(st.tuples(steps, st.integers(1, 5)), min_size=1, max_size=3)
    return st.tuples(st.integers(0, 40), dims)


regions, turned = patterns(st.integers(1, 24)), patterns(st.integers(-24, 24))


def access(start, dims):
    last = start + sum(abs(step) * (count - 1) for step, count in dims)
    return Access(1, "hbm", 0, 1, start, last + 2, tuple(dims), "bfloat16", 2)


@settings(deadline=None)
@given(regions, regions)
def test_overlap_is_exact(first, second):
    """Against the sets of bytes, for patterns of up to three dimensions."""
    a, b = access(*first), access(*second)
    assert overlaps(a, b) == meets(a, b)


@settings(deadline=None)
@given(st.lists(turned, min_size=1, max_size=9))
def test_a_byte_that_is_touched_twice_counts_once(several):
    """Rows that are read again and again, and backwards, too."""
    accesses = [access(*one) for one in several]
    assert distinct_bytes(accesses) == len(set().union(*map(touched, accesses)))


@settings(deadline=None)
@given(st.data())
def test_accesses_are_found_and_forgotten_among_many(data):
    """Mostly tiles of one grid, in HBM or on chip; also rows, elements, columns, strided ones.

    A write hides what it covers.
    """
    memory = data.draw(st.sampled_from(["hbm", "sbuf"]))
    tensor = Builder().tensor(memory, 64, 96)
    kinds = st.sampled_from(["tile"] * 6 + ["odd", "row", "element", "column", "strided"])
    starts = st.tuples(st.integers(0, 7), st.integers(0, 5), st.sampled_from([0, 0, 0, 3]))
    storage, kept, known = Tracked(0, 0, 64 * 96 * 4), [], {}
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
        region = known.setdefault(str(access), Region(storage, access))  # one for each access
        region.look()
        found = [use for near in region.near for use in (*near.made, *near.reads.values())]
        assert sorted(found) == sorted(use for old, use in kept if overlaps(old, access))
        use = float(number), 5, number
        writing = data.draw(st.booleans())
        region.note(use, writing)
        if writing:
            kept = [(old, use) for old, use in kept if not _inside(old, access)]
        else:  # the last one of an engine counts
            kept = [(old, use) for old, use in kept if old != access or use in region.made]
        kept.append((access, use))


def _inside(old, new):
    """Tell whether `new`, one run of bytes or the same region, covers `old`."""
    if new.partition_start > old.partition_start or new.partition_stop < old.partition_stop:
        return False
    if new.dense:
        return new.byte_start <= old.byte_start and old.byte_stop <= new.byte_stop
    return new.byte_start == old.byte_start and new.pattern == old.pattern


@settings(deadline=None)
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


ISSUE = 0.485 + 128 * 0.95e-3  # a DMA of 128 descriptors from software

STORE_THEN_LOAD = """
    hbm source 256x512
    hbm sink 128x512
    sbuf one two out 128x512
    dma one source[:128,:]
    vector out one
    store: dma sink out
    after: dma two source[128:,:]
"""
FOUR_TILES = """
    hbm source 128x{columns}
    sbuf out 128x1
    sbuf t0 t1 t2 t3 128x{columns}
    dma t0 source
    copy0: vector out t0[:,:1]
    load1: dma t1 source
    copy1: vector out t1[:,:1]
    load2: dma t2 source
    vector out t2[:,:1]
    load3: dma t3 source
    vector out t3[:,:1]
"""
ONE_MEMORY = """
    psum p0 p1 128x512
    sbuf s0 s1 s2 s3 128x512
    one: vector s0 p0
    two: scalar s1 p1
    three: gpsimd s3 s2
"""
TWO_PRODUCTS = """
    sbuf weight 128x128 {dtype}
    sbuf moving 128x{columns} {dtype}
    psum sum other 128x512
    tensor sum[:,:{columns}] weight moving
    second: tensor {to}[:,:{columns}] weight moving
"""
SUM_OF_A_LATE_TILE = """
    sbuf weight 128x128 bfloat16
    sbuf moving late 128x512 bfloat16
    hbm source 128x512
    psum one two 128x512
    load: dma late source
    waits: tensor one weight late
    adds: tensor one weight moving
    passes: tensor two weight moving
"""


SCENES = [
    ("a consumer waits for a DMA and its semaphore", TRN2, """
        hbm source sink 128x512
        sbuf tile out 128x512
        load: dma tile source
        copy: vector out tile
        store: dma sink out
     """, "copy = load.end + 0.32; store = copy.end + 0.1"),
    ("only overlapping regions wait", TRN2, """
        hbm source 128x4096
        sbuf tile 128x4096
        sbuf half 128x128
        sbuf out 128x64
        dma tile source
        copy: vector out half[:,0:128:2]
     """, "copy = 0"),
    ("interleaved columns do not wait for each other", TRN2, """
        sbuf tile 128x256
        sbuf source out 128x128
        even: gpsimd tile[:,0::2] source
        odd: vector out tile[:,1::2]
        again: vector out tile[:,0::2]
     """, "odd = 0; again = even.end + 0.1"),
    ("a write waits for the readers of what it overwrites", TRN2, """
        sbuf tile source out 128x512
        reader: gpsimd out tile
        write: vector tile source
     """, "write = reader.free + 0.1"),
    # two float32 elements a cycle from SBUF to SBUF
    ("dependent instructions pay the fixed overhead, independent ones do not", TRN2, """
        sbuf a b c d 128x512
        vector b a
        second: vector d a
        third: vector c d
     """, "second = 276/960; third = second + 406/960"),
    ("products add to a sum without waiting", STEADY,
     TWO_PRODUCTS.format(columns=512, to="sum", dtype="bfloat16"), "second = 521/2400"),
    # 64 columns issue in 30 ns, but the sum that they add to takes 203 ns to come back
    ("a short product waits until the sum before has come through", STEADY,
     TWO_PRODUCTS.format(columns=64, to="sum", dtype="bfloat16"), "second = 0.203"),
    ("a product of another sum does not wait", STEADY,
     TWO_PRODUCTS.format(columns=64, to="other", dtype="bfloat16"), "second = 73/2400"),
    ("a product of float32 takes four passes", STEADY,
     TWO_PRODUCTS.format(columns=512, to="other", dtype="float32"), "second = 2064/2400"),
    ("loads pass a store that is not ready", TRN2, STORE_THEN_LOAD,
     f"after = {ISSUE}; after < store"),
    ("a load of what a store writes waits for it", TRN2,
     STORE_THEN_LOAD + "sbuf tile 128x512\nagain: dma tile sink", "again = store.end + 0.32"),
    ("no_reorder keeps a load behind a store", TRN2, STORE_THEN_LOAD + "in order",
     "after >= store"),
    # 80,000 B each: two fit in 212,472; descriptors of at most 64 KiB
    ("capacity bounds how far loads run ahead", TRN2, FOUR_TILES.format(columns=20000),
     f"load1 = {0.485 + 157 * 0.95e-3}; load2 = copy0.free + 0.1; load3 >= copy1.free"),
    ("small tiles all load ahead", TRN2, FOUR_TILES.format(columns=1000), f"load3 = {3 * ISSUE}"),
    ("trn1 keeps two engines out of one memory", TRN1, ONE_MEMORY,
     "two = one.free; three = one.free"),
    ("trn2 does not", TRN2, ONE_MEMORY, "two = 0; three = 0"),
    ("named predecessors are waited for", TRN2, """
        sbuf a b c d 128x512
        early: vector a b
        late: gpsimd c d
        waits late early
     """, "late = early.end + 0.1"),
    *[
        (f"tensors at one manual address wait for each other, {byte}", TRN2, f"""
            sbuf source out one two 128x512
            at one 0,0
            at two 0,{byte}
            vector one source
            reader: vector out one
            other: gpsimd two source
         """, expected)
        for byte, expected in ((0, "other >= reader.free"), (2048, "other < reader.free"))
    ],
    ("a partial cover of a manual address forgets nothing", TRN2, """
        sbuf source out whole 128x512
        sbuf left right 128x256
        at whole 0,0
        at left 0,0
        at right 0,1024
        vector whole source
        reader: gpsimd out whole
        vector left source[:,:256]
        late: scalar right source[:,:256]
     """, "late >= reader.free"),
    ("manual memory is not written before a store that waits has read it", TRN2, """
        sbuf source first second 128x512
        hbm sink 128x512
        at first 0,0
        at second 0,0
        vector first source
        store: dma sink first
        again: gpsimd second source
     """, "again >= store.end"),
    ("what a store that waits reads is not overwritten", TRN2, """
        sbuf source out 128x512
        hbm sink 128x512
        vector out source
        store: dma sink out
        again: gpsimd out source
     """, "again = store.end + 0.32"),
    # 100,000 B each: two fit, three do not
    ("memory is not given away before a store that waits has read it", TRN2, """
        sbuf tile kept fresh 128x25000
        hbm source sink 128x25000
        sbuf out 128x1
        vector tile kept
        store: dma sink tile
        vector out tile[:,:1]
        late: dma fresh source
        vector out kept[:,:1]
     """, "late >= store.end"),
    ("reads of other columns are remembered apart", TRN2, """
        sbuf tile out source 128x512
        gpsimd out[:,:8] tile[:,:8]
        wide: gpsimd out tile
        again: vector tile[:,256:] source[:,256:]
     """, "again = wide.free + 0.1"),
    ("a strided write forgets no reader of the columns between", TRN2, """
        sbuf tile out source 128x512
        reader: gpsimd out[:,1:254:2] tile[:,1:254:2]
        scalar tile[:,0:256:2] source[:,0:256:2]
        again: vector tile[:,1:2] source[:,1:2]
     """, "again = reader.free + 0.1"),
    ("a write to some partitions forgets no write to others", TRN2, """
        sbuf tile out source 128x512
        whole: gpsimd tile source
        scalar tile[:64,:] source[:64,:]
        reader: vector out[64:,:] tile[64:,:]
     """, "reader >= whole.end + 0.1"),
    *[
        (f"neighbouring partitions do not wait for each other, {rows}", TRN2, f"""
            sbuf tile out source 128x512
            gpsimd tile[{rows},:] source[{rows},:]
            reader: vector out[{others},:] tile[{others},:]
         """, "reader = 0")
        for rows, others in (("0:64", "64:128"), ("64:128", "0:64"))
    ],
    # the next turn uses the tensors of this one again: its first load waits for all of this
    ("nothing crosses the edge of a loop on the device", TRN2, """
        hbm source 128x512
        sbuf a b c d 128x512
        slow: vector a b
        edge
        load: dma c source
        other: gpsimd d b
     """, "load = slow.end; other = slow.end; load >= 0.1"),
    ("a load crosses no edge", TRN2, """
        hbm source other 128x512
        sbuf a b 128x512
        first: dma a source
        edge
        load: dma b other
     """, "load >= first.end"),
    ("sums keep their order, other products pass", STEADY, SUM_OF_A_LATE_TILE,
     "passes = 0; adds >= waits.free; waits >= load.end"),
    ("program order keeps other products behind as well", STEADY, SUM_OF_A_LATE_TILE + "in order",
     "waits < adds; adds < passes"),
    ("a table load hides behind a load", TRN2, """
        hbm source 128x512
        sbuf tile out 128x512
        load: dma tile source
        exp: scalar out tile op=activation function=exp
     """, "exp = load.end + 0.32"),
    ("trn1's descriptors are prebuilt", TRN1, """
        hbm source 128x64
        sbuf a b 128x64
        dma a source
        second: dma b source
     """, "second = 0.35"),
    ("software descriptors occupy GpSimd", TRN2, """
        hbm source 128x64
        sbuf a b 128x64
        dma a source dge_mode=swdge
        iota: gpsimd b op=iota
     """, "iota = 0.05"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "text", "expected"), [scene[1:] for scene in SCENES], ids=[s[0] for s in SCENES]
)
def test_starts(target, text, expected):
    scene = Scene(text)
    timeline = time_trace(scene.trace, target)
    for expectation in expected.split(";"):
        assert scene.holds(timeline, expectation), expectation
    assert timeline.sbuf_overflow_bytes == 0


def test_more_live_than_fits_is_reported_and_still_timed():
    scene = Scene("""
        hbm source 128x30000
        sbuf one two 128x30000
        dma one source
        dma two source
        vector one one two op=tensor_tensor
    """)
    timeline = time_trace(scene.trace, TRN2)
    assert timeline.sbuf_overflow_bytes == 240000 - TRN2.sbuf_usable_bytes_per_partition
    assert timeline.latency_us > 0


@pytest.mark.parametrize(
    ("columns", "ninth"), [(512, "4168/2400"), (64, "copy0.free + 0.1")]
)  # the smallest tile takes a whole bank, too
def test_psum_banks_rotate(columns, ninth):
    """With 8 banks the ninth accumulation waits for the first to be copied out."""
    turns = "".join(f"""
        psum bank{i} 128x{columns}
        product{i}: tensor bank{i} weight moving
        copy{i}: vector out bank{i}
    """ for i in range(16))  # fmt: skip
    scene = Scene(f"""
        sbuf weight 128x128 bfloat16
        sbuf moving 128x{columns} bfloat16
        sbuf out 128x{columns}
        {turns}
    """)
    timeline = time_trace(scene.trace, STEADY)
    assert scene.holds(timeline, f"product7 = 0 + {7 * (columns + 9)}/2400")
    assert scene.holds(timeline, f"product8 = {ninth}")
    assert scene.holds(timeline, "product8 >= copy0.free + 0.1")
    assert scene.holds(timeline, "product15 = copy7.free + 0.1")
    assert scene.holds(timeline, "product14.free < product15")


@pytest.mark.parametrize(("store_ready", "free_from"), [(10.0, 20.0), (60.0, 50.0)])
def test_a_tile_whose_store_was_put_off_is_free_before_what_dies_later(store_ready, free_from):
    """100 bytes: 60 die at 50; 40 are read by a store, ready at store_ready and 10 us long."""
    waiting = [store_ready]
    store = Booking(1, "queue", "software", 0.0, 1.0, "start", None, 0.0)

    def settle(before):
        if not waiting or waiting[0] >= before:
            return False
        pool.release(40, waiting.pop() + 10.0, store)
        return True

    pool = Pool(100, settle)
    assert pool.take(60) == pool.take(40) == 0.0
    pool.release(60, 50.0, None)
    assert pool.take(40) == free_from
    assert (pool.freed_by is store) == (store_ready < 50.0)
    assert bool(waiting) == (store_ready > 50.0)
    assert pool.overflow == 0
