"""Decides whose code raised: the kernel's own, or the simulator's inside an NKI call."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from nmm_compiler.errors import (
    InternalFaultError,
    KernelFailedError,
    SimulationError,
    simulator_fault,
)
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LONGEST_MESSAGE = 1000
_ELSEWHERE = frozenset({"numpy", "ml_dtypes", *sys.stdlib_module_names})


def _own_fault(error: BaseException) -> InternalFaultError | None:
    """Return the error for an exception that the simulator's own code raised, else None.

    The innermost frame that is neither NumPy's nor the standard library's says whose code it was;
    the first of the simulator's after the kernel's last is the NKI function that was called.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _ELSEWHERE
    ]
    own = [frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in frames]
    users = [i for i, is_own in enumerate(own) if not is_own]
    if not users or not own or not own[-1]:
        return None
    (kernel, line), (called, _) = frames[users[-1]], frames[users[-1] + 1]
    code = called.f_code
    names = code.co_varnames[: code.co_argcount]
    shown = ", ".join(f"{n}={_short(called.f_locals[n])}" for n in names if n in called.f_locals)
    place = f"{kernel.f_code.co_filename}:{line}"
    return simulator_fault(f"{code.co_name}({shown})", error, place)


def _short(value: Any) -> str:
    """Return an argument in one line, tensors without their values."""
    if isinstance(value, NkiTensor):
        return f"<{value.name} {value.shape} {value.dtype} {value.memory}>"
    return f"{value!r:.60}"


def failed(error: BaseException, what: str) -> InternalFaultError | SimulationError:
    """Return the catalogue error for an exception of the kernel's own code, or of ours."""
    fault = None if isinstance(error, ImportError) else _own_fault(error)
    if fault is not None:
        return fault
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(_PACKAGE) and not f.filename.startswith("<")
    ]
    file, line = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
    return KernelFailedError(f"{what}: {type(error).__name__}: {_message(error)}", file, line)


def _message(error: BaseException) -> str:
    """Return the text of a kernel's own exception on one line; its `__str__` may raise as well."""
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # the kernel's own __str__, of any kind
        return f"(its message raised {type(second).__name__})"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."
