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
        known = [n for n in self.__dict__ if not n.startswith("_")]
        raise UnsupportedInstructionError(
            f"{self.__name__}.{name} is not in the NKI API that the simulator has"
            f"{closest(name, known)}; see docs/simulator.md",
            *kernel_frame(),
        )


def modules_of(table: dict[str, dict[str, Any]]) -> dict[str, StandIn]:
    """Return the stand-ins of modules with these names, each also an attribute of the one above."""
    made: dict[str, StandIn] = {}
    for name, names in table.items():
        module = made[name] = StandIn(name, f"Stand-in for {name} inside the simulator.")
        module.__dict__.update(names, __package__=name, __path__=[])
        owner, _, short = name.rpartition(".")
        if owner:
            made[owner].__dict__[short] = module
    return made


class JitKernel:
    """The result of `@nki.jit`: callable inside a simulation, launchable with a grid."""

    def __init__(self, function: Callable[..., Any], grid: int = 1) -> None:
        self.function = self.func = function
        self.grid = grid
        functools.update_wrapper(self, function, updated=())

    def __getitem__(self, grid: Any) -> JitKernel:
        sizes = grid if isinstance(grid, tuple) else (grid,)
        return JitKernel(self.function, math.prod(map(int, sizes)))

    def launched(self, grid: Any) -> JitKernel:
        """Return the kernel with a launch grid; its own is that of a grid of 1."""
        return self if grid == 1 else self[grid]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program of a simulation."""
        return self.function(*args, **kwargs)

    inline = run  # inside of another kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run: inline inside a simulation, else a simulation of its own."""
        if CURRENT.machine is None:
            return simulate_kernel(self)(*args, **kwargs)
        return self.inline(*args, **kwargs)


def decorator(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a decorator, written with options or without; those are for the device's compiler."""

    def decorate(function: Any = None, **options: Any) -> Any:
        return make if function is None else make(function)

    return decorate


jit = decorator(lambda function: function if isinstance(function, JitKernel)
                else JitKernel(function))  # fmt: skip
RUNNERS: list[Callable[..., Any]] = []
"""The function that runs a kernel called outside of a simulation: `simulate`, which adds itself."""


def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Simulate a kernel; return the Simulation."""
    return RUNNERS[0](kernel, *args, **kwargs)


def simulate_kernel(kernel: Any) -> Callable[..., Any]:
    """Return a callable that runs `kernel` here and returns its outputs (nki.simulate)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(kernel, *args, mode="functional", **kwargs)
        outputs: tuple[Any, ...] = result.outputs or ()
        return outputs[0] if result.single else outputs

    return call


class tensor:  # noqa: N801  (the name NKI gives it)
    """`nt.tensor[shape]`: an annotation."""

    def __class_getitem__(cls, shape: Any) -> Any:
        return cls


class mutable_tensor(tensor):  # noqa: N801
    """`nt.mutable_tensor`: that of a parameter which the kernel writes."""


TYPING = {"tensor": tensor, "mutable_tensor": mutable_tensor, "mutable": mutable_tensor}
MODULES = modules_of(
    {
        "nki": {"jit": jit, "simulate": simulate_kernel, "Kernel": JitKernel},
        "nki.language": LANGUAGE,
        "nki.isa": {**isa.NAMES, "NkiValidationError": OperandError},
        "nki.isa.constants": isa.CONSTANTS,
        "nki.typing": TYPING,
        "nki.collectives": COLLECTIVES,
        "nki.experimental": {name: LANGUAGE[name] for name in ("fori_loop", "while_loop")},
        "nki.dtype": {k: v for k, v in LANGUAGE.items() if isinstance(v, DType)},
    }
)


def find(name: str) -> Any:
    """Return the stand-in of a module name that starts with `nki`; a missing one is refused."""
    return functools.reduce(getattr, name.split(".")[1:], MODULES["nki"])
