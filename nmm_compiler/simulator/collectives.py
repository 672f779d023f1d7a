"""`nki.collectives`: exchange between the ranks that `simulate_ranks` runs side by side.

A collective waits until every rank of its replica group has come with its sources; then each rank
computes its own destinations from all of them, in float32 where it reduces. It takes the time that
is published for its bytes and ranks (`collective_alone_us`), without the time to wait for late
ranks. Of a rank's two programs (LNC 2), each exchanges with the same program of the other ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from nmm_compiler.errors import KernelArgumentError
from nmm_compiler.simulator.isa.operands import (
    DMA_MEMORIES,
    Caller,
    check_destination,
    check_priority,
    operand,
)
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32, put
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.tensors.elements import mark
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Instruction
from nmm_compiler.targets.collective_time import collective_alone_us

_REDUCTION = Takes("reduce", ("add", "maximum", "minimum", "max", "min"))
Combine = Callable[[list[np.ndarray], int], np.ndarray]


class ReplicaGroup(NKIObject):
    """Groups of ranks that exchange data, lists without overlap."""

    groups: Any = None


@dataclasses.dataclass(frozen=True)
class _Move(Caller):
    """One collective of one rank: its name, its group in order, its (source, destination) pairs."""

    module = "ncc"
    machine: Machine
    op: str
    ranks: tuple[int, ...]
    pairs: tuple[tuple[NkiTensor, NkiTensor], ...] = ()

    def given(self) -> str:
        """Return the tensors and the ranks."""
        return f"{self.pairs!r:.200}, ranks {self.ranks}"

    @property
    def place(self) -> int:
        return self.ranks.index(self.machine.rank)

    def of(
        self, srcs: Any, dsts: Any, priority: Any, *, sbuf: bool = True, single: bool = False
    ) -> _Move:
        """Return the move of these tensors, checked. sbuf: they may be there; single: one pair."""
        for role, tensors in (("srcs", srcs), ("dsts", dsts)):
            self.need(
                isinstance(tensors, (list, tuple)) and len(tensors) > 0,
                f"{role} must be a list of tensors",
                KernelArgumentError,
            )
            for tensor in tensors:
                operand(self, role, tensor, DMA_MEMORIES)
        self.need(
            len(srcs) == len(dsts),
            f"{len(srcs)} sources, {len(dsts)} destinations; make equal",
            KernelArgumentError,
        )
        memories = {t.memory for t in (*srcs, *dsts)}
        self.need(len(memories) == 1, "tensors in SBUF and in HBM; all in one of them")
        self.need(sbuf or memories != {"sbuf"}, "this collective takes tensors in HBM only")
        self.need(
            len(srcs) == 1 or not (single or memories == {"sbuf"}),
            f"{len(srcs)} tensors; several go with HBM tensors of other collectives only",
        )
        check_priority(self, priority)
        pairs = tuple(zip(srcs, dsts, strict=True))
        for src, dst in pairs:
            check_destination(self, dst)
            self.need(src.dtype == dst.dtype, f"src is {src.dtype}, dst {dst.dtype}; make equal")
        return dataclasses.replace(self, pairs=pairs)

    def dimension(self, given: Any, sbuf: tuple[int, ...] = (), *, divides: bool = False) -> int:
        """Return collective_dim, checked. sbuf: allowed there; divides: by the ranks."""
        memory = self.pairs[0][0].memory
        allowed = sbuf if memory == "sbuf" else (0,)
        choice = " or ".join(map(str, allowed))
        says = f"collective_dim={given!r} of tensors in {memory.upper()}; it is {choice}"
        self.need(given in allowed, says)
        self.need(
            not divides or all(s.shape[given] % len(self.ranks) == 0 for s, _ in self.pairs),
            f"dimension {given} does not divide by the ranks",
        )
        return int(given)

    def exchange(
        self,
        combine: Combine,
        name: Any,
        *,
        grown: tuple[int, Fraction] = (0, Fraction(1)),
        local: tuple[NkiTensor, Combine] | None = None,
    ) -> Instruction:
        """Check shapes, record the collective, and compute every destination from all sources.

        grown: a dimension, and how many times as long it is in a destination as in its source.
        local: a tensor of this rank, and how its values are combined with the source that is sent.
        """
        machine, ranks, pairs = self.machine, len(self.ranks), self.pairs
        for src, dst in pairs:
            wanted = tuple(
                int(n * grown[1]) if d == grown[0] else n for d, n in enumerate(src.shape)
            )
            self.need(dst.shape == wanted, f"src {src.shape} makes {wanted}, the shape of dst")
        size = sum(max(s.size, d.size) * s.dtype.item_bytes for s, d in pairs)
        published = collective_alone_us(size, ranks, machine.target) if ranks > 1 else None
        machine.note(self.op, pairs, local, self.ranks)
        record = machine.record(
            self.op,
            "dma",
            tuple(s.access() for s in (*(s for s, _ in pairs), *(local or ())[:1])),
            tuple(d.access() for _, d in pairs),
            {
                "issuer": "sync", "dge_mode": "none", "transpose": False, "indirect": False,
                "collective_us": published,
            },
            name,
        )  # fmt: skip
        sent: Any = None
        if machine.data:
            sent = [_sent(machine, src) for src, _ in pairs]
            if local is not None:
                sent = [_reduced(sent[0], _sent(machine, local[0]), local[1])]
        if machine.options.ranks > 1:  # the others do not run
            return record
        what = f"ncc.{self.op} of ranks {self.ranks}"
        key = machine.program_id, self.ranks, self.op
        met = machine.programs.meet(machine, what, key, machine.rank, ranks, sent)
        for i, (_, dst) in enumerate(pairs if machine.data else ()):
            parts, masks, origins = zip(*(met[rank][i] for rank in self.ranks), strict=True)
            values = combine(list(parts), self.place)
            put(dst, values, exact=values.dtype == dst.dtype.numpy)
            if any(origins):
                spoilt = combine(list(masks), self.place) != 0
                mark(dst, True, spoilt, next(filter(None, origins)))
        return record


Sent = tuple[np.ndarray, np.ndarray, str]
"""Values, the mask of unwritten elements among them, and where those were read first."""


def _group(op: str, replica_group: Any) -> _Move:
    """Return the collective's own group of ranks."""
    machine = current()
    lists = getattr(replica_group, "groups", replica_group)
    alone = _Move(machine, op, ())
    alone.need(
        isinstance(lists, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in lists),
        f"replica_group {replica_group!r:.60} must be a ReplicaGroup([[0, 1], ...])",
        KernelArgumentError,
    )
    members = [int(r) for g in lists for r in g]
    alone.need(
        len(set(members)) == len(members) and set(members) <= set(range(machine.ranks)),
        f"groups {lists!r:.80} of {machine.ranks} ranks; each rank is in one group at most, "
        "and the run has it: pass as many inputs to simulate_ranks",
        KernelArgumentError,
    )
    own = [group for group in lists if machine.rank in group]
    alone.need(own, f"rank {machine.rank} is in no group of {lists!r:.80}", KernelArgumentError)
    return _Move(machine, op, tuple(int(r) for r in own[0]))


def _sent(machine: Machine, src: NkiTensor) -> Sent:
    """Return what a rank sends of a source."""
    values = src.load().copy()
    noted, machine.poisoned = machine.poisoned, []
    mask, origin = noted[0][1:] if noted else (np.zeros(values.shape, np.bool_), "")
    return values, mask, origin


def _reduced(one: Sent, other: Sent, reduce: Combine) -> Sent:
    """Return what a rank sends that reduces two of its own tensors first."""
    values, mask = reduce([one[0], other[0]], 0), reduce([one[1], other[1]], 0)
    return values, mask, one[2] or other[2]


def _reduction(move: _Move, op: Any) -> Combine:
    found = _REDUCTION.resolve(move, "op", op, "")
    assert found is not None

    def combine(parts: list[np.ndarray], place: int) -> np.ndarray:
        if parts[0].dtype == np.bool_:
            return np.asarray(np.logical_or.reduce(parts))
        wide = (p if p.dtype.kind in "iu" else p.astype(F32) for p in parts)
        return np.asarray(functools.reduce(found.reduce, wide))

    return combine


def all_reduce(
    srcs: Any, dsts: Any, replica_group: Any, op: Any, priority: Any = None, name: Any = None
) -> Instruction:
    """Every dst = the reduction of all ranks' srcs."""
    move = _group("all_reduce", replica_group).of(srcs, dsts, priority)
    return move.exchange(_reduction(move, op), name)


def all_gather(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: Any, priority: Any = None,
    name: Any = None,
) -> Instruction:  # fmt: skip
    """Every dst = all ranks' srcs, one after the other along collective_dim."""
    move = _group("all_gather", replica_group).of(srcs, dsts, priority)
    dim = move.dimension(collective_dim, (0, 1))
    grown = dim, Fraction(len(move.ranks))
    return move.exchange(lambda parts, _: np.concatenate(parts, axis=dim), name, grown=grown)


def reduce_scatter(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: Any, op: Any, priority: Any = None,
    name: Any = None,
) -> Instruction:  # fmt: skip
    """Write this rank's part, along collective_dim, of the reduction of all ranks' srcs to dst."""
    move = _group("reduce_scatter", replica_group).of(srcs, dsts, priority)
    dim = move.dimension(collective_dim, (0,), divides=True)
    reduce, ranks = _reduction(move, op), len(move.ranks)

    def combine(parts: list[np.ndarray], place: int) -> np.ndarray:
        return np.split(reduce(parts, place), ranks, axis=dim)[place]

    return move.exchange(combine, name, grown=(dim, Fraction(1, ranks)))


def all_to_all(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: Any, priority: Any = None,
    name: Any = None,
) -> Instruction:  # fmt: skip
    """Write part i of rank j's src as part j of rank i's dst, along collective_dim."""
    move = _group("all_to_all", replica_group).of(srcs, dsts, priority, sbuf=False)
    dim = move.dimension(collective_dim, divides=True)

    def combine(parts: list[np.ndarray], place: int) -> np.ndarray:
        own = [np.split(p, len(parts), axis=dim)[place] for p in parts]
        return np.concatenate(own, axis=dim)

    return move.exchange(combine, name)


def collective_permute(
    srcs: Any, dsts: Any, source_target_pairs: Any, priority: Any = None, name: Any = None
) -> Instruction | None:
    """Send src of each source to dst of its target; a dst that gets nothing is unchanged."""
    machine = current()
    routes = [(int(a), int(b)) for a, b in source_target_pairs]
    targets = {b: a for a, b in routes}
    if len({a for a, _ in routes}) < len(routes) or len(targets) < len(routes):
        raise machine.error(
            KernelArgumentError,
            f"ncc.collective_permute: pairs {routes}; a rank sends once and receives once",
        )
    ranks = sorted({rank for route in routes for rank in route})
    if machine.rank not in ranks:
        return None
    move = _group("collective_permute", [ranks])
    move = move.of(srcs, dsts, priority, sbuf=False, single=True)
    sender, kept = targets.get(machine.rank), move.pairs[0][1]

    def combine(parts: list[np.ndarray], place: int) -> np.ndarray:
        if sender is not None:
            return parts[move.ranks.index(sender)]
        return np.zeros(kept.shape, np.bool_) if parts[0].dtype == np.bool_ else kept.array().copy()

    return move.exchange(combine, name)


def _ring(
    op: str, srcs: Any, dsts: Any, replica_group: Any, channels: Any, priority: Any
) -> list[_Move]:
    """Return the move of each channel of a ring."""
    move = _group(op, replica_group)
    move.need(
        list(channels) == list(range(len(dsts))) and len(srcs) == len(dsts),
        f"channel_ids={channels!r} of {len(dsts)} channels must be 0, 1, ...",
        KernelArgumentError,
    )
    return [move.of(s, d, priority, single=True) for s, d in zip(srcs, dsts, strict=True)]


def _predecessor(parts: list[np.ndarray], place: int) -> np.ndarray:
    return parts[place - 1]


def collective_permute_implicit(
    srcs_by_channel: Any, dsts_by_channel: Any, replica_group: Any, channel_ids: Any = (0,),
    priority: Any = None, name: Any = None,
) -> None:  # fmt: skip
    """Send src to the ring's successor, receive dst from the predecessor, in each channel."""
    op = "collective_permute_implicit"
    for move in _ring(op, srcs_by_channel, dsts_by_channel, replica_group, channel_ids, priority):
        move.exchange(_predecessor, name)


def collective_permute_implicit_reduce(
    srcs0_by_channel: Any, srcs1_by_channel: Any, dsts_by_channel: Any, replica_group: Any, op: Any,
    channel_ids: Any = (0,), priority: Any = None, name: Any = None,
) -> None:  # fmt: skip
    """Send src0 <op> src1 to the ring's successor, receive the predecessor's, in each channel."""
    kind = "collective_permute_implicit_reduce"
    rings, others = (
        _ring(kind, srcs, dsts_by_channel, replica_group, channel_ids, priority)
        for srcs in (srcs0_by_channel, srcs1_by_channel)
    )
    for move, second in zip(rings, others, strict=True):
        (src, _), (other, _) = move.pairs[0], second.pairs[0]
        move.need(other.shape == src.shape, "both sources must have one shape")
        move.exchange(_predecessor, name, local=(other, _reduction(move, op)))


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: Any, replica_group: Any, channel_id: Any = 0, name: Any = None
) -> VirtualRegister:
    """Return the rank whose data a ring step processes: the own one first, then predecessors'."""
    move = _group("collective_permute_implicit_current_processing_rank_id", replica_group)
    step = iteration_id.read() if isinstance(iteration_id, VirtualRegister) else int(iteration_id)
    return VirtualRegister(move.ranks[(move.place - step) % len(move.ranks)])


def rank_id(name: Any = None) -> VirtualRegister:
    """Return the rank of this core as a register."""
    return VirtualRegister(current().rank)


NAMES: dict[str, Any] = {
    f.__name__: f
    for f in (
        all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute,
        collective_permute_implicit, collective_permute_implicit_reduce,
        collective_permute_implicit_current_processing_rank_id,
        rank_id, ReplicaGroup,
    )
}  # fmt: skip
