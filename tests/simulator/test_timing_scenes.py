"""When instructions start, by tiny traces that are worked out by hand and written as text."""

import pytest
from trace_builder import STEADY, TRN1, TRN2, Scene

from nmm_compiler.simulator.timing.resources import Pool
from nmm_compiler.simulator.timing.timeline import time_trace

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


def test_program_order_on_request_is_that_of_no_reorder():
    """A load behind a store that waits: it passes the store, or waits for its turn."""
    moved, ordered = Scene(STORE_THEN_LOAD), Scene(STORE_THEN_LOAD + "in order")
    kept = time_trace(moved.trace, TRN2, reorder=False)
    assert moved.holds(kept, "after >= store")
    assert kept.latency_us > time_trace(moved.trace, TRN2).latency_us
    assert time_trace(ordered.trace, TRN2).start == kept.start
    assert sorted(time_trace(moved.trace, TRN2).transfers) == [0, 2, 3]


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
