"""One call of an instruction, and the checks of its operands: dtype, address, hazards, target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    HazardError,
    KernelArgumentError,
    OperandError,
    SimulationError,
)
from nmm_compiler.simulator.isa import enums
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import INTEGERS
from nmm_compiler.simulator.tensors.elements import positions
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Access

SBUF = ("sbuf",)
PSUM = ("psum",)
ON_CHIP = ("sbuf", "psum")
DMA_MEMORIES = ("sbuf", "hbm")
INT32 = range(-(2**31), 2**31)
ANY_DTYPE: frozenset[str] = frozenset()
"""Of an operand that may have any dtype."""


class Issue:
    """One call of an instruction, until it is recorded.

    row: the instruction. arguments: by role, with operators resolved to `Operator`.
    engine: its name, "" until it is chosen.
    reads, writes: the regions of the operands.
    kept: mask of the inputs that it reads, None for all of them.
    move: what makes the result of elements of the only operand that it reads, if it moves those.
    """

    def __init__(self, machine: Machine, row: Any, arguments: dict[str, Any]) -> None:
        self.machine, self.row, self.arguments = machine, row, arguments
        self.op, self.name, self.engine = row.op, repr(row), ""
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.move: Callable[[np.ndarray], np.ndarray] | None = None
        self.kept: np.ndarray | None = None

    def given(self, rule: str) -> str:
        """Return a rule and the arguments that are not the defaults."""
        defaults = self.row.defaults
        shown = [(n, v) for n, v in self.arguments.items() if v is not defaults.get(n)]
        return f"{self.name}: {rule}; given " + ", ".join(f"{n}={v!r:.90}" for n, v in shown)

    def need(self, holds: object, rule: str, kind: type[SimulationError] = OperandError) -> None:
        """Refuse a call that breaks a rule; the message has the rule and what was given."""
        if not holds:
            raise self.machine.error(kind, self.given(rule))

    def should(self, holds: object, rule: str, kind: type[SimulationError] = OperandError) -> None:
        """Refuse such a call in strict mode; otherwise warn."""
        if not holds:
            self.machine.rule(kind, self.given(rule))

    def each(self, role: str) -> Sequence[Any]:
        """Return the operands of a role: one, or those of a list."""
        given = self.arguments[role]
        return given if role in self.row.lists else (given,)

    def tensors(self, roles: Iterable[str]) -> list[tuple[str, NkiTensor]]:
        """Return the operands among some roles that are tensors."""
        given = ((role, view) for role in roles for view in self.each(role))
        return [(role, view) for role, view in given if isinstance(view, NkiTensor)]

    def number(self, role: str, value: Any) -> float:
        """Return a compile-time number of the instruction's float32 field."""
        self.need(
            isinstance(value, (int, float, np.number, np.bool_)),
            f"{role} must be a compile-time number",
        )
        return float(value)

    def choose(self, default: str = "") -> str:
        """Choose the engine now: the one that the kernel gave, or the default."""
        allowed, given = self.row.engines, self.arguments.get("engine")
        name = default or allowed[0]
        if given not in (None, enums.engine.unknown):
            name = given._name_
        says = f"it cannot run on {name}; use {', '.join(allowed)} or leave engine unset"
        self.need(name in allowed, says)
        views = self.tensors(self.row.roles)
        self.need(
            name != "gpsimd" or all(view.memory != "psum" for _, view in views),
            "GpSimd cannot access PSUM; use the vector engine or copy to SBUF first",
        )
        self.engine = name
        return name

    def integer(self, role: str, value: Any, allowed: range = INT32) -> int:
        """Return a compile-time integer of the instruction's field, int32 unless said."""
        self.need(
            isinstance(value, (int, np.integer)),
            f"{role} is no compile-time integer",
            KernelArgumentError,
        )
        says = f"{role}={value} must be in {allowed.start}..{allowed.stop - 1}"
        self.need(int(value) in allowed, says, HazardError)
        return int(value)


def check_dtype(call: Issue, role: str, view: NkiTensor, allowed: frozenset[str]) -> None:
    """Check that the operand is of an allowed dtype."""
    says = f"{role} is {view.dtype}; use {' or '.join(sorted(allowed))}"
    call.should(view.dtype in allowed, says)


def member(call: Issue, role: str, given: Any, members: type[Enum]) -> Enum:
    """Return the member of an enumeration that a parameter means, or refuse it.

    None means `unknown`, or the first member where the enumeration has no such one.
    A member's value warns: NKI 0.3.0 refuses it, and production kernels of nki-library pass it.
    """
    if given is None:
        return members.__members__.get("unknown", next(iter(members)))
    known = [m for m in members if given.__class__ in (int, str) and m.value == given]
    name = f"nisa.{members.__name__}"
    says = f"{role} must be a member of {name}, such as {name}.{next(iter(members)).name}"
    call.need(known, says, KernelArgumentError)
    newer = f"NKI 0.3 and newer take {name}.{known[0].name}"
    call.machine.warn(f"{call.name}: {role}={given}; {newer}")
    return known[0]


def check_conversion(call: Issue, dst: NkiTensor, src: NkiTensor) -> None:
    """Refuse to convert x4-packed elements, each of which holds four numbers."""
    call.need(
        dst.dtype == src.dtype or "packed" not in (dst.dtype.kind, src.dtype.kind),
        "x4-packed elements are moved, not converted; make the dtypes equal",
    )


def indirect_operand(call: Issue, role: str, view: NkiTensor, allowed: Sequence[str]) -> None:
    """Check a view whose address is known at run time only; the call reads its index, too.

    allowed: the engines on which the operand may be a `.indirect()` view.
    """
    kind, index, chosen = view.indirection.kind, view.indirection.index, call.engine
    if chosen == "dma":
        mode, modes = call.arguments.get("dge_mode"), enums.dge_mode
        call.need(mode is not modes.none, "dge_mode.none takes no runtime address; leave it unset")
        call.need(
            kind != "vector" or (view.memory == "hbm" and mode is not modes.hwdge),
            "a tensor with a vector_offset must be in HBM, and takes no hwdge; leave dge_mode "
            "unset",
        )
    if kind != "columns" and index.__class__ is VirtualRegister:
        return
    where = f"the index of {role}, {index!r:.90},"
    call.need(
        index.__class__ is NkiTensor,
        f"{where} must be an SBUF tensor or a register",
        KernelArgumentError,
    )
    call.need(
        index.memory == "sbuf" and index.dtype in INTEGERS,
        f"{where} must be in SBUF and have an integer dtype; copy it first",
    )
    if kind == "scalar":
        call.need(index.size == 1, f"{where} must have one element")
    elif kind == "vector" and call.op != "dma_transpose":
        call.need(
            index.shape[1:] == (1,),
            f"{where} must have the shape ({view.shape[0]}, 1), one index per row",
        )
    elif kind == "columns":
        here, access = f"{role} is an .indirect() view", view.access()
        engines = " or ".join(allowed) or "no engine"
        call.need(chosen in allowed, f"{here}, which it takes on {engines}")
        call.need(
            not (role == "dst" and chosen == "scalar" and access.memory == "psum"),
            f"{here} in PSUM; on ScalarE a scattered dst must be in SBUF",
        )
        call.need(
            index.shape[0] == view.shape[0],
            f"{here}; its index {index!r:.90} needs {view.shape[0]} partitions",
        )
        start, first = index.access().partition_start, access.partition_start
        call.should(
            start % 32 == 0 and (role == "dst" or access.memory != "sbuf" or start == first),
            f"{here} from partition {first} on; its index starts at {start}: it must be a multiple "
            "of 32, the same for what is read of SBUF",
        )
    call.reads.append(index.access())


def _addresses(view: NkiTensor, unit: int) -> np.ndarray:
    """Return where each element of the view lies, in units of bytes: [P, elements, units]."""
    table, valid = positions(view)
    item = view.dtype.item_bytes
    return np.asarray((table[valid] * item)[..., None] + np.arange(0, item, unit))


def same_view(a: Any, b: Any) -> bool:
    """Return whether two views, or their runtime indices, are of the same elements."""
    if a.__class__ is not NkiTensor or b.__class__ is not NkiTensor:
        return a is b
    i, j = a.indirection, b.indirection
    places = [(v.storage, v.offset, v.geometry.dims, v.itemsize) for v in (a, b)]
    if places[0] != places[1] or i is None or j is None:
        return places[0] == places[1] and i is j
    return (i.kind, i.step) == (j.kind, j.step) and same_view(i.index, j.index)


def check_hazard(call: Issue, dst: NkiTensor, src: NkiTensor, streams: bool) -> None:
    """Refuse an instruction that overwrites an element before it reads it.

    streams: elements of src are read in the order in which those of dst are written, so that an
        identical view is safe. Engines other than DMAs read all partitions at once: what lies at or
        behind the reading position is safe to write, also by a reduction, which reads several
        elements before it writes one. DMAs move elements in no order.
    """
    in_order = streams and not call.op.startswith("dma_")
    if not (streams and same_view(dst, src)) and collide(call.machine, dst, src, in_order):
        places = f"from element {dst.offset} on over {src.get_pattern()} from {src.offset} on"
        says = f"it writes {dst.name!r} {places}, which it still has to read"
        call.should(False, f"{says}; write to another tensor", HazardError)


def collide(machine: Machine, dst: NkiTensor, other: NkiTensor, in_order: bool) -> bool:
    """Return whether two views share an element; in_order: one that dst takes too early."""
    a, b = dst.access(), other.access()
    if (
        dst.storage is not other.storage
        or a.byte_stop <= b.byte_start
        or b.byte_stop <= a.byte_start
        or a.partition_stop <= b.partition_start
        or b.partition_stop <= a.partition_start
    ):
        return False
    if (dst.is_indirect() or other.is_indirect()) and not machine.data:
        return False
    unit = min(dst.itemsize, other.itemsize)
    written, read = _addresses(dst, unit), _addresses(other, unit)
    steps, rest = divmod(read.shape[1], written.shape[1])
    if rest or not in_order:
        return bool(np.intersect1d(written, read).size)
    low, reads = min(written.min(), read.min()), read.shape[1]
    overwritten = np.full(max(written.max(), read.max()) - low + 1, reads)  # after which read
    last = np.arange(1, written.shape[1] + 1)[::-1] * steps - 1
    overwritten[written[:, ::-1] - low] = last[:, None]  # of several writes the first one counts
    return bool((overwritten[read - low] < np.arange(reads)[:, None]).any())
