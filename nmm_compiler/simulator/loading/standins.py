"""The stand-in modules `nki`, `nki.language`, `nki.isa`, `nki.typing`, and `nki.jit`.

They exist once per process and never in `sys.modules`; the loader hands them to kernel files.
A name that the NKI API has and the simulator lacks raises an error that says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nmm_compiler.errors import OperandError, UnsupportedInstructionError, closest
from nmm_compiler.simulator.collectives import NAMES as COLLECTIVES
from nmm_compiler.simulator.isa import names as isa
from nmm_compiler.simulator.language.functions import NAMES as LANGUAGE
from nmm_compiler.simulator.machine import CURRENT, kernel_frame
from nmm_compiler.simulator.tensors.dtypes import DType


class StandIn(ModuleType):
    """A module whose missing names raise UnsupportedInstructionError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        file, line = kernel_frame()
        known = [n for n in self.__dict__ if not n.startswith("_")]
        raise UnsupportedInstructionError(
            f"{self.__name__}.{name} is not in the NKI API that the simulator has"
            f"{closest(name, known)}; see docs/simulator.md",
            file,
            line,
        )


def module(name: str, names: dict[str, Any]) -> StandIn:
    """Return the stand-in for module `name` with these names."""
    made = StandIn(name, f"Stand-in for {name} inside the simulator.")
    made.__dict__.update(names)
    made.__package__ = name
    made.__path__ = []
    return made


class JitKernel:
    """The result of `@nki.jit`: callable inside a simulation, launchable with a grid."""

    def __init__(self, function: Callable[..., Any], grid: int = 1) -> None:
        self.function = function
        self.grid = grid
        functools.update_wrapper(self, function, updated=())
        self.func = function

    def __getitem__(self, grid: Any) -> JitKernel:
        sizes = grid if isinstance(grid, tuple) else (grid,)
        return JitKernel(self.function, math.prod(map(int, sizes)))

    def launched(self, grid: Any) -> JitKernel:
        """Return the kernel with at least the programs of `grid`."""
        if isinstance(grid, tuple):
            return self[grid]
        return self if grid <= self.grid else JitKernel(self.function, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run: inline inside a simulation, else a simulation of its own."""
        if CURRENT.machine is None:
            return simulate_kernel(self)(*args, **kwargs)
        return self.function(*args, **kwargs)


def jit(function: Any = None, **options: Any) -> Any:
    """Mark a kernel; keyword options are for the device compiler and have no effect here."""
    if function is None:
        return lambda f: JitKernel(f)
    return function if isinstance(function, JitKernel) else JitKernel(function)


_RUNNERS: list[Callable[..., Any]] = []


def run_kernels_with(simulate: Callable[..., Any]) -> None:
    """Set the function that runs a kernel called outside of a simulation."""
    _RUNNERS[:] = [simulate]


def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Simulate a kernel; return the Simulation."""
    (simulate,) = _RUNNERS
    return simulate(kernel, *args, **kwargs)


def simulate_kernel(kernel: Any) -> Callable[..., Any]:
    """Return a callable that runs `kernel` here and returns its outputs (nki.simulate)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(kernel, *args, mode="functional", **kwargs)
        outputs: tuple[Any, ...] = result.outputs or ()
        return outputs[0] if result.single else outputs

    return call


class TensorType:
    """`nt.tensor[shape]` and `nt.mutable_tensor`: annotations."""

    def __init__(self, mutable: bool = False) -> None:
        self.mutable = mutable

    def __getitem__(self, shape: Any) -> TensorType:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> TensorType:
        """Return the annotation."""
        return self

    def __or__(self, other: Any) -> TensorType:
        return self

    __ror__ = __or__


def _build() -> dict[str, StandIn]:
    nl = module("nki.language", LANGUAGE)
    nisa = module("nki.isa", {**isa.NAMES, "NkiValidationError": OperandError})
    constants = module("nki.isa.constants", isa.CONSTANTS)
    typing = module("nki.typing", {"tensor": TensorType(), "mutable_tensor": TensorType()})
    kinds = module("nki.dtype", {k: v for k, v in LANGUAGE.items() if isinstance(v, DType)})
    collectives = module("nki.collectives", COLLECTIVES)
    nisa.__dict__["constants"] = constants
    experimental = module(
        "nki.experimental",
        {"fori_loop": LANGUAGE["fori_loop"], "while_loop": LANGUAGE["while_loop"]},
    )
    nki = module(
        "nki",
        {
            "jit": jit, "simulate": simulate_kernel, "language": nl, "isa": nisa, "typing": typing,
            "collectives": collectives, "experimental": experimental, "Kernel": JitKernel,
            "dtype": kinds,
        },
    )  # fmt: skip
    made = (nki, nl, nisa, constants, typing, collectives, experimental, kinds)
    return {known.__name__: known for known in made}


MODULES: dict[str, StandIn] = _build()


def find(name: str) -> StandIn:
    """Return the stand-in of a module name that starts with `nki`."""
    module = MODULES.get(name)
    if module is None:
        file, line = kernel_frame()
        raise UnsupportedInstructionError(
            f"module {name} is not in the NKI API that the simulator has"
            f"{closest(name, MODULES)}; see docs/simulator.md",
            file,
            line,
        )
    return module
