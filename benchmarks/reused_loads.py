"""Repeated loads that a compiler might drop: a bound for Beta 1 kernels that others wrote.

Beta 1 kernels load inside of their innermost loops, and their compiler dropped loads as far as SBUF
allowed. How far is not documented, and this rule makes published times no better predicted, so the
simulator charges every load. A comparison with such a kernel takes the faster bound:

1. A tile is reusable when nothing fills it but loads of kernel inputs (and constants before them),
   and nothing writes it after its first reader.
2. A later tile with the same loads takes the earlier one's data, if SBUF can hold the earlier tile
   until then: at no instruction may the live tiles together pass half of it. Loads need the other
   half to run ahead of their readers; kept tiles that fill it cost more than they save.
3. A fill whose every byte is loaded over before a reader comes is dropped as dead.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nmm_compiler.simulator.timing.compiler import awaited_tiles
from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace
from nmm_compiler.targets import Target

Key = tuple[object, ...]


def without_repeated_loads(trace: Trace, target: Target) -> Trace:
    """Return the trace without the loads whose data an earlier tile still holds."""
    dropped = _reused_loads(trace, target)
    tiles = [i.writes[0].storage if i.writes else -1 for i in trace.instructions]
    same = {tiles[index]: tiles[source] for index, source in dropped.items() if index != source}

    def kept(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            dataclasses.replace(a, storage=same[a.storage]) if a.storage in same else a
            for a in accesses
        )

    instructions: list[Instruction] = []
    places = [0]  # of each instruction among those that stay
    for index, instruction in enumerate(trace.instructions):
        if index not in dropped:
            reads, writes = kept(instruction.reads), kept(instruction.writes)
            instructions.append(dataclasses.replace(instruction, reads=reads, writes=writes))
            instructions[-1].kind = instruction.kind
        places.append(len(instructions))
    ordered = [(places[first], places[stop]) for first, stop in trace.ordered]
    written = {a.storage: index for index, i in enumerate(instructions) for a in i.writes}
    used = {
        a.storage: index
        for index, i in enumerate(instructions) for a in (*i.reads, *i.writes)
    }  # fmt: skip
    allocations = {
        identity: dataclasses.replace(
            allocation, first_index=-1, last_index=used.get(identity, -1),
            last_write=written.get(identity, -1),
        )
        for identity, allocation in trace.allocations.items()
    }  # fmt: skip
    return dataclasses.replace(
        trace, instructions=instructions, allocations=allocations, ordered=ordered
    )


@dataclasses.dataclass
class _Tile:
    """An SBUF tile: the instructions that fill it, and whether only loads do."""

    writers: list[int] = dataclasses.field(default_factory=list)
    read: bool = False
    loads: int = 0
    pure: bool = True


def _reused_loads(trace: Trace, target: Target) -> dict[int, int]:
    """Return {index of a dropped instruction: that of the earlier one with the same result}.

    A dead fill is mapped to itself. Nothing is dropped in a kernel with loops on the device.
    """
    if trace.turns:
        return {}
    tiles = _tiles(trace)
    dropped: dict[int, int] = {}
    awaited = awaited_tiles(trace, target)
    live = _live_bytes(trace)
    limit = target.sbuf_usable_bytes_per_partition // 2
    kept: dict[Key, tuple[int, int]] = {}  # contents -> (storage, its last use so far)
    for identity, tile in tiles.items():
        if not tile.pure or not tile.loads or identity in awaited:
            continue
        allocation = trace.allocations[identity]
        dead = _dead_fills(trace, tile)
        dropped.update({index: index for index in dead})
        key = _contents(trace, tile, allocation)
        earlier, until = kept.get(key, (-1, -1))
        size = allocation.bytes_per_partition
        first, last = allocation.first_index, allocation.last_index
        if earlier < 0 or live[until + 1 : first].max(initial=0) + size > limit:
            kept[key] = identity, last
            continue
        # one tile instead of two: live in between, and once where both were
        live[until + 1 : first] += size
        live[first : min(until, last) + 1] -= size
        kept[key] = earlier, max(until, last)
        for index, source in zip(tile.writers, tiles[earlier].writers, strict=True):
            if index not in dead:
                dropped[index] = source
    return dropped


def _tiles(trace: Trace) -> dict[int, _Tile]:
    """Return the SBUF tiles that the compiler places, in the order of their first instruction."""
    written = {a.storage for i in trace.instructions for a in i.writes}
    tiles: dict[int, _Tile] = {}
    for index, instruction in enumerate(trace.instructions):
        sources = instruction.reads
        for access in [a for a in sources if a.memory == "sbuf"]:
            tiles.setdefault(access.storage, _Tile()).read = True
        for access in [a for a in instruction.writes if a.memory == "sbuf"]:
            tile = tiles.setdefault(access.storage, _Tile())
            tile.writers.append(index)
            load = (
                instruction.op in ("dma_copy", "dma_transpose")
                and len(sources) == 1
                and sources[0].memory == "hbm"
                and sources[0].storage not in written
                and not instruction.attributes.get("indirect")
            )
            tile.loads += load
            fills = load or (instruction.op == "memset" and not tile.loads)
            tile.pure &= fills and not tile.read and not instruction.after
    placed = {s for s, a in trace.allocations.items() if a.address is not None}
    return {s: tile for s, tile in tiles.items() if s not in placed}


def _live_bytes(trace: Trace) -> np.ndarray:
    """Return the SBUF bytes per partition that are live at each instruction."""
    change = np.zeros(len(trace.instructions) + 1, np.int64)
    for allocation in trace.allocations.values():
        if allocation.memory == "sbuf" and allocation.first_index >= 0:
            change[allocation.first_index] += allocation.bytes_per_partition
            change[allocation.last_index + 1] -= allocation.bytes_per_partition
    return np.cumsum(change)


def _contents(trace: Trace, tile: _Tile, allocation: Allocation) -> Key:
    """Return what a tile holds: its shape, and region by region where each came from.

    A constant is known by the kernel's line that fills it.
    """
    parts: list[object] = [allocation.shape, allocation.dtype]
    for index in tile.writers:
        instruction = trace.instructions[index]
        source: Key = (instruction.line,)
        if instruction.op != "memset":
            source = (instruction.reads[0].storage, *_region(instruction.reads[0]))
        parts.append((instruction.op, source, *_region(instruction.writes[0])))
    return tuple(parts)


def _region(access: Access) -> Key:
    return (
        access.partition_start, access.partition_stop, access.byte_start, access.pattern,
        access.dtype,
    )  # fmt: skip


def _dead_fills(trace: Trace, tile: _Tile) -> list[int]:
    """Return the fills of a tile whose bytes its loads, which do not overlap, cover."""
    writes = {index: trace.instructions[index].writes[0] for index in tile.writers}
    fills = [index for index in tile.writers if trace.instructions[index].op == "memset"]
    loads = [access for index, access in writes.items() if index not in fills]
    partitions = {(access.partition_start, access.partition_stop) for access in writes.values()}
    if len(partitions) > 1 or any(len(access.pattern) > 1 for access in loads):
        return []
    loaded = sum(access.byte_stop - access.byte_start for access in loads)
    return [i for i in fills if writes[i].byte_stop - writes[i].byte_start <= loaded]
