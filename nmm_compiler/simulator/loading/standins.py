"""The stand-in modules `nki`, `nki.language`, `nki.isa`, `nki.typing`, and `nki.jit`.

They exist once per process and never in `sys.modules`; the loader hands them to kernel files.
A name that the NKI API has and the simulator lacks raises an error that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nmm_compiler.errors import (
    EngineRuleError,
    UnsupportedInstructionError,
    closest,
)
from nmm_compiler.simulator.isa import names as isa
from nmm_compiler.simulator.language import names as language
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.machine import kernel_frame, running
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


def _module(name: str, names: dict[str, Any]) -> StandIn:
    module = StandIn(name, f"Stand-in for {name} inside the simulator.")
    module.__dict__.update(names)
    module.__package__ = name
    module.__path__ = []
    return module


class JitKernel:
    """What `@nki.jit` returns: callable inside a simulation, launchable with a grid."""

    def __init__(self, function: Callable[..., Any], grid: int = 1, schedule: Any = None) -> None:
        self.function = function
        self.grid = grid
        self.schedule = schedule
        functools.update_wrapper(self, function, updated=())
        self.func = function

    def __getitem__(self, grid: Any) -> JitKernel:
        sizes = grid if isinstance(grid, tuple) else (grid,)
        count = 1
        for size in sizes:
            count *= int(size)
        return JitKernel(self.function, count, self.schedule)

    def with_schedule(self, schedule: Any) -> JitKernel:
        """Return the kernel with scheduling hints, which do not change results."""
        return JitKernel(self.function, self.grid, schedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run: inline inside a simulation, else a simulation of its own."""
        if running() is None:
            return _simulate(self)(*args, **kwargs)
        return self.function(*args, **kwargs)


def jit(function: Any = None, **options: Any) -> Any:
    """Mark a kernel; keyword options are for the device compiler and have no effect here."""
    if function is None:
        return lambda f: JitKernel(f)
    return function if isinstance(function, JitKernel) else JitKernel(function)


_RUNNERS: list[Callable[..., Any]] = []


def run_kernels_with(simulate: Callable[..., Any]) -> None:
    """Hand in what a kernel runs with that is called outside of a simulation."""
    _RUNNERS[:] = [simulate]


def _simulate(kernel: Any) -> Callable[..., Any]:
    """Return a callable that runs `kernel` here and returns its outputs (nki.simulate)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        (simulate,) = _RUNNERS
        result = simulate(kernel, *args, mode="functional", **kwargs)
        outputs: tuple[Any, ...] = result.outputs or ()
        return outputs[0] if result.single else outputs

    return call


class _TensorType:
    """`nt.tensor[shape]`: an annotation without effect."""

    def __getitem__(self, shape: Any) -> _TensorType:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _TensorType:
        return self


def _collective(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        file, line = kernel_frame()
        raise UnsupportedInstructionError(
            f"nki.collectives.{name} needs several devices, which the simulator does not have",
            file,
            line,
        )

    call.__name__ = name
    return call


class ReplicaGroup(NKIObject):
    """A group of ranks, as data."""

    def __init__(self, groups: Any = None, *args: Any, **kwargs: Any) -> None:
        self.groups = groups


def _build() -> dict[str, StandIn]:
    nl = _module("nki.language", language.NAMES)
    nisa = _module("nki.isa", {**isa.NAMES, "NkiValidationError": EngineRuleError})
    constants = _module("nki.isa.constants", isa.CONSTANTS)
    typing = _module("nki.typing", {"tensor": _TensorType(), "mutable_tensor": _TensorType()})
    kinds = _module("nki.dtype", {k: v for k, v in language.NAMES.items() if isinstance(v, DType)})
    names = (
        "all_gather", "all_reduce", "all_to_all", "all_to_all_v", "collective_permute",
        "collective_permute_implicit", "collective_permute_implicit_reduce", "rank_id",
        "reduce_scatter", "reduce_scatter_tensor", "send_recv", "broadcast",
    )  # fmt: skip
    collectives = _module(
        "nki.collectives", {**{n: _collective(n) for n in names}, "ReplicaGroup": ReplicaGroup}
    )
    nisa.__dict__["constants"] = constants
    experimental = _module(
        "nki.experimental",
        {"fori_loop": language.NAMES["fori_loop"], "while_loop": language.NAMES["while_loop"]},
    )
    nki = _module(
        "nki",
        {
            "jit": jit, "simulate": _simulate, "language": nl, "isa": nisa, "typing": typing,
            "collectives": collectives, "experimental": experimental, "Kernel": JitKernel,
            "dtype": kinds,
        },
    )  # fmt: skip
    return {
        "nki": nki,
        "nki.language": nl,
        "nki.isa": nisa,
        "nki.isa.constants": constants,
        "nki.typing": typing,
        "nki.collectives": collectives,
        "nki.experimental": experimental,
        "nki.dtype": kinds,
    }


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


def beta_typing(name: str, direct: bool) -> Any:
    """Return what an import of `neuronxcc.nki.typing` gives: annotations only.

    Everything else of `neuronxcc.nki` is NKI beta 1, which the NKI compiler refuses since 0.4.
    """
    if name != "neuronxcc.nki.typing":
        file, line = kernel_frame()
        raise UnsupportedInstructionError(
            f"{name} is the API of NKI beta 1; port the kernel to `import nki` (see AWS's NKI "
            "migration guide)",
            file,
            line,
        )
    typing = MODULES["nki.typing"]
    if direct:
        return typing
    return _module("neuronxcc", {"nki": _module("neuronxcc.nki", {"typing": typing})})


__all__ = ["MODULES", "JitKernel", "beta_typing", "find", "jit", "run_kernels_with"]
