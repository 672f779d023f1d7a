"""How a matmul kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.base import Family, KernelSchedule, Operand, Work, item_bytes
from nmm_compiler.kernels.matmul.spec import MatmulSpec
from nmm_compiler.kernels.number_formats import (
    check_double_row,
    passes,
    pitch,
    row_modes,
    scale_bytes,
    sum_bytes,
)
from nmm_compiler.kernels.tiling import (
    LOADED,
    blocks,
    check_blocks,
    check_load,
    check_loop,
    check_multiple,
    check_order,
    chunk_order,
    chunk_rows,
    tiles,
    turned_loads,
    x_loads,
    x_rows,
)
from nmm_compiler.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSchedule(KernelSchedule):
    """How a matmul kernel runs.

    x, w: how these arrive; w.group counts output tiles.
    m_loop: the blocks of tokens are a loop on the device, and the program holds one of them.
    double_row: fp8 only, TensorE takes pairs of tiles of k in one pass.
    """

    w: Operand
    m_loop: bool = False
    double_row: bool = False

    def sbuf_bytes(self, spec: MatmulSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
        k_tiles = tiles(spec.k, 128)
        tokens, panel = min(self.m_block, spec.m), min(self.w.block, spec.n)
        rows = spec.out_layout == "row"
        held = {
            "x": k_tiles * pitch(tokens, self.double_row) * size,
            "w": (tiles(self.w.chunk, 128) if self.w.stream else k_tiles)
            * pitch(spec.n if self.w.resident else panel, self.double_row)
            * size,
            "y": panel * y_size if rows else tiles(panel, 128) * tokens * y_size,
        }
        if spec.bias:
            held["bias"] = 2 * spec.n * y_size if rows else 6 * tiles(spec.n, 128)
        if spec.fp8:
            held["scale"] = scale_bytes(spec.n, spec.scales, down=not rows)
        held |= sum_bytes(spec)
        if "tensor" in (self.x.load, self.w.load):
            held["flat"] = min(max(self.w.chunk, self.x.chunk), spec.k) * size
        return held

    def overlapped_bytes(self, spec: MatmulSpec) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap."""
        held = self.sbuf_bytes(spec)
        streams = ["y", *(name for name in ("sum", "flat") if name in held)]
        m_blocks = tiles(spec.m, self.m_block)
        if not self.w.resident and (m_blocks > 1 or self.w.block < spec.n or self.w.stream):
            streams.append("w")
        if m_blocks > 1:
            streams.append("x")
        return sum(held.values()) + sum(held[name] for name in streams)

    def one_pass(self, spec: MatmulSpec) -> bool:
        """Return whether one group of PSUM sums takes a whole panel of w, for all its tokens."""
        if spec.out_layout == "col":
            return self.w.block <= 128 * self.w.group
        return self.w.block <= 512 * self.w.group and min(self.m_block, spec.m) <= 128

    def psum_banks(self, spec: MatmulSpec) -> int:
        """Return PSUM banks in use at once."""
        turning = 2 if "tensor" in (self.x.load, self.w.load) else 0
        m_tiles = tiles(min(self.m_block, spec.m), 512)
        return self.w.group * (1 if spec.out_layout == "row" else m_tiles) + turning

    def check(self, spec: MatmulSpec, target: Target) -> None:
        """Raise SpecError or CapacityError, with the numbers, for a schedule that is not legal."""
        sizes = {"m_block": spec.m, "w.chunk": spec.k, "x.chunk": spec.k, "w.block": spec.n}
        check_blocks(self, sizes, ("w.group",))
        check_load("x.load", self.x.load, spec.x_layout == "col", spec.dtype, target, strided=True)
        check_load("w.load", self.w.load, spec.w_layout == "row", spec.dtype, target)
        check_multiple("x.chunk", self.x.chunk, "w.chunk", self.w.chunk, spec.k)
        check_order(self.k_order, (self.x.load, self.w.load))
        check_double_row(self.double_row, spec.dtype, target)
        check_loop(self, spec.m, (self.w.resident,))
        if self.w.stream and (self.w.resident or not self.one_pass(spec)):
            raise SpecError(
                "schedule: w.stream needs one pass over k per panel of w; lower w.block from "
                f"{self.w.block} or m_block from {self.m_block}, and keep w not resident"
            )
        banks = self.psum_banks(spec)
        if banks > target.psum_banks:
            raise CapacityError(
                f"{spec.short()}: the schedule needs {banks} PSUM banks, {target.name} has "
                f"{target.psum_banks}; lower w.group from {self.w.group}"
            )
        self.check_sbuf(spec, target, {"x": "m_block", "w": "w.block", "flat": "w.chunk"})

    def short(self) -> str:
        """Return the blocks."""
        resident = " w-resident" if self.w.resident else " w-stream" if self.w.stream else ""
        loop = " loop" if self.m_loop else ""
        double = " double-row" if self.double_row else ""
        blocks = f"n{self.w.block} k{self.w.chunk}"
        return f"m{self.m_block}{loop} {blocks} {self.k_order}{resident}{double}"


def candidates(spec: MatmulSpec, target: Target) -> Iterator[MatmulSchedule]:
    """Yield schedules that may be legal, in no order."""
    size = item_bytes(spec.dtype)
    w_loads = ["rows"] if spec.w_layout == "row" else turned_loads(spec.dtype, target)
    loads = x_loads(spec.m, spec.x_layout, spec.dtype, target)
    m_blocks = blocks(spec.m, (128, 256, 512, 1024, 2048))
    n_blocks = blocks(spec.n, (128, 256, 512, 1024, 2048, 4096))
    for x_load, w_load, m_block, n_block in itertools.product(loads, w_loads, m_blocks, n_blocks):
        banks = 6 if "tensor" in (x_load, w_load) else 8
        m_tiles = tiles(min(m_block, spec.m), 512)
        if m_tiles > banks:
            continue
        most = banks if tiles(spec.m, 128) == 1 else 4
        n_group = most if spec.out_layout == "row" else max(1, most // m_tiles)
        uses = [(False, False), (False, True)]
        if spec.m > m_block:
            uses.append((True, False))
        k_chunk = chunk_rows(spec.k, min(n_block, spec.n) * size)
        for (resident, stream), double_row in itertools.product(uses, row_modes(spec.dtype)):
            made = MatmulSchedule(
                x=Operand(load=x_load, chunk=x_rows(spec.m, spec.k, k_chunk)),
                w=Operand(
                    load=w_load, block=n_block, chunk=k_chunk, group=n_group, resident=resident,
                    stream=stream,
                ),
                k_order=chunk_order(spec.k, (x_load, w_load)),
                m_block=m_block,
                double_row=double_row,
            )  # fmt: skip
            if not stream or made.one_pass(spec):
                yield made


def data_flow(spec: MatmulSpec, schedule: MatmulSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    resident = ", loaded once" if schedule.w.resident else ""
    row = spec.out_layout == "row"
    moves = "x^T stationary, w moving" if row else "w stationary, x^T moving"
    panel = min(schedule.w.block, spec.n)
    return (
        f"x: {LOADED[schedule.x.load]}, {min(schedule.m_block, spec.m)} tokens at a time.",
        f"w: {LOADED[schedule.w.load]}, {panel} columns at a time{resident}.",
        f"product: {moves}; summed in PSUM over all of k.",
        f"epilogue: {'bias, ' if spec.bias else ''}{spec.activation}, while leaving PSUM.",
    )


def work(spec: MatmulSpec, schedule: MatmulSchedule, target: Target) -> Work:
    """Count what the engines do; see `Work`."""
    size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
    m, k, n = spec.m, spec.k, spec.n
    k_tiles, m_blocks = tiles(k, 128), tiles(m, schedule.m_block)
    tokens, panel = min(schedule.m_block, m), min(schedule.w.block, n)
    if spec.out_layout == "row":
        out_tiles, columns = tiles(m, 128) * tiles(n, min(512, panel)), min(512, panel)
        store_run, stores = panel * y_size, tiles(m, 128) * tiles(n, panel)
    else:
        out_tiles, columns = tiles(n, 128) * tiles(m, min(512, tokens)), min(512, tokens)
        store_run, stores = tokens * y_size, m_blocks * tiles(n, panel)
    matmuls = [(passes(k, schedule.w.chunk, schedule.double_row) * out_tiles, columns)]
    evictions = [(out_tiles, columns)]
    dmas: list[tuple[int, int, int, str]] = [(stores, m * n * y_size // stores, store_run, "copy")]
    k_chunks = tiles(k, schedule.w.chunk)
    at_once = schedule.w.chunk // 128 if schedule.k_order == "consecutive_rows" else 1
    w_times = 1 if schedule.w.resident else m_blocks
    loads = [
        (schedule.x.load, k * m * size, k_chunks * m_blocks,
         tokens * size * (at_once if tokens == m else 1), m),
        (schedule.w.load, k * n * size * w_times, k_chunks * tiles(n, panel) * w_times,
         panel * size * (at_once if panel == n else 1), n * w_times),
    ]  # fmt: skip
    for how, total, count, run, free in loads:
        if how == "tensor":
            squares = k_tiles * tiles(free, 128)
            matmuls.append((squares, 128))
            evictions.append((tiles(squares, 4), 512))
            pieces = k_chunks * tiles(free, 128)
            dmas.append((pieces, total // pieces, min(schedule.w.chunk, k) * size, "copy"))
        elif how == "dma":
            dmas.append((count, total // count, run, "transpose"))
        else:
            run = at_once * size if how == "strided" else run
            dmas.append((count, total // count, run, "copy"))
    first = min(schedule.w.chunk, k)
    return Work(
        matmuls=tuple(matmuls),
        evictions=tuple(evictions),
        dmas=tuple(dmas),
        lead_bytes=first * (tokens + panel) * size,
        tail_matmuls=(
            passes(first, first, schedule.double_row) * tiles(panel, columns),
            columns,
        ),
        tail_bytes=min(m, 128) * panel * y_size,
        instructions=sum(n[0] for n in matmuls)
        + sum(n[0] for n in evictions)
        + sum(n[0] for n in dmas),
    )


MATMUL = Family(
    name="matmul",
    spec_class=MatmulSpec,
    schedule_class=MatmulSchedule,
    folder="matmul",
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
