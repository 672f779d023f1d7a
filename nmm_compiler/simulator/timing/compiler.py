"""What a compiler is taken to do to a kernel before it runs: one step, each law with its source.

Kernels that leave such work to a compiler are others': ours load everything once and name their
engines. benchmarks/laws.py shows what each law is worth.

*Open work.* The documentation says only "the compiler selects the best engine". On trn1, profiles
of NKIBench (zhang677/AccelOpt) show copies and multiply-add on ScalarE (`Works.find`).

*Tiles through PSUM.* Where two inputs in SBUF take two passes (trn1), PSUM spares one. The profile
of NKIBench's adamw, a kernel without a tensor in PSUM, writes six tiles there for each set of six
tensor_tensor: those that ScalarE makes and one tensor_tensor reads.

*One buffer for a load.* On trn2 Beta 1's nl.matmul loads a right operand for one product into one
buffer: NKIBench's two norms with a product take 4,114 and 8,466 us (Joejoedesu/voyager-compiler),
four times as long as with loads that run ahead.

*Loads reused*, for those who ask for it (`simulate(..., loads="reused")`). Beta 1 kernels load
inside of their innermost loops, and their compiler dropped loads as far as SBUF allowed. How far is
not documented; this rule approximates it:

1. A tile is reusable when nothing fills it but loads of kernel inputs (and constants before them),
   and nothing writes it after its first reader.
2. A later tile with the same loads takes the earlier one's data, if SBUF can hold the earlier tile
   until then: at no instruction may the live tiles together pass half of it. Loads need the other
   half to run ahead of their readers; kept tiles that fill it cost more than they save.
3. A fill whose every byte is loaded over before a reader comes is dropped as dead.

A bf16 product on trn1, K 8192, M 4096, N 8192, with both loads innermost took 20,990 us (published
with ucb-bar/autocomp); this simulator says 23,160 as written and 16,795 reused.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace
from nmm_compiler.targets.base import Target

Key = tuple[object, ...]
_SCALAR_PAIRS = frozenset({("multiply", "add"), ("multiply", None), ("add", None)})


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler makes of a trace.

    dropped: index of an instruction that does not run -> that of the earlier one with the same
        result, itself if nothing reads its result.
    one_buffer: storages of a line that share one buffer.
    """

    dropped: dict[int, int]
    one_buffer: set[int]


def compiled(trace: Trace, target: Target) -> Compiled:
    """Return what the compiler is taken to make of a trace."""
    one_buffer = _awaited_tiles(trace, target)
    dropped = _reused_loads(trace, target, one_buffer) if trace.loads == "reused" else {}
    return Compiled(dropped, one_buffer)


def scalar_can(instruction: Instruction) -> bool:
    """Return whether the kernel left the engine open and ScalarE can run the instruction.

    ScalarE copies, multiplies by a number or a column, adds one, or does both.
    """
    attributes = instruction.attributes
    if not attributes.get("unset"):
        return False
    pair = attributes.get("function"), attributes.get("function1") or None
    return instruction.op == "tensor_copy" or pair in _SCALAR_PAIRS


class PassedOn:
    """Tiles that ScalarE makes for one tensor_tensor and the compiler puts into PSUM."""

    def __init__(self, trace: Trace, bank_bytes: int) -> None:
        """Find the SBUF tiles of at most `bank_bytes` that are written once and read once."""
        uses: dict[int, int] = {}
        found: list[int] = []
        for instruction in trace.instructions:
            for access in (*instruction.reads, *instruction.writes):
                uses[access.storage] = uses.get(access.storage, 0) + 1
            if instruction.op == "tensor_tensor":
                found += [access.storage for access in instruction.reads]
        sizes = trace.allocations
        self.candidates = {
            storage
            for storage in found
            if uses[storage] == 2
            and sizes[storage].memory == "sbuf"
            and sizes[storage].address is None
            and sizes[storage].bytes_per_partition <= bank_bytes
        }
        self.inside: set[int] = set()

    def timed(self, instruction: Instruction, on_scalar: bool) -> Instruction:
        """Return the instruction with its tiles where they are, as its cost sees them."""
        if on_scalar and instruction.writes[0].storage in self.candidates:
            self.inside.add(instruction.writes[0].storage)
        elif not any(access.storage in self.inside for access in instruction.reads):
            return instruction
        return dataclasses.replace(
            instruction,
            reads=tuple(map(self._moved, instruction.reads)),
            writes=tuple(map(self._moved, instruction.writes)),
        )

    def _moved(self, access: Access) -> Access:
        if access.storage not in self.inside:
            return access
        return dataclasses.replace(access, memory="psum")


def _awaited_tiles(trace: Trace, target: Target) -> set[int]:
    """Return the storages whose loads wait for the product that reads the tile before.

    A right operand of nl.matmul that is loaded for this one product has one buffer on trn2.
    """
    if not (trace.awaited and target.beta1_product_awaits_load):
        return set()
    found, readers = set(trace.awaited), dict.fromkeys(trace.awaited, 0)
    for instruction in trace.instructions:
        if instruction.engine != "dma":
            found.difference_update(access.storage for access in instruction.writes)
        for access in instruction.reads:
            if access.storage in readers:
                readers[access.storage] += 1
    return {storage for storage in found if readers[storage] == 1}


@dataclasses.dataclass
class _Tile:
    """An SBUF tile: the instructions that fill it, and whether only loads do."""

    writers: list[int] = dataclasses.field(default_factory=list)
    first_read: int = -1
    loads: int = 0
    pure: bool = True


def _reused_loads(trace: Trace, target: Target, one_buffer: set[int]) -> dict[int, int]:
    """Return {index of a dropped instruction: that of the earlier one with the same result}.

    A dead fill is mapped to itself. Nothing is dropped in a kernel with loops on the device.
    """
    if trace.loop_edges:
        return {}
    tiles = _tiles(trace)
    dropped: dict[int, int] = {}
    live = _live_bytes(trace)
    limit = target.sbuf_usable_bytes_per_partition // 2
    kept: dict[Key, tuple[int, int]] = {}  # contents -> (storage, its last use so far)
    for identity, tile in tiles.items():
        if not tile.pure or not tile.loads or identity in one_buffer:
            continue
        allocation = trace.allocations[identity]
        dead = _dead_fills(trace, tile)
        dropped.update({index: index for index in dead})
        key = _contents(trace, tile, allocation)
        earlier, until = kept.get(key, (-1, -1))
        size = allocation.bytes_per_partition
        first, last = allocation.first_index, allocation.last_index
        if earlier < 0 or not _holds(live, until, first, size, limit):
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
    inputs = _only_read(trace)
    tiles: dict[int, _Tile] = {}
    for index, instruction in enumerate(trace.instructions):
        for access in instruction.reads:
            if access.memory == "sbuf":
                tile = tiles.setdefault(access.storage, _Tile())
                if tile.first_read < 0:
                    tile.first_read = index
        for access in instruction.writes:
            if access.memory != "sbuf":
                continue
            tile = tiles.setdefault(access.storage, _Tile())
            tile.writers.append(index)
            sources = instruction.reads
            load = (
                instruction.op in ("dma_copy", "dma_transpose")
                and len(sources) == 1
                and sources[0].storage in inputs
                and not instruction.attributes.get("indirect")
            )
            tile.loads += load
            fills = load or (instruction.op == "memset" and not tile.loads)
            tile.pure &= fills and tile.first_read < 0 and not instruction.after
    placed = {s for s, a in trace.allocations.items() if a.address is not None}
    return {s: tile for s, tile in tiles.items() if s not in placed}


def _only_read(trace: Trace) -> set[int]:
    """Return the HBM tensors that the kernel reads and nothing writes."""
    read = {a.storage for i in trace.instructions for a in i.reads if a.memory == "hbm"}
    return read - {a.storage for i in trace.instructions for a in i.writes if a.memory == "hbm"}


def _live_bytes(trace: Trace) -> np.ndarray:
    """Return the SBUF bytes per partition that are live at each instruction."""
    change = np.zeros(len(trace.instructions) + 1, np.int64)
    for allocation in trace.allocations.values():
        if allocation.memory == "sbuf" and allocation.first_index >= 0:
            change[allocation.first_index] += allocation.bytes_per_partition
            change[allocation.last_index + 1] -= allocation.bytes_per_partition
    return np.cumsum(change)


def _holds(live: np.ndarray, until: int, first: int, size: int, limit: int) -> bool:
    """Return whether a tile last used at `until` may stay until `first`."""
    between = live[until + 1 : first]
    return not between.size or int(between.max()) + size <= limit


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
    """Return the fills of a tile that its loads cover byte by byte."""
    loaded: dict[Key, int] = {}
    spans: list[tuple[int, int]] = []
    for index in tile.writers:
        instruction = trace.instructions[index]
        access = instruction.writes[0]
        if instruction.op != "memset":
            if len(access.pattern) > 1:
                return []
            loaded[access.partition_start, access.partition_stop] = 1
            spans.append((access.byte_start, access.byte_stop))
    dead = []
    for index in tile.writers:
        instruction = trace.instructions[index]
        access = instruction.writes[0]
        if instruction.op == "memset":
            same = list(loaded) == [(access.partition_start, access.partition_stop)]
            if same and _covers(spans, access.byte_start, access.byte_stop):
                dead.append(index)
    return dead


def _covers(spans: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether byte ranges together hold start..stop."""
    reached = start
    for first, last in sorted(spans):
        if first > reached:
            return False
        reached = max(reached, last)
    return reached >= stop
