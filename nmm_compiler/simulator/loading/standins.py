"""The stand-in modules `nki`, `nki.language`, `nki.isa`, `nki.typing`, and `nki.jit`.

They exist once per process and never in `sys.modules`; the loader hands them to kernel files.
A name that the NKI API has and the simulator lacks raises an error that says so.
"""

from __future__ import annotations

from typing import Any

from nmm_compiler.errors import (
    EngineRuleError,
    UnsupportedInstructionError,
    closest,
)
from nmm_compiler.simulator.collectives import NAMES as COLLECTIVES
from nmm_compiler.simulator.isa import names as isa
from nmm_compiler.simulator.language import names as language
from nmm_compiler.simulator.loading.jit_kernel import (
    JitKernel,
    jit,
    run_kernels_with,
    simulate_kernel,
)
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


def _build() -> dict[str, StandIn]:
    nl = _module("nki.language", language.NAMES)
    nisa = _module("nki.isa", {**isa.NAMES, "NkiValidationError": EngineRuleError})
    constants = _module("nki.isa.constants", isa.CONSTANTS)
    typing = _module("nki.typing", {"tensor": _TensorType(), "mutable_tensor": _TensorType()})
    kinds = _module("nki.dtype", {k: v for k, v in language.NAMES.items() if isinstance(v, DType)})
    collectives = _module("nki.collectives", COLLECTIVES)
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
