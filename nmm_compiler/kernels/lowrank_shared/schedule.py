"""How a lowrank_shared kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels import warm_up
from nmm_compiler.kernels.base import WEIGHTS, Family
from nmm_compiler.kernels.lowrank_shared.spec import LowRankSharedSpec, Output
from nmm_compiler.kernels.moving_tokens import described, moving_bytes, tally_moving
from nmm_compiler.kernels.number_formats import (
    check_double_row,
    check_widened,
    passes,
    pitch,
    row_modes,
    scale_bytes,
)
from nmm_compiler.kernels.schedule import KernelSchedule, Operand
from nmm_compiler.kernels.tiling import (
    LOADED,
    bias_bytes,
    blocks,
    by_tensor,
    chunk_order,
    chunk_rows,
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
class LowRankSharedSchedule(KernelSchedule):
    """How a lowrank_shared kernel runs.

    x, u, v: how x, every u and every v arrive. u.chunk is that of the widest u; narrower ones take
        more, for loads of about one size. u.group counts rank tiles through all u, v.group output
        tiles of one v.
    m_block: tokens whose intermediates stay in SBUF. k_chunk: contraction rows that all u use one
        after the other.
    v_stationary: stage 2 holds v stationary for "row" results too, where their sizes allow it.
    narrow_first: results with few columns are made first, which hides their short stores.
    double_row: fp8 only, TensorE takes pairs of tiles of a contraction in one pass.
    warm: passes over zeros before the first product; steps of the search set it (warm_up.py).
    """

    u: Operand
    v: Operand
    k_chunk: int
    v_stationary: bool = False
    narrow_first: bool = False
    double_row: bool = False
    warm: int = 0

    may_aside: ClassVar[tuple[str, ...]] = ("x", "v")
    remedies: ClassVar[Mapping[str, str]] = {
        "x": "m_block", "u": "u.chunk", "p": "m_block", "v": "v.block", "y": "v.block",
    }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; double_row only where there is one."""
        made = super().to_dict()
        return {name: value for name, value in made.items() if name != "double_row" or value}

    def sizes(self, spec: LowRankSharedSpec) -> dict[str, int]:
        """Return field -> the size that it divides."""
        return {
            "m_block": spec.m, "k_chunk": spec.k, "x.chunk": spec.k, "u.chunk": spec.k,
            "v.block": max(spec.ns), "v.chunk": max(spec.ranks),
        }  # fmt: skip

    def over_k(self, spec: LowRankSharedSpec) -> tuple[str, ...]:
        """Return how x and every u are loaded."""
        return (self.x.load, self.u.load)

    def kind(self) -> tuple[Any, ...]:
        """Return the token block, the block of v, and how stage 2 runs."""
        return (self.m_block, self.v.block, self.v_stationary, self.narrow_first)

    def settled(self, spec: Any) -> _Settled:
        """Return the schedule as the kernel of `spec` reads it."""
        made = super().settled(spec)
        held = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
        starts = itertools.accumulate((tiles(r, 128) for r in spec.ranks), initial=0)
        return _Settled(
            **held,
            starts=tuple(starts),
            u_chunks=self.chunks_of(spec),
            turns=self.order_of(spec),
            stationary=tuple(self.holds_v(y) for y in spec.results()),
        )

    def chunks_of(self, spec: LowRankSharedSpec) -> tuple[int, ...]:
        """Return contraction rows per load of each u, in whole k_chunks."""
        most = self.k_chunk * tiles(spec.k, self.k_chunk)
        return tuple(min(most, self.u.chunk * (max(spec.ranks) // r)) for r in spec.ranks)

    def order_of(self, spec: LowRankSharedSpec) -> tuple[int, ...]:
        """Return the results in the order in which they are made."""
        results = spec.results()
        order = range(len(results))
        return tuple(sorted(order, key=lambda j: results[j].n) if self.narrow_first else order)

    def holds_v(self, y: Output) -> bool:
        """Return whether stage 2 holds v stationary for this result."""
        return y.layout == "col" or (self.v_stationary and self._turns(y))

    def _turns(self, y: Output) -> bool:
        """Return whether a "row" result can come out with v stationary: whole tiles, no bias."""
        panel = min(self.v.block, y.n)
        return panel % 128 == 0 and y.n % panel % 128 == 0 and not y.bias

    def by_rows(self, spec: LowRankSharedSpec) -> list[tuple[int, int]]:
        """Return (contraction, outputs) of each product of stage 2 whose tokens may move."""
        if spec.fp8:
            return []
        rows = [y for y in spec.results() if not self.holds_v(y) and not y.bias]
        return [(y.r, y.n) for y in rows if y.n % 128 == 0]

    def sbuf_bytes(self, spec: LowRankSharedSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
        p_size, x_size = item_bytes(spec.intermediate_dtype), item_bytes(spec.x_format)
        pairs, second = self.double_row, self.double_row and spec.requantized
        k_tiles, tokens = tiles(spec.k, 128), min(self.m_block, spec.m)
        results = spec.results()
        u_turned, v_turned = pairs or self.u.load == "dma", second or self.v.load == "dma"
        if self.u.resident:
            u = k_tiles * sum(pitch(r, u_turned) for r in spec.ranks)
        else:
            chunks = zip(self.chunks_of(spec), spec.ranks, strict=True)
            u = sum(
                tiles(rows, 128) * pitch(min(128 * self.u.group, r), u_turned) for rows, r in chunks
            )
        depths = [tiles(y.r, 128) for y in results]
        panels = [min(self.v.block, y.n) for y in results]
        if self.v.resident:
            wide = [pitch(y.n, v_turned) for y in results]
            v = sum(depth * columns for depth, columns in zip(depths, wide, strict=True))
        else:
            wide = [pitch(panel, v_turned) for panel in panels]
            v = max(depth * columns for depth, columns in zip(depths, wide, strict=True))
        held = {
            "x": k_tiles * pitch(tokens, pairs or self.x.load == "dma") * x_size,
            "u": u * size,
            "p": sum(tiles(r, 128) for r in spec.ranks) * pitch(tokens, second) * p_size,
            "v": v * (p_size if spec.wide else size),
            "y": y_size * max(
                result_elements(panel, tokens, rows=not self.holds_v(y))
                for panel, y in zip(panels, results, strict=True)
            ),
        }  # fmt: skip
        held |= normed_bytes(spec, tokens, 0, size)
        held |= moving_bytes(self.moving_tokens(spec), max(panels), y_size)
        if self.split == WEIGHTS:
            held["halves"] = 2 * sum(tiles(r, 128) for r in spec.ranks) * tokens * 4
        biased = [y for y in results if y.bias]
        if biased:
            held["bias"] = sum(bias_bytes(y.n, y_size, rows=y.layout == "row") for y in biased)
        steps = max(self._steps(spec, y) for y in results)
        if steps > 1:
            held["sum"] = 512 * 4 * (steps - 1)
        if spec.fp8:
            held["scale"] = sum(scale_bytes(r, spec.scales, down=True) for r in spec.ranks)
            held["scale"] += sum(
                scale_bytes(y.n, spec.scales, down=self.holds_v(y)) for y in results
            )
            if spec.requantized:
                held["quantized"] = 512 * 4
        if by_tensor(self.x.load, self.u.load):
            flat = flat_bytes(spec.x_format, self.x.load)
            flat = max(flat, flat_bytes(spec.dtype, self.x.load, self.u.load))
            held["flat"] = min(max(*self.chunks_of(spec), self.x.chunk), spec.k) * flat
        if by_tensor(self.v.load):
            flat = flat_bytes(spec.dtype, self.v.load)
            held["flat_v"] = min(self.v.chunk, max(spec.ranks)) * flat
        return held

    @staticmethod
    def _steps(spec: LowRankSharedSpec, y: Output) -> int:
        """Return steps from a sum to a "row" result, which keep fp32 tiles between them."""
        if y.layout == "col":
            return 0
        scaled = spec.scales == "channel" or (spec.scales == "tensor" and y.bias)
        return scaled + y.bias + (y.activation != "identity")

    def overlapped_bytes(self, spec: LowRankSharedSpec) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap."""
        several = tiles(spec.m, self.m_block) > 1
        streams = ["y", "sum", "flat", "flat_v"]
        streams += [] if self.u.resident else ["u"]
        streams += [] if self.v.resident else ["v"]
        streams += ["x"] if several else []
        # the first panels of all v are there before the first result is stored
        firsts = (
            0
            if self.v.resident
            else sum(tiles(y.r, 128) * min(self.v.block, y.n) for y in spec.results())
        )
        each = spec.intermediate_dtype if spec.wide else spec.dtype
        return self.with_copies(spec, streams) + firsts * item_bytes(each)

    def psum_banks(self, spec: LowRankSharedSpec) -> dict[str, int]:
        """Return PSUM banks in use in each stage."""
        m_tiles = tiles(min(self.m_block, spec.m), 512)
        r_tiles = sum(tiles(r, 128) for r in spec.ranks)
        still = any(self.holds_v(y) for y in spec.results())
        first, second = (
            min(self.u.group, r_tiles) * m_tiles,
            self.v.group * (m_tiles if still else 1),
        )
        return {
            "u.group": first + turning(self.x.load, self.u.load),
            "v.group": second + turning(self.v.load),
        }

    def check_own(self, spec: LowRankSharedSpec, target: Target) -> None:
        """Raise SpecError for the rules that only lowrank_shared has."""
        check_double_row(self.double_row, spec.x_format, target)
        check_widened("v.load", self.v.load, spec)
        warm_up.check(self)
        self.check_multiple("x.chunk", "k_chunk", spec.k)
        self.check_multiple("u.chunk", "k_chunk", spec.k)
        results = spec.results()
        turned = any(y.layout == "row" and self._turns(y) for y in results)
        if self.v_stationary and not (turned and target.dma_generates_descriptors):
            raise SpecError(
                "schedule: v_stationary takes a row result of whole tiles, no bias, trn2 or trn3; "
                f"v.block is {self.v.block}, target {target.name}, the results "
                + ", ".join(f"{y.n} {y.layout}{' bias' if y.bias else ''}" for y in results)
            )

    def short(self) -> str:
        """Return the blocks."""
        return (
            f"m{self.m_block} r{self.u.group} v{self.v.block} k{self.k_chunk} {self.k_order} "
            f"u{self.u.chunk} r{self.v.chunk}{self.uses('u', 'v')}"
            f"{' v-stationary' if self.v_stationary else ''}"
            f"{' narrow-first' if self.narrow_first else ''}"
            f"{' double-row' if self.double_row else ''}"
            f"{f' {self.split}-split' if self.split else ''}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settled(LowRankSharedSchedule):
    """A schedule with the values that it has for one spec.

    starts: first rank tile of every u, then their number. u_chunks: rows per load of every u.
    turns: the results in the order in which they are made. stationary: where v is.
    """

    starts: tuple[int, ...]
    u_chunks: tuple[int, ...]
    turns: tuple[int, ...]
    stationary: tuple[bool, ...]


def candidates(spec: LowRankSharedSpec, target: Target) -> Iterator[LowRankSharedSchedule]:
    """Yield schedules that may be legal, in no order."""
    size = item_bytes(spec.dtype)
    ways = turned_loads(spec.dtype, target)
    results = spec.results()
    r_tiles, widest = sum(tiles(r, 128) for r in spec.ranks), max(y.n for y in results)
    rows = [y for y in results if y.layout == "row"]
    stills = [False]
    turns = any(y.n % 128 == 0 and not y.bias for y in rows)
    if spec.m <= 64 and target.dma_generates_descriptors and turns:
        stills.append(True)
    few = spec.m <= 128
    # of x and of the intermediates
    strips = tiles(spec.k, 128) * 512 * item_bytes(spec.x_format)
    strips += r_tiles * 512 * item_bytes(spec.intermediate_dtype)
    wide = strips > target.sbuf_usable_bytes_per_partition // 2
    for x_load, u_load, v_load, m_block in itertools.product(
        x_loads(spec.m, spec.x_layout, spec.x_format, target),
        ["rows"] if spec.u_layout == "row" else ways,
        ["rows"] if spec.v_layout == "row" else ["tensor"] if spec.wide else ways,
        blocks(spec.m, (128, 256, 512, 1024, 2048) if wide else (512, 1024, 2048)),
    ):
        m_tiles = tiles(min(m_block, spec.m), 512)
        banks = free_banks(target, x_load, u_load)
        most = min(banks // m_tiles, r_tiles)
        if not most:
            continue
        groups = {most, tiles(r_tiles, tiles(r_tiles, most))}
        once = most == r_tiles and spec.m <= m_block  # every u is used by one pass
        for r_group, u_resident, v_block, v_stationary, v_resident, v_bytes in itertools.product(
            sorted(groups),
            (False,) if once else (False, True),
            blocks(widest, (512, 1024, 2048, 4096)),
            stills,
            (False, True) if spec.m > m_block else (False,),
            (4096, 8192) if few else (8192,),
        ):
            columns = sum(spec.ranks) if u_resident else min(128 * r_group, sum(spec.ranks))
            moving = bool(rows) and not v_stationary
            n_group = min(4, tiles(v_block, 512)) if moving else tiles(v_block, 128)
            room = free_banks(target, v_load)
            n_group = min(n_group, room // m_tiles if len(rows) < len(results) else room)
            if v_stationary:
                n_group = max(1, min(room, tiles(v_block, 128)) // m_tiles)
            sizes = (4096, 8192, 16384) if few else (2048, 4096, 8192)
            chunks = {chunk_rows(spec.k, columns * size, wanted) for wanted in sizes}
            orders = {False, len({y.n for y in results}) > 1}
            for k_chunk, depth, narrow_first, double_row in itertools.product(
                sorted(chunks), (1,) if few else (1, 2), sorted(orders),
                row_modes(spec.x_format, target),
            ):  # fmt: skip
                yield LowRankSharedSchedule(
                    x=Operand(load=x_load, chunk=x_rows(spec.m, spec.k, k_chunk)),
                    u=Operand(
                        load=u_load, chunk=depth * k_chunk, group=r_group, resident=u_resident
                    ),
                    v=Operand(
                        load=v_load,
                        block=v_block,
                        chunk=chunk_rows(max(spec.ranks), min(v_block, widest) * size, v_bytes),
                        group=max(1, n_group),
                        resident=v_resident,
                    ),
                    k_order=chunk_order(spec.k, (x_load, u_load)),
                    m_block=m_block,
                    k_chunk=k_chunk,
                    v_stationary=v_stationary,
                    narrow_first=narrow_first,
                    double_row=double_row,
                )


def data_flow(spec: LowRankSharedSpec, schedule: LowRankSharedSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    stills = [schedule.holds_v(y) for y in spec.results()]
    second = "v stationary, p^T moving" if all(stills) else "p^T stationary, v moving"
    if any(stills) and not all(stills):
        second += ", or v stationary"
    return (
        f"x: {LOADED[schedule.x.load]}, read once, {min(schedule.m_block, spec.m)} tokens at a "
        "time.",
        f"stage 1: every u, {LOADED[schedule.u.load]}, stationary, {schedule.u.group} rank tiles "
        "at once, x^T moving; (x u)^T in SBUF.",
        f"every v: {schedule.v.arrives(schedule.v.block)}.",
        f"stage 2: {second}; bias and activation while leaving PSUM.",
        *described(schedule.moving_tokens(spec)),
    )


def work(spec: LowRankSharedSpec, schedule: LowRankSharedSchedule, target: Target) -> Work:
    """Count the work of the engines; see `Work`."""
    size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
    x_size, v_size = item_bytes(spec.x_format), item_bytes(spec.dtype)
    if spec.wide and schedule.v.load == "rows":
        v_size = 4  # the load widens it
    pairs, kept = schedule.double_row, schedule.double_row and spec.requantized
    m, k, tokens = spec.m, spec.k, min(schedule.m_block, spec.m)
    times_moved, moving = moves(m)
    m_blocks = tiles(m, schedule.m_block)
    r_tiles = sum(tiles(r, 128) for r in spec.ranks)
    tally = Tally()
    tally.matmuls.append((passes(k, schedule.k_chunk, pairs) * r_tiles * times_moved, moving))
    tally.matmuls.append((schedule.warm, 512))
    tally.evictions.append((r_tiles * times_moved, moving))
    second: list[tuple[int, int]] = []
    tally_normed(tally, spec, tokens, m_blocks, (0, 0))

    def load(
        how: str, rows: int, columns: int, chunk: int, panel: int, run: int, times: int, size: int
    ) -> None:
        count = tiles(rows, chunk) * tiles(columns, panel) * times
        squares = tiles(rows, 128) * tiles(columns, 128) * times
        turned = squares, count * tiles(panel, 128), max(min(chunk, rows) * size, size)
        tally.load(how, rows * columns * size * times, count, max(run, size), turned)

    long_runs = schedule.k_order == "consecutive_rows"
    x_deep = tiles(schedule.x.chunk, 128) if long_runs else 1
    x_run = tokens * x_size * (x_deep if tokens == m else 1)
    if schedule.x.load == "strided":
        x_run = x_deep * x_size if m == 1 else x_size  # in SBUF the tokens are side by side
    load(schedule.x.load, k, m, schedule.x.chunk, tokens, x_run, 1, x_size)
    for r, rows in zip(spec.ranks, schedule.chunks_of(spec), strict=True):
        at_once = tiles(rows, 128) if long_runs else 1
        panel = r if schedule.u.resident else min(r, 128 * schedule.u.group)
        run = panel * size * (at_once if panel == r else 1)
        times = 1 if schedule.u.resident else m_blocks
        load(schedule.u.load, k, r, rows, panel, run, times, size)
    panel, results = 0, spec.results()
    for y in (results[j] for j in schedule.order_of(spec)):
        panel, still = min(schedule.v.block, y.n), schedule.holds_v(y)
        times = 1 if schedule.v.resident else m_blocks
        run = panel * v_size
        load(schedule.v.load, y.r, y.n, schedule.v.chunk, panel, run, times, v_size)
        if still:
            stores = m_blocks * tiles(y.n, panel)
            run = (tiles(panel, 128) if y.layout == "row" else tokens) * y_size
        else:
            stores, run = tiles(m, 128) * tiles(y.n, panel), panel * y_size
        moving = schedule.moving_tokens(spec) if (y.r, y.n) in schedule.by_rows(spec) else 0
        tally_moving(tally, moving, tiles(y.r, 128), y.n)
        count, columns = result_tiles(m - moving, y.n, rows=not still)
        second.append((passes(y.r, schedule.v.chunk, kept) * count, columns))
        tally.evictions.append((count, columns))
        tally.store(m * y.n * y_size, stores, run)
    (tally.wide_matmuls if spec.wide else tally.matmuls).extend(second)
    single = m_blocks == 1
    return tally.work(
        lead_bytes=min(schedule.k_chunk, k) * (tokens * x_size + min(sum(spec.ranks), 128) * size),
        tail_matmuls=(tiles(panel, 512), min(512, panel)),
        tail_bytes=min(m, 128) * panel * y_size,
        early_bytes=k * (sum(spec.ranks) * size + m * x_size) if single else 0,
        late_matmuls=tuple(second) if single and not spec.wide else (),
    )


LOWRANK_SHARED = Family(
    spec_class=LowRankSharedSpec,
    schedule_class=LowRankSharedSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
    gathered={"us": "u", "vs": "v", "biases": "bias", "scales": "[uvp]_scale"},
)
