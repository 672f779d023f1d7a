"""How a lowrank kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels import few_tokens, warm_up
from nmm_compiler.kernels.base import WEIGHTS, Family
from nmm_compiler.kernels.lowrank.data_flow import data_flow
from nmm_compiler.kernels.lowrank.spec import LowRankSpec
from nmm_compiler.kernels.moving_tokens import moving_bytes, tally_moving
from nmm_compiler.kernels.number_formats import (
    check_widened,
    passes,
    pitch,
    row_modes,
    scale_bytes,
    sum_bytes,
    x_pitch,
)
from nmm_compiler.kernels.over_ranks import exchanged_dtype
from nmm_compiler.kernels.schedule import LoopedSchedule, Operand
from nmm_compiler.kernels.spread_rows import spread
from nmm_compiler.kernels.tiling import (
    bias_bytes,
    blocks,
    by_tensor,
    chunk_order,
    chunk_rows,
    chunks_of_k,
    flat_bytes,
    free_banks,
    item_bytes,
    moves,
    normed_bytes,
    result_elements,
    result_tiles,
    tally_normed,
    tiles,
    turned_loads,
    turning,
    x_loads,
    x_rows,
)
from nmm_compiler.kernels.work import Tally, Work
from nmm_compiler.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSchedule(LoopedSchedule):
    """How a lowrank kernel runs.

    x, u, v: how these arrive; u.group counts rank tiles of stage 1, v.group output tiles of
        stage 2. w_load: how w of a base product is loaded, with the chunks of u and blocks of v.
    m_block: tokens whose intermediate stays in SBUF.
    k_segment: with several segments x and u are read once for any number of tokens and rank tiles.
        x.stream: x stays in SBUF for one segment only.
    v_stationary: stage 2 holds v stationary for a "row" result too, which is faster for few tokens.
    v_added: with it, the products of each 128 rows of v are added in SBUF (pieces/few_tokens.py),
        so that panels of v may be wide.
    starts: x of few tokens and the first load of u come before those of scales and biases, x on a
        queue of its own; `settled` decides.
    u_aside: so does a small u for more tokens, all of it at once; `settled` decides.
    warm: passes over zeros before the first product; steps of the search set it (warm_up.py).
    """

    u: Operand
    v: Operand
    w_load: str = "rows"
    v_stationary: bool = False
    v_added: bool = False
    starts: bool = False
    u_aside: bool = False
    warm: int = 0

    may_aside: ClassVar[tuple[str, ...]] = ("x", "v")
    remedies: ClassVar[Mapping[str, str]] = {
        "x": "m_block", "u": "u.block", "p": "m_block", "v": "v.block", "w": "v.block",
    }  # fmt: skip

    def sizes(self, spec: LowRankSpec) -> dict[str, int]:
        """Return field -> the size that it divides."""
        return {
            "m_block": spec.m, "u.chunk": spec.k, "x.chunk": spec.k, "u.block": spec.r,
            "v.block": spec.n, "v.chunk": spec.r,
        }  # fmt: skip

    def loads(self, spec: LowRankSpec) -> dict[str, bool]:
        """Return way of loading -> whether it needs no transpose, also for w of a base product."""
        base = {"w_load": spec.w_layout == "row"} if spec.base else {}
        return super().loads(spec) | base

    def over_k(self, spec: LowRankSpec) -> tuple[str, ...]:
        """Return how x, u and w of a base product are loaded."""
        return (self.x.load, self.u.load, *([self.w_load] if spec.base else []))

    def kind(self) -> tuple[Any, ...]:
        """Return the token block, the blocks of u and v, and how stage 2 runs."""
        return (self.m_block, self.u.block, self.v.block, self.v_stationary + self.v_added)

    def settled(self, spec: Any) -> LowRankSchedule:
        """Return the schedule as the kernel of `spec` reads it."""
        made = super().settled(spec)
        made = dataclasses.replace(
            made,
            w_load="tensor16" if spec.fp8 and made.w_load == "tensor" else made.w_load,
            starts=few_tokens.starts_early(self, spec),
            u_aside=few_tokens.loads_u_aside(self, spec),
        )
        return made.changed({"u.load": "none", "u.stream": False}) if made.u_aside else made

    def by_rows(self, spec: LowRankSpec) -> list[tuple[int, int]]:
        """Return (contraction, outputs) of stage 2 if its tokens may move instead."""
        rows = spec.out_layout == "row" and not self.v_stationary
        plain = not (spec.fp8 or spec.bias or spec.base or spec.inner_norm)
        return [(spec.r, spec.n)] if rows and plain and spec.n % 128 == 0 else []

    def sbuf_bytes(self, spec: LowRankSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
        p_size, x_size = item_bytes(spec.intermediate_dtype), item_bytes(spec.x_format)
        v_size = p_size if spec.wide else size
        pairs, second = self.double_row, self.double_row and spec.requantized
        k_tiles, r_tiles = tiles(spec.k, 128), tiles(spec.r, 128)
        tokens = min(self.m_block, spec.m)
        u_columns = spec.r if self.u.resident else min(self.u.block, spec.r)
        v_columns = spec.n if self.v.resident else min(self.v.block, spec.n)
        panel, segment_tiles = min(self.v.block, spec.n), tiles(self.segment(spec), 128)
        x_tiles = segment_tiles if self.x.stream else k_tiles
        u_tiles = tiles(self.u.chunk, 128) if self.u.stream else segment_tiles
        u_tiles = k_tiles if few_tokens.loads_u_aside(self, spec) else u_tiles
        rows = spec.out_layout == "row"
        held = {
            "x": x_tiles * x_pitch(tokens, pairs, self.x.load) * x_size,
            "u": u_tiles * pitch(u_columns, pairs or self.u.load == "dma") * size,
            "p": r_tiles * pitch(tokens, second) * p_size,
            "v": r_tiles * pitch(v_columns, second or self.v.load == "dma") * v_size,
            "y": result_elements(panel, tokens, rows=rows) * y_size,
        }
        if self.segment(spec) < spec.k:
            held["parts"] = r_tiles * tokens * 4
        if self.split == WEIGHTS:
            held["halves"] = 2 * r_tiles * tokens * 4
        if spec.tp_axis == "rows":
            shaped = spec.fp8 or spec.inner or spec.scale != 1.0
            exchanged = item_bytes(exchanged_dtype(spec))
            held["rank_sums"] = (2 if shaped else 1) * r_tiles * tokens * exchanged
        if self.v_added:
            held["v"] = 4 * tiles(self.v.chunk, 128) * pitch(v_columns, second) * v_size
            held["y"] = tiles(panel, 128) * tokens * y_size
            held["total"] = tiles(panel, 128) * tokens * 4
        if spec.base:
            held["w"] = k_tiles * pitch(panel, self.w_load == "dma") * size
        if spec.bias:
            held["bias"] = bias_bytes(spec.n, y_size, rows=rows)
        if spec.inner_bias:
            held["inner_bias"] = bias_bytes(spec.r, y_size, rows=False)
        if spec.inner_norm:
            held["norm"] = (4 * tokens + 128 + 1) * 4  # squares, more, inverse, scaled; ones
            held["inner_gain"] = bias_bytes(spec.r, y_size, rows=False)
        if spec.fp8:
            held["scale"] = scale_bytes(spec.r, spec.scales, down=True) + scale_bytes(
                spec.n, spec.scales, down=self.v_stationary or not rows
            )
            if spec.requantized:
                held["quantized"] = 512 * 4
        held |= sum_bytes(spec) | normed_bytes(spec, tokens, panel, y_size)
        held |= moving_bytes(self.moving_tokens(spec), panel, y_size)
        if by_tensor(self.x.load, self.u.load, self.w_load):
            flat = flat_bytes(spec.x_format, self.x.load)
            flat = max(flat, flat_bytes(spec.dtype, self.x.load, self.u.load, self.w_load))
            held["flat"] = min(max(self.u.chunk, self.x.chunk), spec.k) * flat
        if by_tensor(self.v.load):
            held["flat_v"] = min(self.v.chunk, spec.r) * flat_bytes(spec.dtype, self.v.load)
        return held

    def overlapped_bytes(self, spec: LowRankSpec) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap."""
        streams = ["y", "sum", "flat", "flat_v", "residual"]
        blocks = tiles(spec.m, self.m_block)
        segments = self.segment(spec) < spec.k
        many = blocks > 1 or self.u.block < spec.r or self.u.stream or segments
        if not self.u.resident and many:
            streams.append("u")
        if self.x.stream:
            streams.append("x")
        if blocks > 1 or self.v.block < spec.n:
            streams += ["w"] if self.v.resident else ["v", "w"]
        if blocks > 1 and spec.base and not self.x.stream:
            streams.append("x")  # else x is free again once stage 1 is done
        return self.with_copies(spec, streams)

    def psum_banks(self, spec: LowRankSpec) -> dict[str, int]:
        """Return PSUM banks in use in each stage."""
        m_tiles = tiles(min(self.m_block, spec.m), 512)
        moving_v = spec.out_layout == "row" and not self.v_stationary
        first = min(self.u.group, tiles(spec.r, 128)) * m_tiles
        second = self.v.group if moving_v else self.v.group * m_tiles
        return {
            "u.group": first + turning(self.x.load, self.u.load),
            "v.group": second + turning(self.v.load, self.w_load),
        }

    def check_own(self, spec: LowRankSpec, target: Target) -> None:
        """Raise SpecError for the rules that only lowrank has."""
        super().check_own(spec, target)
        check_widened("v.load", self.v.load, spec)
        self.check_multiple("x.chunk", "u.chunk", spec.k)
        self._check_segment(spec)
        self._check_stream()
        if self.v_added:
            apart = spec.base or spec.inner_norm or spec.residual or spec.tp_axis or self.m_loop
            once = spec.m <= self.m_block and self.split != WEIGHTS and not self.v.resident
            alone = self.v_stationary and once and not apart
            few_tokens.check_few("v_added", spec, self.v.block, target, alone=alone)
        warm_up.check(self)
        if self.split == WEIGHTS and self.m_loop:
            raise SpecError(
                "schedule: split 'weights' exchanges sums between the cores, which no loop on the "
                "device does; drop m_loop, or split 'tokens'"
            )
        if spec.tp_axis == "rows" and self.m_loop:
            raise SpecError(
                "schedule: tp_axis 'rows' sums over the ranks once a block of tokens, and the "
                "collective is not in a loop on the device; drop m_loop, or launch fewer tokens"
            )
        panel = min(self.v.block, spec.n)
        whole = panel % 128 == 0 and spec.n % panel % 128 == 0 and not spec.bias
        if (
            self.v_stationary
            and spec.out_layout == "row"
            and not (whole and target.dma_generates_descriptors)
        ):
            raise SpecError(
                "schedule: v_stationary with a row result takes whole tiles, no bias, trn2 or 3; "
                f"n is {spec.n}, v.block {self.v.block}, bias {spec.bias}, target {target.name}"
            )

    def _check_segment(self, spec: LowRankSpec) -> None:
        """Raise SpecError unless the segments hold whole loads, and x stays if it is used again."""
        segment = self.segment(spec)
        self.check_multiple("k_segment", "u.chunk", spec.k)
        if self.x.stream and segment % self.x.chunk:
            raise SpecError(
                f"schedule: x.stream loads x per segment of {segment} rows; pass an x.chunk that "
                f"divides it, not {self.x.chunk}"
            )
        if segment < spec.k and self.u.resident:
            raise SpecError("schedule: k_segment below k reads u once; drop u.resident")
        if spec.norm != "none" and self.x.stream:
            raise SpecError("schedule: the norm of x takes all of k; drop x.stream")
        if spec.base and self.x.stream:
            raise SpecError("schedule: the base product reads x again; drop x.stream")

    def _check_stream(self) -> None:
        """Raise SpecError unless a u that streams is used by a single pass over k."""
        if self.u.stream and (self.u.block > 128 * self.u.group or self.u.resident):
            raise SpecError(
                "schedule: u.stream needs one pass over the contraction per panel; lower u.block "
                f"from {self.u.block}, keep u not resident"
            )
        if self.v.stream:
            raise SpecError("schedule: v is used by every tile of tokens; drop v.stream")

    def short(self) -> str:
        """Return the blocks."""
        loop = " loop" if self.m_loop else ""
        segment = f" s{self.k_segment}{'x' if self.x.stream else ''}" if self.k_segment else ""
        how = " v-stationary" if self.v_stationary else ""
        how += " v-added" if self.v_added else ""
        how += " double-row" if self.double_row else ""
        how += f" {self.split}-split" if self.split else ""
        return (
            f"m{self.m_block}{loop} u{self.u.block} v{self.v.block} k{self.u.chunk} {self.k_order}"
            f"{segment} r{self.v.chunk}{self.uses('u', 'v')}{how}"
        )


# Bytes of x, for 512 tokens, from which smaller blocks of tokens are worth trying.
_WIDE_BYTES = 128 * 65_536


def _plain(spec: LowRankSpec, target: Target) -> Iterator[LowRankSchedule]:
    """Yield schedules that sum over all of k in PSUM."""
    size = item_bytes(spec.dtype)
    ways = turned_loads(spec.dtype, target)
    u_loads = ["rows"] if spec.u_layout == "row" else ways
    v_loads = ["rows"] if spec.v_layout == "row" else ["tensor"] if spec.wide else ways
    w_loads = ["rows"] if spec.w_layout == "row" or not spec.base else ways
    wide = spec.norm != "none" and spec.k * 512 * size > _WIDE_BYTES  # x does not stream
    m_blocks = blocks(spec.m, (128, 256, 512, 1024, 2048) if wide else (512, 1024, 2048))
    r_tiles = tiles(spec.r, 128)
    even = 128 * tiles(r_tiles, tiles(r_tiles, 8))  # panels of one pass each, about equal
    u_blocks = blocks(spec.r, tuple(sorted({256, 512, even, 1024})))
    few = spec.m <= 128  # one pass per weight: long runs, short last loads, all of PSUM
    v_blocks = blocks(spec.n, (512, 1024, 2048, 3072, 4096))
    odd = few and spec.k % 128 > 0 and spec.n <= 512  # few choices else
    if odd and spec.n > 256:  # of two panels one is stored while the other is computed
        v_blocks.insert(0, 256)
    for x_load, u_load, v_load, w_load in itertools.product(
        x_loads(spec.m, spec.x_layout, spec.x_format, target), u_loads, v_loads, w_loads
    ):
        turned = (x_load, u_load, w_load) if spec.base else (x_load, u_load)
        stage_banks = free_banks(target, x_load, u_load)
        for m_block, u_block, v_block in itertools.product(m_blocks, u_blocks, v_blocks):
            m_tiles = tiles(min(m_block, spec.m), 512)
            if m_tiles > stage_banks:
                continue
            r_group = min(stage_banks // m_tiles, tiles(min(u_block, spec.r), 128))
            u_bytes, w_bytes = min(u_block, spec.r) * size, min(v_block, spec.n) * size
            k_chunks = chunks_of_k(spec, u_bytes, w_bytes, few, odd)
            banks = target.psum_banks if few and not by_tensor(v_load, w_load) else 4
            one_pass = u_block <= 128 * r_group
            uses = [(False, False)]
            if spec.m > m_block:
                uses.append((True, False))
            if one_pass:
                uses.append((False, True))
            v_chunks = {
                chunk_rows(spec.r, min(v_block, spec.n) * (4 if spec.wide else size), wanted)
                for wanted in ((4096, 8192) if few else (8192,))
            }
            stationary = [spec.out_layout == "col"]
            turns = spec.n % 128 == 0 and not spec.bias and target.dma_generates_descriptors
            if spec.m <= 64 and turns and not stationary[0]:
                stationary.append(True)
            residents = (False, True) if spec.m > m_block else (False,)
            for (
                (u_resident, u_stream), v_resident, k_chunk, v_chunk, v_stationary, double_row
            ) in itertools.product(
                uses, residents, sorted(k_chunks), sorted(v_chunks), stationary,
                row_modes(spec.x_format, target),
            ):  # fmt: skip
                n_group = min(banks, tiles(v_block, 512))
                if v_stationary:
                    n_group = max(1, min(banks, tiles(v_block, 128)) // m_tiles)
                made = LowRankSchedule(
                    x=Operand(load=x_load, chunk=x_rows(spec.m, spec.k, k_chunk)),
                    u=Operand(
                        load=u_load, block=u_block, chunk=k_chunk, group=r_group,
                        resident=u_resident, stream=u_stream,
                    ),
                    v=Operand(
                        load=v_load, block=v_block, chunk=v_chunk, group=n_group,
                        resident=v_resident,
                    ),
                    w_load=w_load,
                    k_order=chunk_order(spec.k, turned),
                    m_block=m_block,
                    v_stationary=v_stationary,
                    double_row=double_row,
                )  # fmt: skip
                yield spread(made, spec, target)


def _segmented(spec: LowRankSpec, target: Target) -> Iterator[LowRankSchedule]:
    """Yield variants of the plain candidates that add p up over segments of the contraction."""
    few = spec.m <= 128
    if spec.base:
        return
    for plain in _plain(spec, target):
        tokens = min(plain.m_block, spec.m)
        m_tiles = tiles(tokens, 512)
        banks = free_banks(target, plain.x.load, plain.u.load) // 2  # two groups take turns
        if plain.u.resident or plain.u.stream or m_tiles > banks:
            continue
        if few and plain.u.block < spec.r:
            continue
        chunk_tiles = tiles(plain.u.chunk, 128)
        r_tiles = tiles(spec.r, 128)
        # two about equal groups, of which two cores exchange the first while the second is summed
        evenly = [tiles(r_tiles, 2)] if few and 2 * banks < r_tiles <= 4 * banks else []
        for wanted in (8, 16) if few else (4, 8, 16):
            segment = 128 * chunk_tiles * max(1, wanted // chunk_tiles)
            if segment >= spec.k:
                continue
            streams: tuple[bool, ...] = (False, True) if few else (True,)
            if spec.norm != "none":
                streams = (False,) if few else ()
            for x_stream in streams:
                x_chunk = segment if few else plain.u.chunk
                for group in sorted({max(1, banks // m_tiles), *evenly}):
                    yield dataclasses.replace(
                        plain,
                        k_segment=segment,
                        x=dataclasses.replace(plain.x, stream=True, chunk=x_chunk)
                        if x_stream
                        else plain.x,
                        u=dataclasses.replace(plain.u, group=group),
                    )


def candidates(spec: LowRankSpec, target: Target) -> Iterator[LowRankSchedule]:
    """Yield schedules that may be legal, in no order."""
    for made in (list(_plain(spec, target)), list(_segmented(spec, target))):
        yield from made
        yield from few_tokens.with_added_products(spec, target, made)


def work(spec: LowRankSpec, schedule: LowRankSchedule, target: Target) -> Work:
    """Count the work of the engines; see `Work`."""
    size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
    x_size = item_bytes(spec.x_format)
    v_size = 4 if spec.wide and schedule.v.load == "rows" else size  # the load widens it
    pairs, second = schedule.double_row, schedule.double_row and spec.requantized
    m, k, r, n = spec.m, spec.k, spec.r, spec.n
    k_tiles, r_tiles = tiles(k, 128), tiles(r, 128)
    m_blocks, segments = tiles(m, schedule.m_block), tiles(k, schedule.segment(spec))
    tokens = min(schedule.m_block, m)
    panel, u_columns = min(schedule.v.block, n), min(schedule.u.block, r)
    tally, few = Tally(), m_blocks == 1
    rows = spec.out_layout == "row"
    tally.matmuls.append(
        (passes(k, schedule.u.chunk, pairs) * r_tiles * tiles(m, 512), moves(m)[1])
    )
    tally.matmuls.append((schedule.warm, 512))
    # sums that are added in SBUF leave PSUM through VectorE alone
    tally.evictions.append((r_tiles * tiles(m, 512) * (2 * segments - 1), min(512, m)))
    contraction = passes(r, schedule.v.chunk, second) + (k_tiles if spec.base else 0)
    moving_v = rows and not schedule.v_stationary
    moving = schedule.moving_tokens(spec)
    out_tiles, out_columns = result_tiles(m - moving, n, rows=moving_v)
    tally_moving(tally, moving, contraction, n)
    if moving_v:
        store_run, stores = panel * y_size, tiles(m, 128) * tiles(n, panel)
    else:
        store_run, stores = tokens * y_size, m_blocks * tiles(n, panel)
        if rows:
            store_run = tiles(panel, 128) * y_size
    if spec.wide:
        tally.wide_matmuls.append((r_tiles * out_tiles, out_columns))
        contraction -= r_tiles
    late = contraction * out_tiles, out_columns
    tally.matmuls.append(late)
    if schedule.v_added:
        adds = passes(r, schedule.v.chunk, second) + 1
        tally.evictions.append((2 * adds * tiles(n, panel), m * tiles(panel, 128)))
    else:
        tally.evictions.append((out_tiles, out_columns))
    if spec.inner_norm:  # squares, their sum
        tally.evictions.append((2 * r_tiles * tiles(m, 512), min(512, m)))
    tally.store(m * n * y_size, stores, store_run)
    if spec.tp_axis == "rank":
        tally.store(m * n * y_size, 1, n * y_size)  # of the sum
    exchange = spec.exchanged_bytes()
    sums = m_blocks if spec.tp_axis == "rows" else 1
    tally_normed(tally, spec, tokens, m_blocks, (stores, store_run))
    k_chunks, r_chunks = tiles(k, schedule.u.chunk), tiles(r, schedule.v.chunk)
    long_runs = schedule.k_order != "strided_rows"
    rows_at_once = schedule.u.chunk // 128 if long_runs else 1
    u_times = 1 if schedule.u.resident else m_blocks
    v_times = 1 if schedule.v.resident else m_blocks
    u_run = u_columns * size * (rows_at_once if u_columns == r else 1)
    x_at_once = tiles(min(schedule.x.chunk, k), 128) if long_runs else 1
    x_run = tokens * x_size * (x_at_once if tokens == m else 1)
    if schedule.x.load == "strided":
        x_run = x_at_once * x_size if m == 1 else x_size  # in SBUF the tokens are side by side
    loads = [
        (schedule.x.load, m * k * x_size, tiles(k, schedule.x.chunk) * m_blocks, x_run, m, 1,
         x_size),
        (schedule.u.load, k * r * size * u_times, k_chunks * tiles(r, u_columns) * u_times, u_run,
         r, u_times, size),
        (schedule.v.load, r * n * v_size * v_times, r_chunks * tiles(n, panel) * v_times,
         panel * v_size, n, v_times, size),
    ]  # fmt: skip
    if spec.base:
        loads.append(
            (schedule.w_load, k * n * size * m_blocks, k_chunks * tiles(n, panel) * m_blocks,
             panel * size, n, m_blocks, size)
        )  # fmt: skip
    for how, total, count, run, free, times, each in loads:
        inner = total // (free * each * times)
        squares = tiles(inner, 128) * tiles(free, 128) * times
        turned = squares, count * tiles(free, 128), min(schedule.u.chunk, inner) * each
        tally.load(how, total, count, run, turned)
    if schedule.v_added and n > panel:
        panel = n % panel or panel
    panel_tiles = tiles(panel, 128 if schedule.v_stationary else 512)
    rest = tiles(schedule.segment(spec), 128) * max(0, r_tiles - schedule.u.group), min(512, m)
    return tally.work(
        lead_bytes=min(schedule.u.chunk, k) * (tokens * x_size + u_columns * size),
        tail_matmuls=(tiles(min(schedule.v.chunk, r), 128) * panel_tiles, out_columns),
        tail_bytes=min(m, 128) * panel * y_size,
        early_bytes=k * (r * size + m * x_size) if few else 0,
        late_matmuls=(late, rest) if few else (),
        collectives=((sums, exchange // sums, spec.tp),) if exchange else (),
    )


LOWRANK = Family(
    spec_class=LowRankSpec,
    schedule_class=LowRankSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
