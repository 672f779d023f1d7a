"""How a matmul kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import ClassVar

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import Family
from nmm_compiler.kernels.matmul.spec import MatmulSpec
from nmm_compiler.kernels.number_formats import (
    passes,
    pitch,
    row_modes,
    scale_bytes,
    sum_bytes,
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
    result_elements,
    tiles,
    turned_loads,
    turning,
    x_loads,
    x_rows,
)
from nmm_compiler.kernels.work import Tally, Work
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

    remedies: ClassVar[Mapping[str, str]] = {"x": "m_block", "w": "w.block", "flat": "w.chunk"}

    def sizes(self, spec: MatmulSpec) -> dict[str, int]:
        """Return field -> the size that it divides."""
        return {"m_block": spec.m, "w.chunk": spec.k, "x.chunk": spec.k, "w.block": spec.n}

    def over_k(self, spec: MatmulSpec) -> tuple[str, ...]:
        """Return how x and w are loaded."""
        return (self.x.load, self.w.load)

    def sbuf_bytes(self, spec: MatmulSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
        k_tiles = tiles(spec.k, 128)
        tokens, panel = min(self.m_block, spec.m), min(self.w.block, spec.n)
        rows = spec.out_layout == "row"
        held = {
            "x": k_tiles * pitch(tokens, self.double_row or self.x.load == "dma") * size,
            "w": (tiles(self.w.chunk, 128) if self.w.stream else k_tiles)
            * pitch(spec.n if self.w.resident else panel, self.double_row or self.w.load == "dma")
            * size,
            "y": result_elements(panel, tokens, rows=rows) * y_size,
        }
        if spec.bias:
            held["bias"] = bias_bytes(spec.n, y_size, rows=rows)
        if spec.fp8:
            held["scale"] = scale_bytes(spec.n, spec.scales, down=not rows)
        held |= sum_bytes(spec)
        if by_tensor(self.x.load, self.w.load):
            flat = flat_bytes(spec.dtype, self.x.load, self.w.load)
            held["flat"] = min(max(self.w.chunk, self.x.chunk), spec.k) * flat
        return held

    def overlapped_bytes(self, spec: MatmulSpec) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap."""
        streams = ["y", "sum", "flat"]
        m_blocks = tiles(spec.m, self.m_block)
        if not self.w.resident and (m_blocks > 1 or self.w.block < spec.n or self.w.stream):
            streams.append("w")
        if m_blocks > 1:
            streams.append("x")
        return self.with_copies(spec, streams)

    def one_pass(self, spec: MatmulSpec) -> bool:
        """Return whether one group of PSUM sums takes a whole panel of w, for all its tokens."""
        if spec.out_layout == "col":
            return self.w.block <= 128 * self.w.group
        return self.w.block <= 512 * self.w.group and min(self.m_block, spec.m) <= 128

    def psum_banks(self, spec: MatmulSpec) -> dict[str, int]:
        """Return PSUM banks in use while a group of outputs is summed."""
        m_tiles = 1 if spec.out_layout == "row" else tiles(min(self.m_block, spec.m), 512)
        return {"w.group": self.w.group * m_tiles + turning(self.x.load, self.w.load)}

    def check_own(self, spec: MatmulSpec, target: Target) -> None:
        """Raise SpecError for the rules that only matmul has."""
        self.check_multiple("x.chunk", "w.chunk", spec.k)
        self.check_modes(spec, target, m_loop=self.m_loop, double_row=self.double_row)
        if self.w.stream and (self.w.resident or not self.one_pass(spec)):
            raise SpecError(
                "schedule: w.stream needs one pass over k per panel of w; lower w.block from "
                f"{self.w.block} or m_block from {self.m_block}, and keep w not resident"
            )

    def short(self) -> str:
        """Return the blocks."""
        loop = " loop" if self.m_loop else ""
        double = " double-row" if self.double_row else ""
        blocks = f"n{self.w.block} k{self.w.chunk}"
        return f"m{self.m_block}{loop} {blocks} {self.k_order}{self.uses('w')}{double}"


def candidates(spec: MatmulSpec, target: Target) -> Iterator[MatmulSchedule]:
    """Yield schedules that may be legal, in no order."""
    size = item_bytes(spec.dtype)
    w_loads = ["rows"] if spec.w_layout == "row" else turned_loads(spec.dtype, target)
    loads = x_loads(spec.m, spec.x_layout, spec.dtype, target)
    m_blocks = blocks(spec.m, (128, 256, 512, 1024, 2048))
    n_blocks = blocks(spec.n, (128, 256, 512, 1024, 2048, 4096))
    for x_load, w_load, m_block, n_block in itertools.product(loads, w_loads, m_blocks, n_blocks):
        banks = free_banks(target, x_load, w_load)
        m_tiles = tiles(min(m_block, spec.m), 512)
        if m_tiles > banks:
            continue
        most = banks if tiles(spec.m, 128) == 1 else 4
        n_group = most if spec.out_layout == "row" else max(1, most // m_tiles)
        uses = [(False, False), (False, True)]
        if spec.m > m_block:
            uses.append((True, False))
        k_chunk = chunk_rows(spec.k, min(n_block, spec.n) * size)
        for (resident, stream), double_row in itertools.product(
            uses, row_modes(spec.dtype, target)
        ):
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
    row = spec.out_layout == "row"
    moves = "x^T stationary, w moving" if row else "w stationary, x^T moving"
    return (
        f"x: {LOADED[schedule.x.load]}, {min(schedule.m_block, spec.m)} tokens at a time.",
        f"w: {schedule.w.arrives(spec.n)}.",
        f"product: {moves}; summed in PSUM over all of k.",
        f"epilogue: {'bias, ' if spec.bias else ''}{spec.activation}, while leaving PSUM.",
    )


def work(spec: MatmulSpec, schedule: MatmulSchedule, target: Target) -> Work:
    """Count the work of the engines; see `Work`."""
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
    tally = Tally()
    tally.matmuls.append((passes(k, schedule.w.chunk, schedule.double_row) * out_tiles, columns))
    tally.evictions.append((out_tiles, columns))
    tally.store(m * n * y_size, stores, store_run)
    k_chunks = tiles(k, schedule.w.chunk)
    at_once = schedule.w.chunk // 128 if schedule.k_order == "consecutive_rows" else 1
    w_times = 1 if schedule.w.resident else m_blocks
    x_run = tokens * size * (at_once if tokens == m else 1)
    for how, count, run, free in (
        (schedule.x.load, k_chunks * m_blocks, x_run, m),
        (schedule.w.load, k_chunks * tiles(n, panel) * w_times,
         panel * size * (at_once if panel == n else 1), n * w_times),
    ):  # fmt: skip
        rows = min(schedule.w.chunk, k) * size
        turned = k_tiles * tiles(free, 128), k_chunks * tiles(free, 128), rows
        run = at_once * size if how == "strided" else run
        tally.load(how, k * free * size, count, run, turned)
    first = min(schedule.w.chunk, k)
    last = passes(first, first, schedule.double_row) * tiles(panel, columns)
    return tally.work(
        lead_bytes=first * (tokens + panel) * size,
        tail_matmuls=(last, columns),
        tail_bytes=min(m, 128) * panel * y_size,
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
