"""Decides whose code raised: the kernel's own, or the simulator's inside an NKI call."""

from __future__ import annotations

import os
import sys
import traceback

from nmm_compiler.errors import (
    InternalFaultError,
    KernelFailedError,
    SimulationError,
    simulator_fault,
)

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LONGEST_MESSAGE = 1000
_ELSEWHERE = frozenset({"numpy", "ml_dtypes", *sys.stdlib_module_names})


def failed(error: BaseException, what: str) -> InternalFaultError | SimulationError:
    """Return the catalogue error for an exception of the kernel's own code, or of ours.

    The innermost frame that is neither NumPy's nor the standard library's says whose code it was;
    the first of the simulator's after the kernel's last is the NKI function that was called.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _ELSEWHERE
    ]
    file, line, called = "", 0, None
    for frame, at in frames:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            file, line, called = frame.f_code.co_filename, at, None
        elif called is None:
            called = frame
    if not file or called is None or isinstance(error, ImportError):
        return KernelFailedError(f"{what}: {type(error).__name__}: {_message(error)}", file, line)
    code = called.f_code
    names = code.co_varnames[: code.co_argcount]
    shown = ", ".join(f"{n}={called.f_locals[n]!r:.90}" for n in names if n in called.f_locals)
    return simulator_fault(f"{code.co_name}({shown})", error, f"{file}:{line}")


def _message(error: BaseException) -> str:
    """Return the text of a kernel's own exception on one line; its `__str__` may raise as well."""
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # the kernel's own __str__, of any kind
        return f"(its message raised {type(second).__name__})"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."
