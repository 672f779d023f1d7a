"""The base of kernel families: the spec, its tensors, and the bounds that its results must keep.

A KernelSpec says WHAT is computed: sizes, dtype, layouts, epilogue. It gives a float64 reference,
an error bound derived from dtype and contraction lengths, and the least work any kernel must do.
A Family binds a spec class to its NKI function and to the schedules that are worth trying.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.tiling import item_bytes as item_bytes
from nmm_compiler.kernels.tiling import numpy_dtype as numpy_dtype
from nmm_compiler.kernels.work import Work
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3")
LAYOUTS = ("row", "col")
ACTIVATIONS = ("identity", "relu", "silu", "gelu", "gelu_tanh")

PACKAGE = "nmm_compiler.kernels"

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec(Record):
    """One operand: positional name in the kernel, shape as passed, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

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
    """Base of the specs; subclasses add fields and override what is abstract here."""

    family: ClassVar[str] = ""
    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "n")  # the fields that must be positive
    # Whether each token's result depends on that token alone: then a launch may pad or split them.
    splits_tokens: ClassVar[bool] = True

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the positional operands of the kernel, as they are passed."""
        raise NotImplementedError

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the results of the kernel."""
        raise NotImplementedError

    def result_layouts(self) -> tuple[str, ...]:
        """Return "row", tokens first, or "col" for each result."""
        return (str(getattr(self, "out_layout", "row")),)

    def flops(self) -> int:
        """Return multiplications and additions of the matrix products (2 per term)."""
        raise NotImplementedError

    def flops_by_dtype(self) -> dict[str, int]:
        """Return the flops at the rate of each operand dtype; they sum to `flops`."""
        return {self._dtype(): self.flops()}

    def reference(self, *arrays: Array) -> Any:
        """Return the exact result in float64 (nothing rounded in between)."""
        raise NotImplementedError

    def error_bound(self, *arrays: Array) -> Any:
        """Return, per element, how far a right kernel may be from `reference`."""
        raise NotImplementedError

    def typical_error(self, *arrays: Array) -> Any:
        """Return, per element, the error of a right kernel if roundings are independent.

        Its norm is what `codegen.check_against_float64` holds an error to. A family without it
        is held to the norm of its bound.
        """
        return self.error_bound(*arrays)

    def check(self, target: Target) -> None:
        """Raise SpecError if the target cannot compute the spec with any schedule."""
        if self._dtype().startswith("float8") and not target.float8_kernels:
            raise SpecError(
                f"{self.short()}: fp8 kernels are written for trn2 and trn3, whose TensorE "
                f"doubles its rate for them; {target.name} does not, use dtype bfloat16 there"
            )

    def parts(self) -> tuple[tuple[KernelSpec, tuple[str, ...]], ...]:
        """Return specs that compute the results one by one, each with the operands it takes.

        Empty for most families. A spec of many results that no schedule makes legal on a target is
        launched as its parts.
        """
        return ()

    def as_products(self) -> Products:
        """Return specs that compute the same unfused: its products one by one, and dense."""
        return (self,), (self,)

    def as_one_dense(self) -> KernelSpec | None:
        """Return one kernel that computes the same from dense weights, or None."""
        return None

    def notes(self) -> tuple[str, ...]:
        """Return remarks for people, e.g. that another form of the product is cheaper."""
        return ()

    @property
    def output(self) -> TensorSpec:
        """The single result."""
        (only,) = self.outputs()
        return only

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
        return 1e6 * max(compute, memory)

    def short(self) -> str:
        """Return a name for tables and files: family, sizes, dtype."""
        raise NotImplementedError

    def _dtype(self) -> str:
        return str(getattr(self, "dtype", "bfloat16"))


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


class Tensors(tuple[str, ...]):
    """Names of the operands that make up one tuple parameter of an NKI function.

    An emitted kernel takes each of them as an argument of its own.
    """

    __slots__ = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kernel family: a spec class, a schedule class, an NKI function, and how they connect.

    candidates: schedules that may be legal. work: see Work. gathered: tuple parameters of the NKI
    function, and how the names of the operands begin that make them up.
    data_flow: at most five lines for the header of the emitted file.
    """

    spec_class: type[Any]
    schedule_class: type[Any]
    candidates: Callable[[Any, Target], Iterator[Any]]
    work: Callable[[Any, Any, Target], Work]
    data_flow: Callable[[Any, Any], tuple[str, ...]]
    gathered: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the family, which its specs bear."""
        return str(self.spec_class.family)

    @property
    def folder(self) -> str:
        """The folder of the family; its kernel.py holds the NKI function of the same name."""
        return str(self.spec_class.__module__).split(".")[-2]

    def arguments(self, spec: Any, schedule: Any) -> dict[str, Any]:
        """Return the NKI function's parameters beside operands, and the operands that it
        gathers."""
        names = [tensor.name for tensor in spec.inputs()]
        gathered = {
            parameter: Tensors(name for name in names if name.startswith(start))
            for parameter, start in self.gathered.items()
        }
        return {"spec": spec, "schedule": schedule.settled(spec), **gathered}

    @property
    def path(self) -> Path:
        """The file of the NKI function."""
        return Path(__file__).parent / self.folder / "kernel.py"
