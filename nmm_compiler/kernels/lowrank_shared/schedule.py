"""How a lowrank_shared kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.base import Family, KernelSchedule, Tensors, Work, item_bytes
from nmm_compiler.kernels.lowrank_shared.spec import LowRankSharedSpec, Output
from nmm_compiler.kernels.tiling import (
    LOADED,
    blocks,
    check_blocks,
    check_load,
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
class LowRankSharedSchedule(KernelSchedule):
    """How a lowrank_shared kernel runs.

    x_load, u_load, v_load: how x, every u and every v gets its contraction index onto the
        partitions: "rows" as it lies, "strided" element runs, "dma" a DMA transpose, "tensor"
        TensorE.
    k_order: which contraction rows share a partition: "p" consecutive ones, "t" every 128th.
    m_block: tokens whose intermediates stay in SBUF. k_chunk: contraction rows that all u use one
        after the other. x_chunk, u_chunk: rows per load of x, and of the widest u; narrower ones
        take more, for loads of about one size.
    r_group: rank tiles summed together in stage 1, counted through all u.
    v_block, v_chunk: columns in SBUF at a time, and rank rows per load, of each v.
    n_group: output tiles summed together in stage 2.
    u_resident, v_resident: loaded once for all tokens.
    v_still: stage 2 holds v still for "row" results too, where their sizes allow it.
    narrow_first: results with few columns are made first, which hides their short stores.
    """

    x_load: str
    u_load: str
    v_load: str
    k_order: str
    m_block: int
    k_chunk: int
    x_chunk: int
    u_chunk: int
    r_group: int
    v_block: int
    v_chunk: int
    n_group: int
    u_resident: bool = False
    v_resident: bool = False
    v_still: bool = False
    narrow_first: bool = False

    def u_chunks(self, spec: LowRankSharedSpec) -> tuple[int, ...]:
        """Return contraction rows per load of each u, in whole k_chunks."""
        most = self.k_chunk * tiles(spec.k, self.k_chunk)
        return tuple(min(most, self.u_chunk * (max(spec.ranks) // r)) for r in spec.ranks)

    def turns(self, spec: LowRankSharedSpec) -> tuple[int, ...]:
        """Return the results in the order in which they are made."""
        results = spec.results()
        order = range(len(results))
        return tuple(sorted(order, key=lambda j: results[j].n) if self.narrow_first else order)

    def still(self, y: Output) -> bool:
        """Say whether stage 2 holds v still for this result."""
        return y.layout == "col" or (self.v_still and self._turns(y))

    def _turns(self, y: Output) -> bool:
        """Say whether a "row" result can come out with v still: whole tiles, no bias."""
        panel = min(self.v_block, y.n)
        return panel % 128 == 0 and y.n % panel % 128 == 0 and not y.bias

    def sbuf_bytes(self, spec: LowRankSharedSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size = item_bytes(spec.dtype)
        k_tiles, tokens = tiles(spec.k, 128), min(self.m_block, spec.m)
        results = spec.results()
        if self.u_resident:
            u = k_tiles * sum(spec.ranks)
        else:
            chunks = zip(self.u_chunks(spec), spec.ranks, strict=True)
            u = sum(tiles(rows, 128) * min(128 * self.r_group, r) for rows, r in chunks)
        depths = [tiles(y.r, 128) for y in results]
        panels = [min(self.v_block, y.n) for y in results]
        if self.v_resident:
            v = sum(depth * y.n for depth, y in zip(depths, results, strict=True))
        else:
            v = max(depth * panel for depth, panel in zip(depths, panels, strict=True))
        still = [self.still(y) for y in results]
        held = {
            "x": k_tiles * tokens * size,
            "u": u * size,
            "p": sum(tiles(r, 128) for r in spec.ranks) * tokens * size,
            "v": v * size,
            "y": size * max(
                tiles(panel, 128) * tokens if turned else panel
                for panel, turned in zip(panels, still, strict=True)
            ),
        }  # fmt: skip
        biased = [y for y in results if y.bias]
        if biased:
            rows = [y for y in biased if y.layout == "row"]
            held["bias"] = sum(
                2 * y.n * size if y.layout == "row" else 6 * tiles(y.n, 128) for y in biased
            )
            if any(y.activation != "identity" for y in rows):
                held["sum"] = 512 * 4
        if "tensor" in (self.x_load, self.u_load):
            held["flat"] = min(max(*self.u_chunks(spec), self.x_chunk), spec.k) * size
        if self.v_load == "tensor":
            held["flat_v"] = min(self.v_chunk, max(spec.ranks)) * size
        return held

    def overlapped_bytes(self, spec: LowRankSharedSpec) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap."""
        held = self.sbuf_bytes(spec)
        several = tiles(spec.m, self.m_block) > 1
        streams = ["y", "sum", "flat", "flat_v"]
        streams += [] if self.u_resident else ["u"]
        streams += [] if self.v_resident else ["v"]
        streams += ["x"] if several else []
        return sum(held.values()) + sum(held.get(name, 0) for name in streams)

    def psum_banks(self, spec: LowRankSharedSpec) -> dict[str, int]:
        """Return PSUM banks in use in each stage."""
        m_tiles = tiles(min(self.m_block, spec.m), 512)
        turning = 2 if "tensor" in (self.x_load, self.u_load) else 0
        r_tiles = sum(tiles(r, 128) for r in spec.ranks)
        still = any(self.still(y) for y in spec.results())
        return {
            "stage 1": min(self.r_group, r_tiles) * m_tiles + turning,
            "stage 2": self.n_group * (m_tiles if still else 1)
            + (2 if self.v_load == "tensor" else 0),
        }

    def check(self, spec: LowRankSharedSpec, target: Target) -> None:
        """Raise SpecError or CapacityError, with the numbers, for a schedule that is not legal."""
        results = spec.results()
        sizes = {"m_block": spec.m, "k_chunk": spec.k, "x_chunk": spec.k, "u_chunk": spec.k}
        sizes |= {"v_block": max(y.n for y in results), "v_chunk": max(spec.ranks)}
        check_blocks(self, sizes, ("r_group", "n_group"))
        check_load("x_load", self.x_load, spec.x_layout == "col", spec.dtype, target, strided=True)
        check_load("u_load", self.u_load, spec.u_layout == "row", spec.dtype, target)
        check_load("v_load", self.v_load, spec.v_layout == "row", spec.dtype, target)
        check_multiple("x_chunk", self.x_chunk, "k_chunk", self.k_chunk, spec.k)
        check_multiple("u_chunk", self.u_chunk, "k_chunk", self.k_chunk, spec.k)
        check_order(self.k_order, (self.x_load, self.u_load))
        if self.v_still and (
            target.name == "trn1" or not any(y.layout == "row" and self._turns(y) for y in results)
        ):
            raise SpecError(
                "schedule: v_still takes a row result of whole tiles without a bias, trn2 or trn3; "
                f"v_block is {self.v_block}, target {target.name}, the results "
                + ", ".join(f"{y.n} {y.layout}{' bias' if y.bias else ''}" for y in results)
            )
        for stage, banks in self.psum_banks(spec).items():
            if banks > target.psum_banks:
                group = "r_group" if stage == "stage 1" else "n_group"
                raise CapacityError(
                    f"{spec.short()}: {stage} needs {banks} PSUM banks, {target.name} has "
                    f"{target.psum_banks}; lower {group} from {getattr(self, group)} or m_block "
                    f"from {self.m_block}"
                )
        self.check_sbuf(spec, target, _REMEDY)

    def short(self) -> str:
        """Return the blocks."""
        resident = "".join(f" {n}-resident" for n in ("u", "v") if getattr(self, f"{n}_resident"))
        return (
            f"m{self.m_block} r{self.r_group} v{self.v_block} k{self.k_chunk}{self.k_order} "
            f"u{self.u_chunk} r{self.v_chunk}{resident}{' v-still' if self.v_still else ''}"
            f"{' narrow-first' if self.narrow_first else ''}"
        )


# Which field of the schedule decides the size of a buffer.
_REMEDY = {"x": "m_block", "u": "u_chunk", "p": "m_block", "v": "v_block", "y": "v_block"}


def candidates(spec: LowRankSharedSpec, target: Target) -> Iterator[LowRankSharedSchedule]:
    """Yield schedules that may be legal, in no order."""
    size = item_bytes(spec.dtype)
    ways = turned_loads(spec.dtype, target)
    results = spec.results()
    r_tiles, widest = sum(tiles(r, 128) for r in spec.ranks), max(y.n for y in results)
    rows = [y for y in results if y.layout == "row"]
    stills = [False]
    if spec.m <= 64 and target.name != "trn1" and any(y.n % 128 == 0 and not y.bias for y in rows):
        stills.append(True)
    few = spec.m <= 128
    strips = (tiles(spec.k, 128) + r_tiles) * 512 * size  # of x and of the intermediates
    wide = strips > target.sbuf_usable_bytes_per_partition // 2
    for x_load, u_load, v_load, m_block in itertools.product(
        x_loads(spec.m, spec.x_layout, spec.dtype, target),
        ["rows"] if spec.u_layout == "row" else ways,
        ["rows"] if spec.v_layout == "row" else ways,
        blocks(spec.m, (128, 256, 512, 1024, 2048) if wide else (512, 1024, 2048)),
    ):
        m_tiles = tiles(min(m_block, spec.m), 512)
        banks = 6 if "tensor" in (x_load, u_load) else 8
        most = min(banks // m_tiles, r_tiles)
        if not most:
            continue
        groups = {most, tiles(r_tiles, tiles(r_tiles, most))}
        once = most == r_tiles and spec.m <= m_block  # every u is used by one pass
        for r_group, u_resident, v_block, v_still, v_resident, v_bytes in itertools.product(
            sorted(groups),
            (False,) if once else (False, True),
            blocks(widest, (512, 1024, 2048, 4096)),
            stills,
            (False, True) if spec.m > m_block else (False,),
            (4096, 8192) if few else (8192,),
        ):
            columns = sum(spec.ranks) if u_resident else min(128 * r_group, sum(spec.ranks))
            moving = bool(rows) and not v_still
            n_group = min(4, tiles(v_block, 512)) if moving else tiles(v_block, 128)
            room = 6 if v_load == "tensor" else 8
            n_group = min(n_group, room // m_tiles if len(rows) < len(results) else room)
            if v_still:
                n_group = max(1, min(room, tiles(v_block, 128)) // m_tiles)
            sizes = (4096, 8192, 16384) if few else (2048, 4096, 8192)
            chunks = {chunk_rows(spec.k, columns * size, wanted) for wanted in sizes}
            orders = {False, len({y.n for y in results}) > 1}
            for k_chunk, depth, narrow_first in itertools.product(
                sorted(chunks), (1,) if few else (1, 2), sorted(orders)
            ):
                yield LowRankSharedSchedule(
                    x_load=x_load,
                    u_load=u_load,
                    v_load=v_load,
                    k_order=chunk_order(spec.k, (x_load, u_load)),
                    m_block=m_block,
                    k_chunk=k_chunk,
                    x_chunk=x_rows(spec.m, spec.k, k_chunk),
                    u_chunk=depth * k_chunk,
                    r_group=r_group,
                    v_block=v_block,
                    v_chunk=chunk_rows(max(spec.ranks), min(v_block, widest) * size, v_bytes),
                    n_group=max(1, n_group),
                    u_resident=u_resident,
                    v_resident=v_resident,
                    v_still=v_still,
                    narrow_first=narrow_first,
                )


def parameters(
    spec: LowRankSharedSpec, schedule: LowRankSharedSchedule, target: Target
) -> dict[str, Any]:
    """Return the compile-time arguments of the NKI function."""
    results = spec.results()
    names = [tensor.name for tensor in spec.inputs()]
    starts = [0]
    for r in spec.ranks:
        starts.append(starts[-1] + tiles(r, 128))
    given: dict[str, Any] = {
        "us": Tensors(name for name in names if name.startswith("u")),
        "vs": Tensors(name for name in names if name.startswith("v")),
        "biases": Tensors(name for name in names if name.startswith("bias")),
        "m": spec.m,
        "k": spec.k,
        "ranks": spec.ranks,
        "starts": tuple(starts),
        "ns": tuple(y.n for y in results),
        "pair_of": tuple(y.pair for y in results),
        "bias_of": tuple(
            sum(before.bias for before in results[:j]) if y.bias else -1
            for j, y in enumerate(results)
        ),
        "activations": tuple(y.activation for y in results),
        "out_layouts": tuple(y.layout for y in results),
        "stills": tuple(schedule.still(y) for y in results),
    }
    given |= {"u_chunks": schedule.u_chunks(spec), "turns": schedule.turns(spec)}
    given["reorder"] = schedule.narrow_first
    held = schedule.to_dict()
    for name in ("v_still", "narrow_first", "u_chunk"):
        del held[name]
    return given | held


def data_flow(spec: LowRankSharedSpec, schedule: LowRankSharedSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    stills = [schedule.still(y) for y in spec.results()]
    second = "v still, p^T moving" if all(stills) else "p^T still, v moving"
    if any(stills) and not all(stills):
        second += ", or v still"
    return (
        f"x: {LOADED[schedule.x_load]}, read once, {min(schedule.m_block, spec.m)} tokens at a "
        "time.",
        f"stage 1: every u, {LOADED[schedule.u_load]}, still, {schedule.r_group} rank tiles at a "
        "time, x^T moving; (x u)^T kept in SBUF.",
        f"every v: {LOADED[schedule.v_load]}, {schedule.v_block} columns at a time"
        f"{', loaded once' if schedule.v_resident else ''}.",
        f"stage 2: {second}; bias and activation while leaving PSUM.",
    )


def work(spec: LowRankSharedSpec, schedule: LowRankSharedSchedule, target: Target) -> Work:
    """Count what the engines do; see `Work`."""
    size = item_bytes(spec.dtype)
    m, k, moves = spec.m, spec.k, tiles(spec.m, 512)
    moving, tokens = min(512, m), min(schedule.m_block, m)
    m_blocks, k_tiles = tiles(m, schedule.m_block), tiles(k, 128)
    r_tiles = sum(tiles(r, 128) for r in spec.ranks)
    matmuls = [(k_tiles * r_tiles * moves, moving)]
    evictions = [(r_tiles * moves, moving)]
    second: list[tuple[int, int]] = []
    dmas: list[tuple[int, int, int, str]] = []

    def loads(
        how: str, rows: int, columns: int, chunk: int, panel: int, run: int, times: int
    ) -> None:
        count = tiles(rows, chunk) * tiles(columns, panel) * times
        total = rows * columns * size * times
        if how == "tensor":
            squares = tiles(rows, 128) * tiles(columns, 128) * times
            matmuls.append((squares, 128))
            evictions.append((tiles(squares, 4), 512))
            count = count * tiles(panel, 128)
            run = min(chunk, rows) * size
        kind = "transpose" if how == "dma" else "copy"
        dmas.append((count, total // count, max(run, size), kind))

    x_deep = tiles(schedule.x_chunk, 128) if schedule.k_order == "p" else 1
    x_run = {"strided": x_deep * size}.get(
        schedule.x_load, tokens * size * (x_deep if tokens == m else 1)
    )
    loads(schedule.x_load, k, m, schedule.x_chunk, tokens, x_run, 1)
    for r, rows in zip(spec.ranks, schedule.u_chunks(spec), strict=True):
        at_once = tiles(rows, 128) if schedule.k_order == "p" else 1
        panel = r if schedule.u_resident else min(r, 128 * schedule.r_group)
        run = panel * size * (at_once if panel == r else 1)
        loads(
            schedule.u_load,
            k,
            r,
            rows,
            panel,
            run,
            1 if schedule.u_resident else m_blocks,
        )
    panel, results = 0, spec.results()
    for y in (results[j] for j in schedule.turns(spec)):
        panel = min(schedule.v_block, y.n)
        times = 1 if schedule.v_resident else m_blocks
        loads(schedule.v_load, y.r, y.n, schedule.v_chunk, panel, panel * size, times)
        if schedule.still(y):
            count, columns = tiles(y.n, 128) * moves, moving
            stores, run = m_blocks * tiles(y.n, panel), tokens * size
            if y.layout == "row":
                run = tiles(panel, 128) * size
        else:
            count, columns = tiles(m, 128) * tiles(y.n, 512), min(512, y.n)
            stores, run = tiles(m, 128) * tiles(y.n, panel), panel * size
        second.append((tiles(y.r, 128) * count, columns))
        evictions.append((count, columns))
        dmas.append((stores, m * y.n * size // stores, run, "copy"))
    matmuls += second
    single = m_blocks == 1
    return Work(
        matmuls=tuple(matmuls),
        evictions=tuple(evictions),
        dmas=tuple(dmas),
        lead_bytes=min(schedule.k_chunk, k) * (tokens + min(sum(spec.ranks), 128)) * size,
        tail_matmuls=(tiles(panel, 512), min(512, panel)),
        tail_bytes=min(m, 128) * panel * size,
        early_bytes=k * (sum(spec.ranks) + m) * size if single else 0,
        late_matmuls=tuple(second) if single else (),
        instructions=sum(n[0] for n in matmuls)
        + sum(n[0] for n in evictions)
        + sum(n[0] for n in dmas),
    )


LOWRANK_SHARED = Family(
    name="lowrank_shared",
    spec_class=LowRankSharedSpec,
    schedule_class=LowRankSharedSchedule,
    folder="lowrank_shared",
    candidates=candidates,
    parameters=parameters,
    work=work,
    data_flow=data_flow,
)
