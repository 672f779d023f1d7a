"""How a matmul kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels import warm_up
from nmm_compiler.kernels.base import Family
from nmm_compiler.kernels.few_tokens import check_few, panels
from nmm_compiler.kernels.matmul.spec import MatmulSpec
from nmm_compiler.kernels.moving_tokens import described, moving_bytes, tally_moving, ways
from nmm_compiler.kernels.number_formats import (
    passes,
    pitch,
    row_modes,
    scale_bytes,
    sum_bytes,
    x_pitch,
)
from nmm_compiler.kernels.schedule import LoopedSchedule, Operand
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
    normed_bytes,
    result_elements,
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
class MatmulSchedule(LoopedSchedule):
    """How a matmul kernel runs.

    x, w: how these arrive. A patch of x.group by w.group tiles of the result is summed in PSUM at a
        time: tiles of 128 tokens by 512 outputs, for y^T of 512 tokens by 128 outputs.
    k_segment: of several segments, x and w are in SBUF for one at a time.
    w_stationary: few tokens move past stationary w, and its products are added in SBUF.
    short_start: the first tiles of x and w are loads of their own; the chooser sets it.
    short_end: the last loads of w are short, and each tile of the last results is stored when it
        is there; the chooser sets it where w takes longer to arrive than TensorE takes. A kernel
        that cannot have them has none.
    warm: passes over zeros before the first product; steps of the search set it (warm_up.py).
    """

    w: Operand
    w_stationary: bool = False
    short_start: bool = False
    short_end: bool = False
    warm: int = 0

    remedies: ClassVar[Mapping[str, str]] = {
        "x": "m_block", "w": "w.block", "flat": "w.chunk", "total": "w.block",
    }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; short loads only where there are some."""
        made = super().to_dict()
        return {name: value for name, value in made.items() if value or name[:6] != "short_"}

    def ordered(self, spec: Any, target: Target) -> MatmulSchedule:
        """Return the schedule with loads before stores, and a short end where it gains time."""
        made = super().ordered(spec, target)
        part = spec.share(self.split)
        waits = _waits_for_loads(part, made.moving_tokens(part), target)
        start, end = made.starts_short(part), made.ends_short(part)
        return made.changed({"short_start": start and not waits, "short_end": end and waits})

    def starts_short(self, spec: MatmulSpec) -> bool:
        """Return whether the first tiles of x and w can be loads of their own."""
        plain = spec.norm == "none" and not self.double_row and not self.w_stationary
        return plain and not self.w.resident and not self.m_loop and spec.k > self.w.chunk

    def ends_short(self, spec: MatmulSpec) -> bool:
        """Return whether the last loads and stores can be short: w is used once, by one patch."""
        whole = (
            spec.k > 128
            and spec.k % 128 == 0
            and self.segment(spec) == spec.k
            and self.w.load == "rows"
        )
        rows = spec.out_layout == "row" and self.own_queue and not self.moving_tokens(spec)
        once = spec.m <= self.m_block and self.one_pass(spec) and not self.w_stationary
        return whole and rows and once and not self.double_row

    def sizes(self, spec: MatmulSpec) -> dict[str, int]:
        """Return field -> the size that it divides."""
        return {"m_block": spec.m, "w.chunk": spec.k, "x.chunk": spec.k, "w.block": spec.n}

    def over_k(self, spec: MatmulSpec) -> tuple[str, ...]:
        """Return how x and w are loaded."""
        return (self.x.load, self.w.load)

    def kind(self) -> tuple[Any, ...]:
        """Return the token block and the shape of a patch."""
        return (self.m_block, self.x.group, self.w.block, self.w_stationary)

    def settled(self, spec: Any) -> MatmulSchedule:
        """Return the schedule as the kernel of `spec` reads it."""
        made = super().settled(spec)
        at_once = spec.norm != "none" or self.w_stationary
        whole = {"x.chunk": 128 * tiles(spec.k, 128)} if at_once else {}
        start = self.short_start and self.starts_short(spec)
        end = self.short_end and self.ends_short(spec)
        return made.changed(whole | {"short_start": start, "short_end": end})

    def by_rows(self, spec: MatmulSpec) -> list[tuple[int, int]]:
        """Return (contraction, outputs) of the product if its tokens may move instead."""
        may = _may_move(spec) and not self.w_stationary and self.segment(spec) == spec.k
        return [(spec.k, spec.n)] if may else []

    def most_ahead(self, spec: MatmulSpec, target: Target) -> int:
        """Return 1 if a panel of w fits beside the one in use; more have no use."""
        if self.w.resident or self.w.block >= spec.n or self.segment(spec) < spec.k:
            return 0
        if self.w_stationary:
            return 0  # a chunk of w is a tile of its own, and stores have another queue
        panel = tiles(spec.k, 128) * min(self.w.block, spec.n) * item_bytes(spec.dtype)
        held = sum(self.sbuf_bytes(spec).values()) + panel * (2 if self.one_pass(spec) else 1)
        return int(held <= target.sbuf_usable_bytes_per_partition)

    def patch(self, spec: MatmulSpec) -> tuple[int, int]:
        """Return the tokens and the outputs that are summed at a time."""
        if self.w_stationary:
            return spec.m, min(self.w.block, spec.n)
        tile = (128, 512) if spec.out_layout == "row" else (512, 128)
        tokens = min(tile[0] * self.x.group, self.m_block, spec.m)
        return tokens, min(tile[1] * self.w.group, self.w.block, spec.n)

    def one_pass(self, spec: MatmulSpec) -> bool:
        """Return whether one patch takes a panel of w for all tokens of a block."""
        tokens, outputs = self.patch(spec)
        panel = min(self.w.block, spec.n)
        whole = tokens + self.moving_tokens(spec) >= min(self.m_block, spec.m)
        return not self.w.resident and whole and outputs >= panel

    def sbuf_bytes(self, spec: MatmulSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
        x_size = item_bytes(spec.x_format)
        k_tiles = tiles(self.segment(spec), 128)
        tokens, panel = min(self.m_block, spec.m), min(self.w.block, spec.n)
        patch_tokens, patch_outputs = self.patch(spec)
        rows = spec.out_layout == "row"
        w_tiles = tiles(min(self.w.chunk, spec.k), 128) if self.one_pass(spec) else k_tiles
        w_columns = spec.n if self.w.resident else panel
        held = {
            "x": k_tiles * x_pitch(tokens, self.double_row, self.x.load) * x_size,
            "w": w_tiles * pitch(w_columns, self.double_row or self.w.load == "dma") * size,
            "y": result_elements(patch_outputs, patch_tokens, rows=rows) * y_size,
        }
        if self.segment(spec) < spec.k:
            across = (tokens, panel) if rows else (panel, tokens)
            held["total"] = tiles(across[0], 128) * across[1] * 4
            held["y"] += tiles(patch_tokens, 128) * patch_outputs * 4
        if spec.bias:
            held["bias"] = bias_bytes(spec.n, y_size, rows=rows)
        if spec.fp8:
            down = self.w_stationary or not rows
            held["scale"] = scale_bytes(spec.n, spec.scales, down=down)
        if self.w_stationary:
            held["y"] = tiles(panel, 128) * tokens * y_size
            held["total"] = tiles(panel, 128) * tokens * 4
        held |= sum_bytes(spec) | normed_bytes(spec, patch_tokens, patch_outputs, y_size)
        held |= moving_bytes(self.moving_tokens(spec), panel, y_size)
        if by_tensor(self.x.load, self.w.load):
            flat = flat_bytes(spec.x_format, self.x.load)
            flat = max(flat, flat_bytes(spec.dtype, self.x.load, self.w.load))
            held["flat"] = min(max(self.w.chunk, self.x.chunk), spec.k) * flat
        return held

    def overlapped_bytes(self, spec: MatmulSpec) -> int:
        """Return bytes per partition with room for the next loads.

        What streams is freed chunk by chunk: a few more of them are enough.
        """
        size = item_bytes(spec.dtype)
        several = self.segment(spec) < spec.k
        m_blocks = tiles(spec.m, self.m_block)
        needed = self.with_copies(spec, ["y", "sum", "flat", "residual"])
        if not self.w.resident and (m_blocks > 1 or self.w.block < spec.n or several):
            chunk = tiles(min(self.w.chunk, spec.k), 128)
            needed += _AHEAD * chunk * min(self.w.block, spec.n) * size
        if m_blocks > 1 or several:
            x_row = self.patch(spec)[0] * item_bytes(spec.x_format)
            needed += _AHEAD * tiles(min(self.x.chunk, spec.k), 128) * x_row
        return needed

    def psum_banks(self, spec: MatmulSpec) -> dict[str, int]:
        """Return PSUM banks in use while a patch is summed."""
        if self.w_stationary:
            return {"w.group": 2 + turning(self.x.load, self.w.load)}
        tile = (128, 512) if spec.out_layout == "row" else (512, 128)
        tokens, outputs = self.patch(spec)
        moving = self.moving_tokens(spec)
        tokens = min(tokens, spec.m - moving)
        banks = tiles(tokens, tile[0]) * tiles(outputs, tile[1])
        banks += tiles(outputs, 128) if moving else 0
        return {"w.group": banks + turning(self.x.load, self.w.load), "x.group": self.x.group}

    def check_own(self, spec: MatmulSpec, target: Target) -> None:
        """Raise SpecError for the rules that only matmul has."""
        super().check_own(spec, target)
        self.check_multiple("x.chunk", "w.chunk", spec.k)
        warm_up.check(self)
        segment = self.segment(spec)
        if self.w_stationary:
            apart = spec.norm != "none" or spec.residual or self.m_loop or self.w.resident
            alone = segment == spec.k and spec.m <= self.m_block and not apart
            check_few("w_stationary", spec, self.w.block, target, alone=alone)
        if segment < spec.k and (self.w.resident or segment % self.x.chunk):
            raise SpecError(
                f"schedule: a k_segment of {self.k_segment} holds whole loads and reads w again; "
                f"pass a multiple of x.chunk = {self.x.chunk}, and keep w not resident"
            )
        if segment < spec.k and spec.norm != "none":
            raise SpecError("schedule: the norm of x takes all of k; drop k_segment")
        if self.w.stream:
            raise SpecError("schedule: every chunk of w is freed after its last use; drop w.stream")

    def short(self) -> str:
        """Return the blocks."""
        loop = " loop" if self.m_loop else ""
        double = " double-row" if self.double_row else ""
        double += f" {self.split}-split" if self.split else ""
        double += " w-stationary" if self.w_stationary else ""
        segment = f" s{self.k_segment}" if self.k_segment else ""
        patch = f"{self.x.group}x{self.w.group}"
        blocks = f"n{self.w.block} k{self.w.chunk}{segment} {patch}"
        return f"m{self.m_block}{loop} {blocks} {self.k_order}{self.uses('w')}{double}"


_AHEAD = 2  # loads in flight beyond what is in use
_SEGMENT = 2048


def _waits_for_loads(spec: MatmulSpec, moving: int, target: Target) -> bool:
    """Return whether x and w take longer to arrive than TensorE takes for its passes."""
    moved = spec.m * item_bytes(spec.x_format) + spec.n * item_bytes(spec.dtype)
    factor = target.fp32_pass_factor if spec.dtype == "float32" else 1.0
    over = target.tensor_interval_overhead_cycles
    wide = min(512, spec.n)
    cycles = tiles(spec.m - moving, 128) * tiles(spec.n, wide) * (wide + over)
    if moving:
        cycles += tiles(spec.n, 128) * (max(moving, target.tensor_min_interval_cycles) + over)
    seconds = factor * cycles / target.tensor_clock_hz
    return 128 * moved / target.memory_bytes_per_second > seconds


def _may_move(spec: MatmulSpec) -> bool:
    """Return whether tokens of a result by rows may move: whole tiles, no bias, no scales."""
    whole = spec.n % 128 == 0 and not spec.bias and not spec.fp8
    return spec.out_layout == "row" and whole


def candidates(spec: MatmulSpec, target: Target) -> Iterator[MatmulSchedule]:
    """Yield schedules that may be legal, in no order."""
    yield from _stationary(spec, target)
    w_loads = ["rows"] if spec.w_layout == "row" else turned_loads(spec.dtype, target)
    loads = x_loads(spec.m, spec.x_layout, spec.x_format, target)
    m_blocks = blocks(spec.m, (128, 256, 512, 1024, 2048))
    for x_load, w_load, m_block in itertools.product(loads, w_loads, m_blocks):
        for x_group, w_group, n_block in _patches(
            spec, m_block, free_banks(target, x_load, w_load)
        ):
            for chunk, segment in _chunks(spec, n_block):
                x_chunk = x_rows(spec.m, segment or spec.k, chunk)
                order = chunk_order(spec.k, (x_load, w_load))
                again = spec.m > m_block and not segment
                for resident, double_row in itertools.product(
                    (False, True) if again else (False,), row_modes(spec.x_format, target)
                ):
                    yield MatmulSchedule(
                        x=Operand(load=x_load, chunk=x_chunk, group=x_group),
                        w=Operand(
                            load=w_load, block=n_block, chunk=chunk, group=w_group,
                            resident=resident,
                        ),
                        k_order=order,
                        k_segment=segment,
                        m_block=m_block,
                        double_row=double_row,
                    )  # fmt: skip


def _stationary(spec: MatmulSpec, target: Target) -> Iterator[MatmulSchedule]:
    """Yield schedules in which few tokens move past stationary w."""
    if spec.norm != "none" or spec.residual:
        return
    w_loads = ["rows"] if spec.w_layout == "row" else turned_loads(spec.dtype, target)
    loads = x_loads(spec.m, spec.x_layout, spec.x_format, target)
    for x_load, w_load in itertools.product(loads, w_loads):
        for n_block in panels(spec, target):
            for chunk in {
                chunk_rows(spec.k, min(n_block, spec.n) * item_bytes(spec.dtype), wanted)
                for wanted in (2048, 4096, 8192)
            }:
                for double_row in row_modes(spec.x_format, target):
                    yield MatmulSchedule(
                        x=Operand(load=x_load, chunk=128 * tiles(spec.k, 128)),
                        w=Operand(load=w_load, block=n_block, chunk=chunk),
                        k_order=chunk_order(spec.k, (x_load, w_load)),
                        m_block=128,
                        double_row=double_row,
                        w_stationary=True,
                    )


def _patches(spec: MatmulSpec, m_block: int, banks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tiles of tokens, tiles of outputs) of a patch that PSUM holds, and panels of w."""
    m_tile, n_tile = (128, 512) if spec.out_layout == "row" else (512, 128)
    m_tiles, n_tiles = tiles(min(m_block, spec.m), m_tile), tiles(spec.n, n_tile)
    even = tiles(m_tiles, tiles(m_tiles, 4))  # patches of about equal height
    for x_group in sorted({min(count, m_tiles) for count in (1, 2, even, 4)}):
        for most in sorted({banks, 4}):
            w_group = min(most // x_group, n_tiles)
            if w_group:
                for panels in (1, 2):
                    n_block = n_tile * w_group * panels
                    yield x_group, w_group, min(n_block, 128 * tiles(spec.n, 128))
        if len(ways(spec.m)) > 1 and _may_move(spec):  # which takes a bank for 128 outputs
            yield x_group, 1, min(512, 128 * tiles(spec.n, 128))
        if spec.n <= 2048:  # little to do: narrow panels, which begin and end sooner
            for n_block in (128, 256):
                yield x_group, tiles(n_block, n_tile), n_block


def _chunks(spec: MatmulSpec, n_block: int) -> Iterator[tuple[int, int]]:
    """Yield (contraction rows per load of w, rows per segment or 0)."""
    row_bytes = min(n_block, spec.n) * item_bytes(spec.dtype)
    for chunk in {chunk_rows(spec.k, row_bytes, wanted) for wanted in (2048, 4096, 8192)}:
        yield chunk, 0
        segment = max(1, _SEGMENT // chunk) * chunk
        if segment < spec.k:
            yield chunk, segment


def data_flow(spec: MatmulSpec, schedule: MatmulSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    row = spec.out_layout == "row" and not schedule.w_stationary
    moves = "x^T stationary, w moving" if row else "w stationary, x^T moving"
    tokens, outputs = schedule.patch(spec)
    rows = "all of" if schedule.segment(spec) == spec.k else f"{schedule.k_segment} rows of"
    if schedule.w_stationary:
        rows = "128 rows of"
    return (
        f"x: {LOADED[schedule.x.load]}, {min(schedule.m_block, spec.m)} tokens at a time.",
        f"w: {schedule.w.arrives(spec.n)}.",
        f"product: {moves}; {tokens} x {outputs} summed in PSUM over {rows} k.",
        f"epilogue: {'bias, ' if spec.bias else ''}{spec.activation}, while leaving PSUM.",
        *described(schedule.moving_tokens(spec)),
    )


def work(spec: MatmulSpec, schedule: MatmulSchedule, target: Target) -> Work:
    """Count the work of the engines; see `Work`."""
    size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
    x_size = item_bytes(spec.x_format)
    m, k, n = spec.m, spec.k, spec.n
    k_tiles, m_blocks = tiles(k, 128), tiles(m, schedule.m_block)
    panel, segments = min(schedule.w.block, n), tiles(k, schedule.segment(spec))
    tokens, outputs = schedule.patch(spec)
    if schedule.w_stationary:
        return _stationary_work(spec, schedule)
    tally = Tally()
    if spec.out_layout == "row":
        moving = schedule.moving_tokens(spec)
        out_tiles, columns = tiles(m - moving, 128) * tiles(n, min(512, outputs)), min(512, outputs)
        tally_moving(tally, moving, k_tiles, n)
        store_run, stores = outputs * y_size, tiles(m, 128) * tiles(n, outputs)
        in_patch = tiles(tokens, 128) * tiles(outputs, 512)
    else:
        out_tiles, columns = tiles(n, 128) * tiles(m, min(512, tokens)), min(512, tokens)
        store_run, stores = tokens * y_size, tiles(m, tokens) * tiles(n, outputs)
        in_patch = tiles(outputs, 128) * tiles(tokens, 512)
    tally.matmuls.append((passes(k, schedule.w.chunk, schedule.double_row) * out_tiles, columns))
    tally.matmuls.append((schedule.warm, 512))
    tally.evictions.append((out_tiles * (segments + (segments > 1)), columns))
    tally.store(m * n * y_size, stores, store_run)
    tally_normed(tally, spec, tokens, tiles(m, tokens), (stores, store_run))
    k_chunks = tiles(k, schedule.w.chunk)
    at_once = schedule.w.chunk // 128 if schedule.k_order == "consecutive_rows" else 1
    w_times = 1 if schedule.w.resident else m_blocks
    x_times = tiles(n, panel) if segments > 1 else 1
    for how, count, run, free, each in (
        (schedule.x.load, tiles(k, schedule.x.chunk) * tiles(m, tokens) * x_times,
         tokens * x_size * (at_once if tokens == m else 1), m * x_times, x_size),
        (schedule.w.load, k_chunks * tiles(n, panel) * w_times,
         panel * size * (at_once if panel == n else 1), n * w_times, size),
    ):  # fmt: skip
        rows = min(schedule.w.chunk, k) * each
        turned = k_tiles * tiles(free, 128), k_chunks * tiles(free, 128), rows
        if how == "strided":  # in SBUF the tokens are side by side
            run = at_once * each if m == 1 else each
        tally.load(how, k * free * each, count, run, turned)
    first = min(schedule.w.chunk, k)
    last = passes(first, first, schedule.double_row) * in_patch
    return tally.work(
        lead_bytes=min(schedule.x.chunk, k) * tokens * x_size + first * panel * size,
        tail_matmuls=(last, columns),
        tail_bytes=min(m, 128) * outputs * y_size,
    )


def _stationary_work(spec: MatmulSpec, schedule: MatmulSchedule) -> Work:
    """Count the work of few tokens that move past stationary w."""
    size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
    m, k, n = spec.m, spec.k, spec.n
    x_bytes = m * k * item_bytes(spec.x_format)
    panel, n_tiles = min(schedule.w.block, n), tiles(n, 128)
    steps = passes(k, schedule.w.chunk, schedule.double_row)
    tally = Tally()
    tally.matmuls.append((steps * n_tiles, 64))
    tally.evictions.append((2 * (steps + 1) * tiles(n, panel), m * tiles(panel, 128)))
    run = tiles(panel, 128) * y_size if spec.out_layout == "row" else m * y_size
    tally.store(m * n * y_size, tiles(n, panel), run)
    at_once = schedule.w.chunk // 128 if schedule.k_order == "consecutive_rows" else 1
    tally.load(schedule.x.load, x_bytes, 1, x_bytes // min(k, 128), (0, 1, 0))
    count = tiles(k, schedule.w.chunk) * tiles(n, panel)
    w_run = panel * size * (at_once if panel == n else 1)
    turned = tiles(k, 128) * n_tiles, tiles(k, schedule.w.chunk) * n_tiles, schedule.w.chunk * size
    tally.load(schedule.w.load, k * n * size, count, w_run, turned)
    first = min(schedule.w.chunk, k)
    last = (n % panel or panel) if n > panel else n
    return tally.work(
        lead_bytes=first * panel * size,
        tail_matmuls=(passes(first, first, schedule.double_row) * tiles(last, 128), 64),
        tail_bytes=m * last * y_size,
    )


MATMUL = Family(
    spec_class=MatmulSpec,
    schedule_class=MatmulSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
