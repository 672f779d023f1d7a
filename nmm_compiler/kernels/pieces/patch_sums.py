"""The sums of a patch of a dense product: several tiles each way, in PSUM at a time."""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict
from .patch_loads import load_chunk, load_tiles_of
from .records import Chunks, Contraction, Patch
from .warm_up import warm_up


def sum_patch(left: Chunks, right: Chunks, run: Contraction, first, warm):
    """Return the sums of a patch over a run of the contraction; loads what is new. Right moves."""
    # the `first` columns of left move past right, for the last sums
    across = (right.width + 511) // 512
    down = (left.width + 127) // 128
    wide = 512 if warm > 0 else min(512, right.width)
    sums = []
    for _ in range(down * across):
        sums.append(
            nl.ndarray((min(128, left.width), wide), dtype=nl.float32, buffer=nl.psum)
        )  # fmt: skip
    if first > 0:
        for _ in range(right.width // 128):
            sums.append(nl.ndarray((128, first), dtype=nl.float32, buffer=nl.psum))
    if warm > 0:
        warm_up(sums[0], warm)
    # tiles of a short end that are summed outputs by outputs
    last_tiles = min(2, run.depth // 128) if down == 1 else 1 + (run.depth - 1) % run.step // 128
    for k0 in range(0, run.depth, run.step):
        stop = min(k0 + run.step, run.depth)
        l_sb = left.tiles[left.tile + k0 // left.plan.chunk]
        r_sb = right.tiles[right.tile + k0 // right.plan.chunk]
        l_first = k0 % left.plan.chunk // 128
        r_first = k0 % right.plan.chunk // 128
        if left.begins and k0 == 0:
            # a product begins as soon as the first of its operands are there
            load_tiles_of(l_sb, left, 0, 0, 128, run)
            load_tiles_of(r_sb, right, 0, 0, 128, run)
        if left.new and l_first == 0:
            load_chunk(l_sb, left, k0, run)
        if right.new and r_first == 0:
            load_chunk(r_sb, right, k0, run)
        pairs = (stop - k0) // 256 if run.double_row else 0
        k_tiles = (stop - k0 + 127) // 128
        last = right.short and stop == run.depth
        halved = right.short and not last and stop + run.step >= run.depth
        begins = right.begins and k0 == 0
        # the last tiles come further down, outputs by outputs: the first results leave early
        at_end = stop - run.depth + 128 * last_tiles if last or halved else 0
        k_tiles = max(0, k_tiles - max(0, at_end // 128))
        # a chunk that comes in several loads has a turn for each of them
        if last or begins:
            until = min(1, k_tiles)
        else:
            until = min(k_tiles, (stop - k0 + 255) // 256) if halved else k_tiles
        step = 1 if last else k_tiles - until
        turns = max(1, k_tiles) if last else min(2, 1 + step)
        for turn in range(turns):
            end = until + turn * step
            begin = end - step if turn > 0 else 2 * pairs
            for a in range(down):
                s0 = left.first + 128 * a
                sw = min(128, left.width - 128 * a)
                for b in range(across):
                    m0 = right.first + 512 * b
                    mw = min(512, right.width - 512 * b)
                    for pair in range(pairs):
                        st = l_first + 2 * pair
                        mt = r_first + 2 * pair
                        nisa.nc_matmul(
                            dst=sums[a * across + b][0:sw, 0:mw],
                            stationary=l_sb[0:128, st : st + 2, s0 : s0 + sw],
                            moving=r_sb[0:128, mt : mt + 2, m0 : m0 + mw],
                            accumulate=k0 + pair > 0,
                            perf_mode=nisa.matmul_perf_mode.double_row,
                        )
                    for kt in range(begin, end):
                        kp = min(128, stop - k0 - 128 * kt)
                        nisa.nc_matmul(
                            dst=sums[a * across + b][0:sw, 0:mw],
                            stationary=l_sb[0:kp, l_first + kt, s0 : s0 + sw],
                            moving=r_sb[0:kp, r_first + kt, m0 : m0 + mw],
                            accumulate=k0 + kt > 0 or (warm > 0 and a + b == 0),
                        )
        if last:
            sum_last_tiles(sums, left, right, run, last_tiles)
        if first > 0:
            for kt in range((stop - k0 + 127) // 128):
                kp = min(128, stop - k0 - 128 * kt)
                for i in range(right.width // 128):
                    s0 = right.first + 128 * i
                    nisa.nc_matmul(
                        dst=sums[down * across + i],
                        stationary=r_sb[0:kp, r_first + kt, s0 : s0 + 128],
                        moving=l_sb[0:kp, l_first + kt, 0:first],
                        accumulate=k0 + kt > 0,
                    )
    return sums


def sum_last_tiles(sums, left: Chunks, right: Chunks, run: Contraction, count):
    """Add the products of the last tiles of a contraction, outputs by outputs."""
    across = (right.width + 511) // 512
    for b in range(across):
        m0 = right.first + 512 * b
        mw = min(512, right.width - 512 * b)
        for a in range((left.width + 127) // 128):
            s0 = left.first + 128 * a
            sw = min(128, left.width - 128 * a)
            for kt in range(run.depth // 128 - count, run.depth // 128):
                l_sb = left.tiles[left.tile + 128 * kt // left.plan.chunk]
                r_sb = right.tiles[right.tile + 128 * kt // right.plan.chunk]
                nisa.nc_matmul(
                    dst=sums[a * across + b][0:sw, 0:mw],
                    stationary=l_sb[0:128, 128 * kt % left.plan.chunk // 128, s0 : s0 + sw],
                    moving=r_sb[0:128, 128 * kt % right.plan.chunk // 128, m0 : m0 + mw],
                    accumulate=kt > 0,
                )


def add_up(totals, sums, patch: Patch, begin):
    """Add the sums of a segment to those before it."""
    across = (patch.width + 511) // 512
    for a in range((patch.height + 127) // 128):
        height = min(128, patch.height - 128 * a)
        for b in range(across):
            start = patch.column + 512 * b
            width = min(512, patch.width - 512 * b)
            total = totals[0:height, patch.tile + a, start : start + width]
            more = sums[a * across + b][0:height, 0:width]
            if begin:
                evict(total, more, a + b)
            else:
                nisa.tensor_tensor(dst=total, data1=total, data2=more, op=nl.add)


def totals_of(totals, sums, patch: Patch):
    """Return the sums of all segments: those of the last one, and those before."""
    across = (patch.width + 511) // 512
    whole = []
    for a in range((patch.height + 127) // 128):
        height = min(128, patch.height - 128 * a)
        for b in range(across):
            start = patch.column + 512 * b
            width = min(512, patch.width - 512 * b)
            whole.append(nl.ndarray((height, width), dtype=nl.float32, buffer=nl.sbuf))
            nisa.tensor_tensor(
                dst=whole[a * across + b][0:height, 0:width],
                data1=totals[0:height, patch.tile + a, start : start + width],
                data2=sums[a * across + b][0:height, 0:width],
                op=nl.add,
            )
    return whole
