"""The base of all schedules: how operands arrive, and which schedules are legal.

A schedule says HOW a spec is computed. `KernelSchedule.check` checks it against the target; a
family declares its sizes, loads, PSUM banks and SBUF buffers, and adds its own checks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self, cast

from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels import warm_up
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.moving_tokens import best, ways
from nmm_compiler.kernels.number_formats import check_double_row
from nmm_compiler.kernels.spread_rows import in_loop, may_spread
from nmm_compiler.kernels.tiling import LOADED, LOADS, ORDERS, tiles, turned_loads
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

# Panels of weights that are loaded ahead: their time covers the start of a DMA many times over.
MOST_AHEAD = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand(Record):
    """How one operand of a kernel arrives. All sizes are in elements.

    load: how its contraction index gets onto the partitions: "rows" as it lies, "strided" element
        runs, "dma" a DMA transpose, "tensor" TensorE, "tensor8" TensorE without widening fp8;
        "none" for what is in SBUF already.
    block: columns in SBUF at a time. chunk: contraction rows per load. group: tiles of 128 outputs
        (512 where the weight moves) that are summed together.
    resident: loaded once for all tokens. stream: each chunk is used by one pass over the
        contraction, and so no panel stays in SBUF.
    """

    load: str = "rows"
    block: int = 128
    chunk: int = 128
    group: int = 1
    resident: bool = False
    stream: bool = False

    def arrives(self, columns: int) -> str:
        """Return how an operand of so many columns arrives, for headers."""
        once = ", loaded once" if self.resident else ""
        return f"{LOADED[self.load]}, {min(self.block, columns)} columns at a time{once}"


@functools.cache
def _operands_of(kind: Any) -> tuple[str, ...]:
    """Return the fields of a class of schedules that are operands."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.type == "Operand")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSchedule(Record):
    """Base of the schedules: HOW a spec is computed. All sizes are in elements unless named.

    k_order: which contraction rows share a partition: "consecutive_rows", "strided_rows", every
        128th, or "spread_rows": consecutive ones where they fill no whole tiles.
    m_block: tokens in SBUF at a time.
    x: how x arrives.
    own_queue: stores are issued by the sync engine, so that no load waits behind them; a target
        that writes descriptors on the device can, and the chooser sets it there.
    ahead: so many panels of weights are loaded before the results of the one before them are
        stored; the chooser sets what SBUF holds.
    moving: tokens of the last block that move past stationary weights, though the result comes out
        by rows: those beyond whole tiles, or 128 more; the chooser sets it.
    aside: operands, joined by "+", that arrive by the sync engine's queue, beside those before
        them, where it is own_queue's; steps of the search set it for small kernels.
    split: how two cores share the kernel: "tokens", "outputs" or "weights"; "" for one core. What
        the other fields count is what one core computes.
    """

    x: Operand
    k_order: str
    m_block: int
    own_queue: bool = False
    ahead: int = 0
    moving: int = 0
    aside: str = ""
    split: str = ""

    may_aside: ClassVar[tuple[str, ...]] = ()
    remedies: ClassVar[Mapping[str, str]]  # SBUF buffer -> the field that decides its size
    kept: ClassVar[Operand] = Operand(load="none")  # the intermediate
    kept_segment: ClassVar[Operand] = Operand(load="none", stream=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; aside, split and warm only where they are used."""
        made = super().to_dict()
        rare = ("aside", "split", "warm")
        return {name: value for name, value in made.items() if name not in rare or value}

    def operands(self) -> dict[str, Operand]:
        """Return how each operand arrives."""
        return {name: getattr(self, name) for name in _operands_of(cast(Any, type(self)))}

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the schedule with other values: {"m_block": 512, "u.block": 256}."""
        made = self
        for name, value in changes.items():
            field, _, inner = name.partition(".")
            if inner:
                value = dataclasses.replace(getattr(made, field), **{inner: value})
            made = dataclasses.replace(made, **{field: value})
        return made

    def settled(self, spec: Any) -> Self:
        """Return the schedule as the kernel of `spec` reads it.

        fp8 tiles are turned on TensorE as bfloat16: "tensor" is "tensor16".
        """
        changes: dict[str, Any] = {}
        if str(spec.dtype).startswith("float8"):
            plain_x = spec.x_format != spec.dtype
            turned = [
                name for name, operand in self.operands().items()
                if operand.load == "tensor" and not (plain_x and name == "x")
            ]  # fmt: skip
            changes = {f"{name}.load": "tensor16" for name in turned}
        for name in filter(None, self.aside.split("+")):
            if self.own_queue and getattr(self, name).load == "rows":
                changes[f"{name}.load"] = "aside"
        if self.moving:
            changes["moving"] = self.moving_tokens(spec)
        return self.changed(changes)

    def moving_tokens(self, spec: Any) -> int:
        """Return the tokens that move past stationary weights: at most those of the last block."""
        block = min(self.m_block, spec.m)
        last = spec.m - (tiles(spec.m, block) - 1) * block
        return min(self.moving, last) if last % 128 and self.by_rows(spec) else 0

    def by_rows(self, spec: Any) -> list[tuple[int, int]]:
        """Return (contraction, outputs) of products by rows whose tokens may move instead."""
        return []

    def ordered(self, spec: Any, target: Target) -> Self:
        """Return the schedule with its loads before its stores as far as the target allows it."""
        spec = spec.share(self.split)
        return dataclasses.replace(
            self,
            own_queue=target.dma_generates_descriptors,
            ahead=self.most_ahead(spec, target),
            moving=self.moving or best(spec.m, self.by_rows(spec), target),
        )

    def in_loop(self) -> Self | None:
        """Return the schedule with a loop on the device, None where there is none to have."""
        return None

    def loop_turns(self, spec: Any) -> list[tuple[int, Any]]:
        """Return (how often, spec of one turn) of a loop on the device; all once without it.

        Two turns do not overlap, so their times add up.
        """
        return [(1, spec)]

    def kind(self) -> tuple[Any, ...]:
        """Return the kind of the schedule: the best of each kind is tried first."""
        return (self.m_block,)

    def sizes(self, spec: Any) -> dict[str, int]:
        """Return field -> the size that it divides, of each field that counts elements."""
        raise NotImplementedError

    def over_k(self, spec: Any) -> tuple[str, ...]:
        """Return how x and the weights that multiply it are loaded: they share an order of rows."""
        raise NotImplementedError

    def psum_banks(self, spec: Any) -> dict[str, int]:
        """Return the field of each group of sums -> PSUM banks in use while it is summed."""
        raise NotImplementedError

    def sbuf_bytes(self, spec: Any) -> dict[str, int]:
        """Return bytes per partition of each SBUF buffer the kernel allocates, one copy each."""
        raise NotImplementedError

    def overlapped_bytes(self, spec: Any) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap."""
        raise NotImplementedError

    def short(self) -> str:
        """Return the blocks in a few words, for tables."""
        raise NotImplementedError

    def loads(self, spec: Any) -> dict[str, bool]:
        """Return each field with a way of loading -> whether its operand needs no transpose.

        It needs none if its contraction index is the outer one in HBM.
        """
        weights = _operands_of(cast(Any, type(self)))[1:]
        made = {f"{name}.load": spec.layout_of(name) == "row" for name in weights}
        return {"x.load": spec.x_layout == "col", **made}

    def fields_to_vary(self, spec: Any) -> tuple[str, ...]:
        """Return the fields whose values `steps` varies, those that matter most first."""
        sizes = list(self.sizes(spec))
        chunks = [name for name in sizes if name.endswith("chunk")]
        others = [name for name in sizes if name not in chunks]
        weights = [name for name in self.operands() if name != "x"] if spec.m > 128 else []
        residents = [f"{name}.resident" for name in weights]
        moving = ["moving"] if self.by_rows(spec) and spec.m % 128 else []
        early = self.own_queue and self.may_aside and spec.k > 256 and _plain(spec)
        aside = ["aside"] if early else []
        warm = warm_up.fields(self, spec)
        return (*chunks, *warm, *others, *moving, *self.psum_banks(spec), *residents, *aside)

    def steps(self, name: str, spec: Any) -> Iterator[Self]:
        """Yield schedules in which one field is somewhat smaller or larger, legal or not.

        Sizes are halved, doubled, and changed by half. Loads of x hold whole loads of weights.
        """
        now, sizes = attrgetter(name)(self), self.sizes(spec)
        if isinstance(now, bool):
            yield self.changed({name: not now})
            return
        if name == "aside":
            # with an operand on a queue of its own the loads of x may be shorter
            shorter = self._whole_loads(3 * self.x.chunk // 4)
            for names in self.asides():
                if names != now:
                    yield self.changed({name: names})
                    yield self.changed({name: names, "x.chunk": shorter})
            return
        if name == "warm":
            yield from map(self.changed, warm_up.changes(self, spec))
            return
        if name == "moving":
            yield from (
                self.changed({name: count}) for count in ways(spec.m) if count not in (0, now)
            )
            return
        if name not in sizes:  # tiles that are summed together
            yield from (self.changed({name: now + by}) for by in (-1, 1) if now + by)
            return
        whole = tiles(sizes[name], 128)
        count = min(tiles(now, 128), whole)
        for other in sorted({count // 2, 3 * count // 4, 3 * count // 2, 2 * count}):
            value = 128 * min(other, whole)
            value = self._whole_loads(value) if name == "x.chunk" else value
            if value in (0, now):
                continue
            changes = {name: value}
            if name.endswith("chunk") and name != "x.chunk":
                if self.x.chunk == now:  # both operands arrive alike
                    yield self.changed({name: value, "x.chunk": value})
                changes["x.chunk"] = value * tiles(self.x.chunk, value)
            yield self.changed(changes)

    def _whole_loads(self, rows: int) -> int:
        """Return rows of x that are whole loads of the first weight: so many, or somewhat fewer."""
        weight = next(operand for operand in self.operands() if operand != "x")
        each: int = getattr(self, "k_chunk", getattr(self, weight).chunk)
        return max(each, rows // each * each)

    def asides(self) -> Iterator[str]:
        """Yield which operands may arrive by the sync engine's queue."""
        lies = [name for name in self.may_aside if getattr(self, name).load == "rows"]
        for count in range(len(lies) + 1):
            yield from map("+".join, itertools.combinations(lies, count))

    def check(self, spec: Any, target: Target) -> None:
        """Raise CapacityError or SpecError, with numbers, unless legal for spec and target."""
        spec = spec.share(self.split)
        for name, whole in self.sizes(spec).items():
            value = attrgetter(name)(self)
            if value < 1 or (value % 128 and value < whole):
                raise SpecError(
                    f"schedule: {name} is {value}; pass a multiple of 128, or at least the whole "
                    f"{whole}"
                )
        banks = self.psum_banks(spec)
        for name in banks:
            if attrgetter(name)(self) < 1:
                raise SpecError(f"schedule: {name} is {attrgetter(name)(self)}; pass at least 1")
        for name, lies_right in self.loads(spec).items():
            dtype = spec.x_format if name == "x.load" else spec.dtype
            check_load(name, attrgetter(name)(self), lies_right, dtype, target)
        check_name("k_order", self.k_order, ORDERS)
        if self.moving and self.moving not in ways(spec.m):
            raise SpecError(
                f"schedule: moving is {self.moving}; of {spec.m} tokens pass {ways(spec.m)}"
            )
        known = set(self.aside.split("+")) <= {"", *self.may_aside}
        if self.aside and not (known and _plain(spec)):
            raise SpecError(
                f"schedule: aside is {self.aside!r}; it takes factors that are neither fp8 nor "
                f"widened, and of {', '.join(self.may_aside) or 'no operands'} some, joined by '+'"
            )
        if self.own_queue and not target.dma_generates_descriptors:
            raise SpecError(
                f"schedule: own_queue needs descriptors that the device writes, and {target.name} "
                "has none; drop own_queue"
            )
        if self.k_order == ORDERS[0] and not set(self.over_k(spec)) <= {"rows", "strided"}:
            raise SpecError(
                f"schedule: transposes give k_order {ORDERS[1]!r}; use it for both factors"
            )
        if self.k_order == ORDERS[2] and not may_spread(self, spec, target):
            raise SpecError(
                f"schedule: k_order is {ORDERS[2]!r}, which takes lowrank without base, norm of x, "
                "double rows and a loop, factors as they lie, and descriptors that the device "
                f"writes; pass {ORDERS[0]!r}"
            )
        self.check_own(spec, target)
        for group, count in banks.items():
            if count > target.psum_banks:
                raise CapacityError(
                    f"{spec.short()}: the sums of {group} need {count} PSUM banks, {target.name} "
                    f"has {target.psum_banks}; lower {group} from {attrgetter(group)(self)} or "
                    f"m_block from {self.m_block}"
                )
        self.check_sbuf(spec, target)

    def check_own(self, spec: Any, target: Target) -> None:
        """Raise SpecError for the rules that only this family has."""

    def check_multiple(self, name: str, of: str, whole: int) -> None:
        """Raise SpecError unless a field is a multiple of another one, or covers `whole`."""
        value, base = attrgetter(name)(self), attrgetter(of)(self)
        if value % base and value < whole:
            raise SpecError(
                f"schedule: {name} is {value}; pass a multiple of {of} = {base}, or at least "
                f"{whole}"
            )

    def check_sbuf(self, spec: Any, target: Target) -> None:
        """Raise CapacityError if one copy of every buffer does not fit; name what to lower."""
        remedies = self.remedies
        held = self.sbuf_bytes(spec)
        limit = target.sbuf_usable_bytes_per_partition
        if sum(held.values()) > limit:
            largest = max(held, key=lambda name: (name in remedies, held[name]))
            parts = ", ".join(f"{name} {size:,}" for name, size in held.items())
            field = remedies.get(largest, "")
            value = f"lower {field} from {attrgetter(field)(self)}" if field else "split the kernel"
            raise CapacityError(
                f"{spec.short()}: the schedule needs {sum(held.values()):,} B per SBUF partition "
                f"({parts}), {target.name} has {limit:,}; {value}"
            )
        if self.ahead > self.most_ahead(spec, target):
            raise CapacityError(
                f"{spec.short()}: ahead is {self.ahead}, and SBUF of {target.name}, {limit:,} B "
                f"per partition, holds {self.most_ahead(spec, target)} panels more than the one "
                "in use; lower ahead"
            )

    def most_ahead(self, spec: Any, target: Target) -> int:
        """Return how many panels can be in SBUF beside the one in use, at most MOST_AHEAD."""
        room = target.sbuf_usable_bytes_per_partition - self.overlapped_bytes(spec)
        if room < 0:
            return 0
        panel = self.panel_bytes(spec)
        return MOST_AHEAD if not panel else min(MOST_AHEAD, 1 + room // panel)

    def panel_bytes(self, spec: Any) -> int:
        """Return bytes per partition that one more panel of the last weights takes."""
        held = self.sbuf_bytes(spec)
        more = held.get("residual", 0)
        (last,) = [name for name in ("out", "v", "w") if name in held][:1]
        resident = last in self.operands() and getattr(self, last).resident
        base = held.get("w", 0) if last == "v" else 0  # beside a resident v its panels come too
        return more + base + (0 if resident else held[last])

    def with_copies(self, spec: Any, names: Iterable[str]) -> int:
        """Return the bytes per partition of every buffer, and of those named once more."""
        held = self.sbuf_bytes(spec)
        return sum(held.values()) + sum(held.get(name, 0) for name in names)

    def uses(self, *names: str) -> str:
        """Return which of these operands are resident, or stream, for `short`."""
        return "".join(
            f" {name}-{use}"
            for name in names
            for use in ("resident", "stream")
            if getattr(getattr(self, name), use)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopedSchedule(KernelSchedule):
    """Base of the schedules of one chain of products.

    m_loop: the blocks of tokens are a loop on the device, and the program holds one of them.
    k_segment: rows of k summed in PSUM at a time, 0 for all of them. The sums of several segments
        are added up in fp32 in SBUF.
    double_row: fp8 only, TensorE takes pairs of tiles of a contraction in one pass.
    """

    m_loop: bool = False
    k_segment: int = 0
    double_row: bool = False

    def in_loop(self) -> Self | None:
        """Return the schedule with its blocks of tokens as a loop on the device."""
        resident = {f"{name}.resident": False for name in self.operands()}
        changes = {"m_loop": True, "aside": "", "k_order": in_loop(self.k_order)}
        return self.changed(changes | resident | warm_up.left_out(self))

    def without_loop(self) -> Self:
        """Return the schedule without a loop on the device."""
        return self.changed({"m_loop": False})

    def loop_turns(self, spec: Any) -> list[tuple[int, Any]]:
        """Return (how often, spec of one block of tokens) of the loop, the rest last."""
        if not self.m_loop:
            return super().loop_turns(spec)
        blocks, rest = divmod(spec.m, self.m_block)
        made = [(blocks, self.so_many_turns(spec, 1))]
        return made + ([(1, dataclasses.replace(spec, m=rest))] if rest else [])

    def so_many_turns(self, spec: Any, count: int) -> Any:
        """Return the spec of the first turns of the loop."""
        return dataclasses.replace(spec, m=count * self.m_block)

    def segment(self, spec: Any) -> int:
        """Return rows of k summed in PSUM at a time, at most k."""
        return int(min(self.k_segment or spec.k, spec.k))

    def settled(self, spec: Any) -> Self:
        """Return the schedule as the kernel of `spec` reads it.

        In a loop on the device the address of x is known at run time, and its DMA transposes take
        16 rows: "dma16". Double rows are 16 elements apart: fewer tokens arrive "packed".
        """
        made = super().settled(spec).changed({"k_segment": self.segment(spec)})
        if self.double_row and spec.m < 16 and self.x.load == "rows":
            return made.changed({"x.load": "packed"})
        return made.changed({"x.load": "dma16"} if self.m_loop and self.x.load == "dma" else {})

    def check_own(self, spec: Any, target: Target) -> None:
        """Raise SpecError unless a loop on the device, and fp8 double rows, are possible.

        The loop needs two whole blocks of tokens, and each turn loads what it uses.
        """
        check_double_row(self.double_row, spec.x_format, target)
        if not self.m_loop:
            return
        if not target.device_loops:
            raise SpecError(
                f"schedule: m_loop needs loops on the device, and {target.name} has none"
            )
        if self.x.load == "dma" and not target.dma_transposes_in_loops:
            raise SpecError(
                "schedule: x.load is 'dma' in a loop on the device, and DMA transposes do not run "
                f"there on {target.name}; use 'tensor'"
            )
        resident = any(operand.resident for operand in self.operands().values())
        if resident or spec.m < 2 * self.m_block:
            raise SpecError(
                f"schedule: m_loop needs at least two whole blocks of {self.m_block} tokens, got "
                f"{spec.m} tokens, and no resident weights; lower m_block or drop what is resident"
            )


def _plain(spec: Any) -> bool:
    """Return whether factors arrive in the dtype that they have."""
    return not (spec.fp8 or getattr(spec, "wide", False))


def check_load(name: str, how: str, lies_right: bool, dtype: str, target: Target) -> None:
    """Raise SpecError unless `how` can load an operand; x alone may come in short runs.

    lies_right: its contraction index is the outer one in HBM.
    """
    check_name(name, how, LOADS)
    allowed = ["rows"] if lies_right else turned_loads(dtype, target)
    if name == "x.load" and not lies_right:
        allowed.append("strided")
    if how not in allowed:
        why = "as the operand lies" if lies_right else f"for {dtype} on {target.name}"
        raise SpecError(f"schedule: {name} is {how!r}; {why} it can be {' or '.join(allowed)}")
