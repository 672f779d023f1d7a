"""The stand-in modules of Beta 1: `neuronxcc.nki`, its submodules, and torch_neuronx's nki_jit.

A name of the dialect that is missing raises an error when it is used. Kernel files import more than
the kernel needs. So private modules of the compiler and packages of the frameworks load as
placeholders, and only a call of one is refused, by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import UnsupportedInstructionError
from nmm_compiler.simulator.beta1 import instructions, kernel, language
from nmm_compiler.simulator.beta1.language import Allocator
from nmm_compiler.simulator.beta1.tensor import Tensor
from nmm_compiler.simulator.language.base import MemoryRegion, no_reorder, psum, sbuf, tile_size
from nmm_compiler.simulator.loading.standins import StandIn, TensorType, module
from nmm_compiler.simulator.machine import kernel_frame
from nmm_compiler.simulator.tensors.tensor import kind_of

FRAMEWORKS = frozenset(
    [
        "torch_neuronx",
        "torch_xla",
        "libneuronxla",
        "neuronx_distributed",
        "neuronx_distributed_inference",
        "jax",
        "jax_neuronx",
        "diffusers",
    ]
)
"""Packages that kernel files import and that need not be installed here."""


class Placeholder:
    """An absent module or object: it may be imported and passed on, but not called or read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refused(self) -> UnsupportedInstructionError:
        file, line = kernel_frame()
        return UnsupportedInstructionError(
            f"{self._name} is not part of the documented NKI Beta 1 API, or not installed here; "
            "the simulator has only the documented names",
            file,
            line,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a decorated function unchanged; refuse any other call."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator
        raise self._refused()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self._name}.{name}"
        return NKI_JIT.get(full) or Placeholder(full)

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Any:
        raise self._refused()

    def __bool__(self) -> bool:
        raise self._refused()


NKI_JIT = {
    "torch_neuronx.nki_jit": kernel.unchecked,
    "torch_neuronx.xla_impl.ops.nki_jit": kernel.unchecked,
}


def _tile_number(index: tuple[int, ...], tiles: Any) -> int:
    """Return the physical tile of a block: modulo the number of tiles in each dimension."""
    counts = tuple(tiles) or (1,) * len(index)
    return sum(
        (i % n) * math.prod(counts[d + 1 :])
        for d, (i, n) in enumerate(zip(index, counts, strict=True))
    )


def _modulo(region: MemoryRegion) -> Callable[..., Allocator]:
    def mod_alloc(
        *,
        base_addr: int = 0,
        base_bank: int = 0,
        base_partition: int = 0,
        num_bank_tiles: Any = (),
        num_par_tiles: Any = (),
        num_free_tiles: Any = (),
    ) -> Allocator:
        """Place block i in physical tile i modulo the number of tiles."""

        def place(index: tuple[int, ...], partitions: int, size: int) -> tuple[int, int, int]:
            bank = base_bank + _tile_number(index, num_bank_tiles) if region is psum else 0
            partition = base_partition + _tile_number(index, num_par_tiles) * partitions
            byte = base_addr + _tile_number(index, num_free_tiles) * size
            return bank, partition, byte

        return Allocator(region, place)

    return mod_alloc


def _own(region: MemoryRegion) -> Callable[..., Allocator]:
    def alloc(func: Callable[..., Any]) -> Allocator:
        """Place blocks where `func(index, partitions, bytes)` says."""
        return Allocator(region, func)

    return alloc


def _unchanged(function: Any = None, **options: Any) -> Any:
    """Return the kernel; the option is for the compiler's own passes."""
    return (lambda f: f) if function is None else function


def _compiler() -> dict[str, Any]:
    passes = ("enable_stack_allocator", "force_auto_alloc", "skip_middle_end_transformations")
    return {
        **dict.fromkeys(passes, _unchanged),
        **{region.value: _allocators(region) for region in (sbuf, psum)},
        "no_reorder": no_reorder, "allocation_scope": contextlib.nullcontext,
        "multi_buffer": lambda factor=2: contextlib.nullcontext(),
    }  # fmt: skip


def _allocators(region: MemoryRegion) -> StandIn:
    names = {"alloc": _own(region), "mod_alloc": _modulo(region), "auto_alloc": lambda: region}
    return module(f"neuronxcc.nki.compiler.{region.value}", names)


def _build() -> dict[str, StandIn]:
    prefix = "neuronxcc.nki"
    nl = module(f"{prefix}.language", language.NAMES)
    nisa = module(f"{prefix}.isa", instructions.NAMES)
    enums = {n: v for n, v in instructions.NAMES.items() if isinstance(v, type)}
    typing = module(
        f"{prefix}.typing",
        {"tensor": TensorType(), "mutable_tensor": TensorType(True),
         "mutable": TensorType(True)},
    )  # fmt: skip
    compiler = module(f"{prefix}.compiler", _compiler())
    nki = module(
        prefix,
        {
            "jit": kernel.jit, "trace": kernel.unchecked, "benchmark": kernel.benchmark,
            "baremetal": kernel.unchecked, "profile": kernel.unchecked,
            "simulate_kernel": kernel.simulate_kernel, "tensor": Tensor, "language": nl,
            "isa": nisa, "typing": typing, "compiler": compiler,
        },
    )  # fmt: skip
    constants = {"sizeinbytes": lambda dtype: kind_of(dtype).item_bytes, "tile_size": tile_size}
    made = [
        module("neuronxcc", {"nki": nki}), nki, nl, nisa, typing, compiler,
        module(f"{prefix}.isa.constants", enums),
        module(f"{prefix}.language.constants", constants),
        *(value for value in vars(compiler).values() if isinstance(value, StandIn)),
    ]  # fmt: skip
    found = {known.__name__: known for known in made}
    vars(nisa)["constants"] = found[f"{prefix}.isa.constants"]
    vars(nl)["constants"] = found[f"{prefix}.language.constants"]
    return found


MODULES: dict[str, StandIn] = _build()


def stands_in(name: str) -> bool:
    """Return whether an import of `name` gets a module of this file."""
    top = name.partition(".")[0]
    return top == "neuronxcc" or (top in FRAMEWORKS and importlib.util.find_spec(top) is None)


@functools.cache
def find(name: str) -> Any:
    """Return the stand-in of a module, or a placeholder for it."""
    return MODULES.get(name) or Placeholder(name)


def import_module(name: str, fromlist: Any) -> Any:
    """Return what `import name` or `from name import ...` binds."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent, child = find(".".join(parts[:end])), find(".".join(parts[: end + 1]))
        vars(parent).setdefault(parts[end], child)
    return find(name if fromlist else parts[0])
