"""`nki.collectives`: exchange between the ranks that `simulate_ranks` runs side by side.

A collective is an instruction as those of `nki.isa`, over lists of tensors. It waits until every
rank of its replica group has come with its sources; then each rank computes its own destinations
from all of them, in float32 where it reduces. It takes the time that is published for its bytes and
ranks (`collective_alone_us`), without the time to wait for late ranks. Of a rank's two programs
(LNC 2), each exchanges with the same program of the other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import KernelArgumentError
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import DMA_MEMORIES, Issue
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32
from nmm_compiler.simulator.loading.nki_object import NKIObject, dataclass
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.tensors.elements import mark, put
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Instruction
from nmm_compiler.targets.collective_time import collective_alone_us

Combine = Callable[[list[np.ndarray]], np.ndarray]
Group = tuple[int, ...]
_collective: Any = functools.partial(
    instruction, module="ncc", engines="dma", lists="srcs dsts", memory=DMA_MEMORIES,
    waits=True, exchanges=True, operands="srcs -> dsts",
)  # fmt: skip
_reducing: Any = functools.partial(
    _collective, operators={"op": Takes("reduce", ("add", "maximum", "minimum", "max", "min"))}
)


@dataclass
class ReplicaGroup(NKIObject):
    """Groups of ranks that exchange data, lists without overlap."""

    groups: Any = None


def _group(machine: Machine, op: str, replica_group: Any) -> Group:
    """Return the ranks of the own group of a collective."""
    lists = getattr(replica_group, "groups", replica_group)
    machine.need(
        isinstance(lists, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in lists),
        f"ncc.{op}: replica_group {replica_group!r:.60} must be a ReplicaGroup([[0, 1], ...])",
        KernelArgumentError,
    )
    members = [int(r) for g in lists for r in g]
    machine.need(
        len(set(members)) == len(members) and set(members) <= set(range(machine.ranks)),
        f"ncc.{op}: groups {lists!r:.80} of {machine.ranks} ranks; each rank is in one group at "
        "most, and the run has it: pass as many inputs to simulate_ranks",
        KernelArgumentError,
    )
    own = [group for group in lists if machine.rank in group]
    says = f"ncc.{op}: rank {machine.rank} is in no group of {lists!r:.80}"
    machine.need(own, says, KernelArgumentError)
    return tuple(int(r) for r in own[0])


def _exchange(
    call: Issue,
    combine: Combine,
    *,
    dim: int = 0,
    joins: bool = False,
    cut: bool = False,
    senders: Group | None = None,
    others: tuple[list[NkiTensor], ...] = (),
) -> Steps:
    """Check the tensors, and compute every destination from the sources of the senders.

    dim: the dimension along which parts are joined or cut. joins: a destination has the sources of
    all ranks side by side. cut: a rank gets its own part of each source, of as many parts as there
    are ranks.
    senders: the ranks that this one receives from, all of its group unless said. Who names senders
    sends one tensor. others: further sources of each destination.
    """
    machine, srcs, dsts = call.machine, call.arguments["srcs"], call.arguments["dsts"]
    call.need(
        len(srcs) == len(dsts),
        f"{len(srcs)} sources, {len(dsts)} destinations; make equal",
        KernelArgumentError,
    )
    memories = {t.memory for t in (*srcs, *dsts)}
    call.need(len(memories) == 1, "tensors in SBUF and in HBM; all in one of them")
    call.need(
        len(srcs) == 1 or (senders is None and memories == {"hbm"}),
        f"{len(srcs)} tensors; several go with HBM tensors of other collectives only",
    )
    ranks = _group(machine, call.op, call.arguments["replica_group"])
    count, place, size = len(ranks), ranks.index(machine.rank), 0
    pieces = count if cut else 1
    for src, dst in zip(srcs, dsts, strict=True):
        call.need(src.dtype == dst.dtype, f"src is {src.dtype}, dst {dst.dtype}; make equal")
        wanted = list(src.shape)
        call.need(wanted[dim] % pieces == 0, f"dimension {dim} does not divide by the ranks")
        wanted[dim] = wanted[dim] * (count if joins else 1) // pieces
        shape = tuple(wanted)
        call.need(dst.shape == shape, f"src {src.shape} makes {shape}, the shape of dst")
        size += max(src.size, dst.size) * src.dtype.item_bytes
    alone = collective_alone_us(size, count, machine.target) if count > 1 else None
    yield {"issuer": "sync", "dge_mode": "none", "collective_us": alone}
    if machine.options.ranks > 1:  # the others do not run
        return
    each = zip(srcs, *others, strict=True) if machine.data else ()
    sent = [[_sent(machine, source) for source in sources] for sources in each]
    what, key = f"ncc.{call.op} of ranks {ranks}", (machine.program_id, ranks, call.op)
    met = machine.programs.meet(machine, what, key, machine.rank, count, sent)
    givers = ranks if senders is None else senders
    for i, dst in enumerate(dsts if machine.data and givers else ()):
        every = (part for rank in givers for part in met[rank][i])
        values, masks, origins = zip(*every, strict=True)
        value, mask = (
            combine([np.split(part, pieces, axis=dim)[place % pieces] for part in parts])
            for parts in (values, masks)
        )
        put(dst, value, exact=value.dtype == dst.dtype.numpy)
        if any(origins):
            mark(dst, True, mask != 0, next(filter(None, origins)))


def _sent(machine: Machine, src: NkiTensor) -> tuple[np.ndarray, np.ndarray, str]:
    """Return what a rank sends of a source: values, the mask of unwritten elements among them, and
    where those were read first."""
    values = src.load().copy()
    noted, machine.poisoned = machine.poisoned, []
    mask, origin = noted[0][1:] if noted else (np.zeros(values.shape, np.bool_), "")
    return values, mask, origin


def _reduced(op: Any, parts: list[np.ndarray]) -> np.ndarray:
    if parts[0].dtype == np.bool_:
        return np.asarray(np.logical_or.reduce(parts))
    wide = (p if p.dtype.kind in "iu" else p.astype(F32) for p in parts)
    return np.asarray(functools.reduce(op.reduce, wide))


def _of_all(call: Issue, sbuf: tuple[int, ...] = (0,), cut: bool = False) -> Steps:
    """Exchange what is then reduced by `op`, or joined along collective_dim.

    sbuf: the dimensions that this may be in SBUF. cut: as of `_exchange`.
    """
    dim, op = call.arguments.get("collective_dim", 0), call.arguments.get("op")
    memory = call.arguments["srcs"][0].memory
    allowed = sbuf if memory == "sbuf" else (0,)
    choice = " or ".join(map(str, allowed))
    says = f"collective_dim={dim!r} of tensors in {memory.upper()}; it is {choice}"
    call.need(dim in allowed, says)
    join: Combine = functools.partial(np.concatenate, axis=dim)
    combine = join if op is None else functools.partial(_reduced, op)
    yield from _exchange(call, combine, dim=dim, joins=op is None, cut=cut)


@_reducing()
def all_reduce(
    call: Issue, srcs: Any, dsts: Any, replica_group: Any, op: Any, priority: Any = None
) -> Steps:
    """Every dst = the reduction of all ranks' srcs."""
    yield from _of_all(call)


@_collective()
def all_gather(
    call: Issue,
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    collective_dim: Any,
    priority: Any = None,
) -> Steps:
    """Every dst = all ranks' srcs, one after the other along collective_dim."""
    yield from _of_all(call, sbuf=(0, 1))


@_reducing()
def reduce_scatter(
    call: Issue,
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    collective_dim: Any,
    op: Any,
    priority: Any = None,
) -> Steps:
    """Write this rank's part, along collective_dim, of the reduction of all ranks' srcs to dst."""
    yield from _of_all(call, cut=True)


@_collective(memory=("hbm",))
def all_to_all(
    call: Issue,
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    collective_dim: Any,
    priority: Any = None,
) -> Steps:
    """Write part i of rank j's src as part j of rank i's dst, along collective_dim."""
    yield from _of_all(call, cut=True)


def _from_one(
    call: Issue, srcs: Any, dsts: Any, replica_group: Any, sender: Any, priority: Any
) -> Steps:
    """Send to a rank of the group; dst gets what the sender, if there is one, has sent."""
    senders = () if sender is None else (sender,)
    yield from _exchange(call, lambda parts: parts[0], senders=senders)


_permute = _collective(op="collective_permute", memory=("hbm",))(_from_one)
_turn = _collective(op="collective_permute_implicit")(_from_one)


def collective_permute(
    srcs: Any, dsts: Any, source_target_pairs: Any, priority: Any = None, name: Any = None
) -> Instruction | None:
    """Send src of each source to dst of its target; a dst that gets nothing is unchanged."""
    machine = current()
    routes = [(int(a), int(b)) for a, b in source_target_pairs]
    targets = {b: a for a, b in routes}
    machine.need(
        len({a for a, _ in routes}) == len(routes) == len(targets),
        f"ncc.collective_permute: pairs {routes}; a rank sends once and receives once",
        KernelArgumentError,
    )
    ranks = sorted({rank for route in routes for rank in route})
    if machine.rank not in ranks:
        return None
    return _permute(srcs, dsts, [ranks], targets.get(machine.rank), priority, name)


@_reducing(
    op="collective_permute_implicit_reduce",
    operands="srcs others -> dsts",
    lists="srcs others dsts",
)
def _turn_and_reduce(
    call: Issue, srcs: Any, others: Any, dsts: Any, replica_group: Any, sender: Any, op: Any,
    priority: Any,
) -> Steps:  # fmt: skip
    """Send srcs <op> others to a rank of the group, receive from the sender."""
    shapes = [[t.shape for t in tensors] for tensors in (srcs, others)]
    call.need(shapes[0] == shapes[1], "both sources must have one shape")
    combine = functools.partial(_reduced, op)
    yield from _exchange(call, combine, senders=(sender,), others=(others,))


def _before(op: str, replica_group: Any, steps: int = 1) -> int:
    """Return the rank that is some steps before this one in its ring."""
    machine = current()
    ranks = _group(machine, op, replica_group)
    return ranks[(ranks.index(machine.rank) - steps) % len(ranks)]


def _in_channels(
    issue: Any, given: Any, tensors: tuple[Any, ...], replica_group: Any, *rest: Any
) -> None:
    """Issue a ring's instruction for the lists of tensors of each channel.

    It sends to the ring's successor, and receives from the predecessor.
    """
    op, count = issue.__name__, len(tensors[-1])
    current().need(
        list(given) == list(range(count)) and all(len(each) == count for each in tensors),
        f"ncc.{op}: channel_ids={given!r} of {count} channels must be 0, 1, ...",
        KernelArgumentError,
    )
    for each in zip(*tensors, strict=True):
        issue(*each, replica_group, _before(op, replica_group), *rest)


def collective_permute_implicit(
    srcs_by_channel: Any, dsts_by_channel: Any, replica_group: Any, channel_ids: Any = (0,),
    priority: Any = None, name: Any = None,
) -> None:  # fmt: skip
    """Send src to the ring's successor, receive dst from the predecessor, in each channel."""
    _in_channels(
        _turn, channel_ids, (srcs_by_channel, dsts_by_channel), replica_group, priority, name
    )


def collective_permute_implicit_reduce(
    srcs0_by_channel: Any, srcs1_by_channel: Any, dsts_by_channel: Any, replica_group: Any, op: Any,
    channel_ids: Any = (0,), priority: Any = None, name: Any = None,
) -> None:  # fmt: skip
    """Send src0 <op> src1 to the ring's successor, receive the predecessor's, in each channel."""
    _in_channels(
        _turn_and_reduce, channel_ids, (srcs0_by_channel, srcs1_by_channel, dsts_by_channel),
        replica_group, op, priority, name,
    )  # fmt: skip


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: Any, replica_group: Any, channel_id: Any = 0, name: Any = None
) -> VirtualRegister:
    """Return the rank whose data a ring step processes: the own one first, then predecessors'."""
    op = "collective_permute_implicit_current_processing_rank_id"
    step = iteration_id.read() if isinstance(iteration_id, VirtualRegister) else int(iteration_id)
    return VirtualRegister(_before(op, replica_group, step))


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
