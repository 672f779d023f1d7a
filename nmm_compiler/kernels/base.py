"""The base of kernel families: the spec, its tensors, and the bounds that its results must keep.

A KernelSpec says WHAT is computed: sizes, dtype, layouts, epilogue. It gives a float64 reference,
an error bound derived from dtype and contraction lengths, and the least work any kernel must do.
A Family binds a spec class to its NKI function and to the schedules that are worth trying.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from nmm_compiler.errors import CapacityError, ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.error_bounds import Array as Array, Estimate
from nmm_compiler.kernels.tiling import item_bytes as item_bytes, numpy_dtype as numpy_dtype
from nmm_compiler.kernels.work import Work
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3")
LAYOUTS = ("row", "col")
ACTIVATIONS = ("identity", "relu", "silu", "gelu", "gelu_tanh")

PACKAGE = "nmm_compiler.kernels"

MX_PRODUCT = "nc_matmul_mx"
"""The instruction that multiplies weights of MX blocks."""

# How two cores share a kernel: half of the tokens each, or half of every weight, with what both
# need of intermediates exchanged.
TOKENS, WEIGHTS = SPLITS = ("tokens", "weights")

# The same for experts: half of the groups each.
GROUPS = "groups"

# The same for attention: half of the heads of keys each, with the query heads that share them; or
# half of the query heads of each group, with the keys whole.
HEADS, QUERY_HEADS = "heads", "query_heads"

CORES = 1
"""Physical cores that a kernel runs on, unless two are asked for (lnc=2). What is predicted, or
decided by the passes and `compress`, for a target is for a logical core of this many, as the
runtime launches it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec(Record):
    """One operand: positional name in the kernel, shape as passed, dtype name.

    below: of an index, the number of groups that it chooses from; -1 chooses none. token_dim: the
    dimension that counts tokens, None for weights. mx: the weight of MX blocks whose data or scales
    it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int = 0
    token_dim: int | None = dataclasses.field(default=None, repr=False, compare=False)
    mx: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """Size in HBM."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


Products = tuple[tuple["KernelSpec", ...], tuple["KernelSpec", ...]]
"""The products of a kernel one by one, and the dense products that they replace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec(Record):
    """Base of the specs; subclasses add fields and override what is abstract here.

    lnc: physical cores of the logical core that runs the kernel, 1 or 2. Two share its work, as the
    schedule's `split` says.
    """

    lnc: int = CORES

    if TYPE_CHECKING:  # fields of every family, among its own in their order
        m: int
        dtype: str

    family: ClassVar[str] = ""
    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "n")  # the fields that must be positive
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    rare: ClassVar[tuple[str, ...]] = ("lnc",)  # fields that JSON leaves out where they are plain
    shared: ClassVar[str] = "tokens or outputs"  # that two cores halve
    signed: ClassVar[tuple[str, ...]] = ("scale", "norm_offset")  # numbers that may be negative
    many: ClassVar[bool] = False  # whether `reference` and the errors are tuples
    # Whether each token's result depends on that token alone: then a launch may pad or split them.
    splits_tokens: ClassVar[bool] = True

    tp = 1  # ranks that run the kernel together, each on its shard

    def __post_init__(self) -> None:
        """Raise ShapeError, SpecError or UnknownNameError for what no spec has in a field."""
        if self.lnc not in (1, 2) or isinstance(self.lnc, bool):
            raise SpecError(
                f"{self.family}: lnc is {self.lnc!r}; pass 1 or 2 physical cores of a logical one"
            )
        check_sizes(self.family, {name: getattr(self, name) for name in self.sizes})
        check_name("dtype", self.dtype, self.dtypes)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
            elif field.type == "float":
                value = float(value)
                least = "number of 0 or more" if field.name not in self.signed else "finite number"
                if not math.isfinite(value) or (value < 0 and field.name not in self.signed):
                    raise SpecError(f"{self.family}: {field.name} is {value!r}; pass a {least}")
            object.__setattr__(self, field.name, value)  # equal specs have equal JSON
            for one in value if isinstance(value, tuple) else (value,):
                if field.name in ("activation", "inner_activation"):
                    check_name(field.name, one, ACTIVATIONS)
                elif field.name.endswith("_layout"):
                    check_name(field.name, one, LAYOUTS)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; the rare ones only where they are not plain."""
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        made = super().to_dict().items()
        return {name: v for name, v in made if name not in self.rare or v != plain[name]}

    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Return the ways in which the cores can share the work; one core has the way ""."""

    def on_cores(self, lnc: int) -> Self:
        """Return the spec for so many physical cores; for one where they cannot share it."""
        shared = dataclasses.replace(self, lnc=lnc)
        return shared if shared.splits() else dataclasses.replace(self, lnc=1)

    @property
    def layer(self) -> Any:
        """What all cores compute together, as schedules and kernels read it."""
        return self

    def share(self, split: str) -> Any:
        """Return what one of the cores computes; all of it for one core."""
        if self.lnc > 1 and split not in self.splits():
            raise SpecError(
                f"{self.short()}: split is {split!r}; {self.lnc} cores can share it by "
                f"{', '.join(self.splits()) or 'nothing: an odd number of tokens or outputs'}"
            )
        return self.layer if self.lnc == 1 else self.half(split)

    @abstractmethod
    def half(self, split: str) -> Any:
        """Return the share of one of two cores."""

    def whole(self) -> Self:
        """Return the spec of what all ranks compute together; itself for a kernel of one."""
        return self

    def exchanged_bytes(self) -> int:
        """Return the bytes of each rank that a collective of the kernel sums over the ranks."""
        return 0

    def shards(self, *arrays: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the operands of each rank, from those of the whole."""
        return (arrays,)

    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the positional operands of the kernel, as they are passed."""

    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the results of the kernel."""

    def result_layouts(self) -> tuple[str, ...]:
        """Return "row", tokens first, or "col" for each result."""
        return tuple("col" if one.token_dim else "row" for one in self.outputs())

    def flops(self) -> int:
        """Return multiplications and additions of the matrix products (2 per term)."""
        return sum(self.flops_by_dtype().values())

    @abstractmethod
    def flops_by_dtype(self) -> dict[str, int]:
        """Return the flops at the rate of each operand dtype."""

    @abstractmethod
    def estimates(self, arrays: tuple[Array, ...], typical: bool) -> Iterable[Estimate]:
        """Return float64 values before they are rounded to the result's dtype, with their errors.

        typical: the errors are those of independent roundings, else bounds. Sums are in fp32, and
        what is kept between two products is rounded once.
        """

    def laid(self, made: Iterable[Any]) -> Any:
        """Return results [m, n] laid out as their kernel gives them."""
        each = zip(made, self.result_layouts(), strict=True)
        results = tuple(y if way == "row" else np.ascontiguousarray(y.T) for y, way in each)
        return results if self.many else results[0]

    def reference(self, *arrays: Array) -> Any:
        """Return the exact result in float64 (nothing rounded in between)."""
        return self.laid(one.value for one in self.estimates(arrays, False))

    def error_bound(self, *arrays: Array) -> Any:
        """Return, per element, how far a right kernel may be from `reference`."""
        return self._errors(arrays, False)

    def typical_error(self, *arrays: Array) -> Any:
        """Return, per element, the error of a right kernel if roundings are independent.

        Its norm is what `codegen.check_against_float64` holds an error to.
        """
        return self._errors(arrays, True)

    def _errors(self, arrays: tuple[Array, ...], typical: bool) -> Any:
        made = self.estimates(arrays, typical)
        return self.laid(one.rounded(self.result_dtype).error for one in made)

    def check(self, target: Target) -> None:
        """Raise SpecError if the target cannot compute the spec with any schedule."""
        cores = target.physical_cores_per_logical_core
        if self.lnc > cores:
            raise SpecError(
                f"{self.short()}: lnc is {self.lnc}, and a logical core of {target.name} has "
                f"{cores} physical core{'s' * (cores > 1)}; pass lnc={cores}"
            )
        if not self.splits():
            raise SpecError(
                f"{self.short()}: two cores share even numbers of {self.shared}; pass lnc=1"
            )
        inputs = self.inputs()
        if any(one.dtype.startswith("float8") for one in inputs) and not target.float8_kernels:
            raise SpecError(
                f"{self.short()}: fp8 kernels are written for trn2 and trn3, whose TensorE "
                f"doubles its rate for them; {target.name} does not, use dtype bfloat16 there"
            )
        if any(one.below for one in inputs) and not target.dma_generates_descriptors:
            raise SpecError(
                f"{self.short()}: the device writes the DMA descriptors of chosen rows on trn2 and "
                f"trn3; {target.name} does not, so keep one weight for all tokens there"
            )
        blocks = {one.mx.format for one in inputs if one.mx is not None}
        if blocks and MX_PRODUCT in target.absent_instructions:
            other = "fp8" if target.float8_kernels else "bfloat16, multiplied out, in family matmul"
            raise SpecError(
                f"{self.short()}: {', '.join(blocks)} weights are multiplied by trn3, and "
                f"{target.name} has no such product; take {other}"
            )

    def as_products(self) -> Products:
        """Return specs that compute the same unfused: its products one by one, and dense."""
        return (self,), (self,)

    def notes(self) -> tuple[str, ...]:
        """Return remarks for people, e.g. that another form of the product is cheaper."""
        return ()

    def minimal_hbm_bytes(self) -> int:
        """Return the bytes that must cross HBM: every operand once, every result once."""
        return sum(t.bytes for t in (*self.inputs(), *self.outputs()))

    def roofline_us(self, target: Target) -> float:
        """Return the larger of TensorE time at peak and the time of the minimal HBM traffic."""
        compute = sum(
            flops / target.peak_flops_per_second(dtype)
            for dtype, flops in self.flops_by_dtype().items()
        )
        memory = self.minimal_hbm_bytes() / target.memory_bytes_per_second
        return 1e6 * max(compute, memory) / self.lnc

    @abstractmethod
    def short(self) -> str:
        """Return a name for tables and files: family, sizes, dtype."""

    @property
    def result_dtype(self) -> str:
        """The dtype of the results."""
        return self.dtype


def check_name(kind: str, value: object, known: tuple[str, ...]) -> None:
    """Raise UnknownNameError, with the closest name, unless `value` is one of `known`."""
    if value not in known:
        raise UnknownNameError(kind, value, known)


def check_sizes(owner: str, sizes: Mapping[str, object]) -> None:
    """Raise ShapeError unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{owner}: {name} is {value!r}; pass an integer of at least 1")


def check_arrays(spec: KernelSpec, arrays: tuple[Array, ...]) -> None:
    """Raise ShapeError unless the arrays have the shapes of the spec's inputs."""
    wanted = spec.inputs()
    if len(arrays) != len(wanted):
        names = ", ".join(t.name for t in wanted)
        raise ShapeError(f"{spec.short()} takes {len(wanted)} arrays ({names}), got {len(arrays)}")
    for tensor, array in zip(wanted, arrays, strict=True):
        if tuple(array.shape) != tensor.shape:
            raise ShapeError(
                f"{spec.short()}: {tensor.name} has shape {tuple(array.shape)}; pass {tensor.shape}"
            )


Axes = Mapping[str, tuple[Collection[Any], str]]
"""Of each axis of a schedule the values that it may have, and what to pass instead of others."""
TILES = range(128, 1 << 24, 128), "pass a multiple of 128"
FOURS_OF_H = (
    range(512, 1 << 24, 512),
    "MX products of h take whole 512s of its features, pass a multiple of 512",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Record):
    """Base of the schedules: what holds for a kernel without a loop over blocks of tokens.

    Subclasses have the axes, `sbuf_bytes` and `check`.
    """

    if TYPE_CHECKING:  # the last field of every family: how two cores share the kernel
        split: str = ""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The axes that the closed form tells apart badly: the best of each kind is simulated."""
        return (self.split,)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data, without those that are unset by default."""
        made = super().to_dict()
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in made.items() if value or value != defaults[name]}

    def short(self) -> str:
        """Return the axes that are set, for tables."""
        return " ".join(f"{name}={value}" for name, value in self.to_dict().items())

    def check_axes(self, axes: Axes) -> None:
        """Raise SpecError for an axis with a value that it may not have."""
        for name, (values, takes) in axes.items():
            value = getattr(self, name)
            if value not in values:
                raise SpecError(f"schedule: {name} is {value!r}; {takes}")

    def plan(self, spec: Any) -> Any:
        """Return what the NKI function reads as spec."""
        return spec

    @abstractmethod
    def sbuf_bytes(self, spec: Any) -> dict[str, int]:
        """Return bytes per partition of each SBUF buffer."""

    def in_loop(self, spec: Any, target: Target) -> Self:
        """Return the schedule with its blocks in a loop on the device; itself without blocks."""
        return self

    def turns(self, spec: Any) -> int | None:
        """Return the turns of the loop on the device, the expected ones where data bounds it.

        None where there is no loop.
        """
        (turns, _), *_ = self.loop_turns(spec)
        return turns if turns > 1 else None

    def loop_turns(self, spec: Any) -> list[tuple[int, Any]]:
        """Return (how often, spec of one turn) of the loop on the device; all is one without."""
        return [(1, spec)]

    def check_sbuf(self, name: str, spec: Any, target: Target, remedy: str) -> None:
        """Raise CapacityError unless SBUF holds every buffer; name: of the kernel."""
        held, limit = self.sbuf_bytes(spec), target.sbuf_usable_bytes_per_partition
        if sum(held.values()) > limit:
            parts = ", ".join(f"{name} {size:,}" for name, size in held.items())
            raise CapacityError(
                f"{name}: the schedule needs {sum(held.values()):,} B per SBUF partition "
                f"({parts}), {target.name} has {limit:,}; {remedy}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kernel family: a spec class, a schedule class, an NKI function, and how they connect.

    candidates: schedules that may be legal, the likely ones first. work: see Work. data_flow: at
    most five lines for the header of the emitted file. All of them take what one core computes.
    """

    spec_class: type[Any]
    schedule_class: type[Any]
    candidates: Callable[[Any, Target], Iterator[Any]]
    work: Callable[[Any, Any], Work]
    data_flow: Callable[[Any, Any], tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name of the family, which its specs bear."""
        return str(self.spec_class.family)

    @property
    def folder(self) -> str:
        """The folder of the family; its kernel.py holds the NKI function of the same name."""
        return str(self.spec_class.__module__).split(".")[-2]

    def arguments(self, spec: Any, schedule: Any) -> dict[str, Any]:
        """Return the NKI function's parameters beside operands."""
        return {"spec": schedule.plan(spec.share(schedule.split)), "schedule": schedule}

    def schedules(self, spec: Any, target: Target) -> Iterator[Any]:
        """Yield schedules that may be legal, for each way in which cores can share the work."""
        for split in spec.splits():
            for schedule in self.candidates(spec.share(split), target):
                yield dataclasses.replace(schedule, split=split) if split else schedule

    @property
    def path(self) -> Path:
        """The file of the NKI function."""
        return Path(__file__).parent / self.folder / "kernel.py"
