"""The stand-in modules `nki`, `nki.language`, `nki.isa`, `nki.typing`, and `nki.jit`.

They exist once per process and never in `sys.modules`; the loader hands them to kernel files.
A name that the NKI API has and the simulator lacks raises an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import (
    EngineRuleError,
    UnsupportedInstructionError,
    closest,
)
from nmm_compiler.simulator.isa import names as isa
from nmm_compiler.simulator.language import names as language
from nmm_compiler.simulator.loading.jit_kernel import (
    JitKernel,
    jit,
    run_kernels_with,
    simulate_kernel,
)
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.loading.stand_in_module import StandIn
from nmm_compiler.simulator.loading.stand_in_module import module as _module
from nmm_compiler.simulator.machine import kernel_frame
from nmm_compiler.simulator.tensors.dtypes import DType


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
            "jit": jit, "simulate": simulate_kernel, "language": nl, "isa": nisa, "typing": typing,
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


__all__ = ["MODULES", "JitKernel", "StandIn", "find", "jit", "run_kernels_with"]
