"""Compares a kernel's outputs with a user's function: `nmm simulate --reference FILE:fn`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmm_compiler.cli.models import foreign
from nmm_compiler.errors import ShapeError, UnknownNameError
from nmm_compiler.records import Record
from nmm_compiler.simulator.loading.loader import load_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement(Record):
    """One output against the reference: the largest error and the tolerance, as a share of the
    largest value of the reference; worst: the index of the largest error."""

    output: int
    error: float
    rtol: float
    worst: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.rtol

    def __str__(self) -> str:
        verdict = "agrees with" if self.passed else "DIFFERS from"
        return (
            f"output {self.output} {verdict} the reference: largest error {self.error:.3g} of the "
            f"largest value, tolerance {self.rtol:.3g}, at {list(self.worst)}"
        )


def default_rtol(outputs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> float:
    """Return eps of the coarsest type times sqrt of the longest dimension, the tolerance.

    A sum of K products of independent rounding errors is off by about eps sqrt(K); the longest
    dimension of an input is the longest sum that a kernel can make of it.
    """
    import ml_dtypes

    eps = max((float(ml_dtypes.finfo(a.dtype).eps) for a in (*outputs, *arrays) if _real(a)),
              default=0.0)  # fmt: skip
    longest = max((size for array in arrays for size in array.shape), default=1)
    return eps + float(np.finfo(np.float32).eps) * math.sqrt(longest) if eps else 0.0


def _real(array: np.ndarray) -> bool:
    return array.dtype.kind in "fV"


def reference_of(name: str, arguments: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """Return what FILE.py:function gives for the kernel's arguments.

    It is called by name if it has parameters of these names, else with the arrays in order. Raises
    FileError for what it raises.
    """
    file, colon, function = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        raise UnknownNameError("reference", name, ["FILE.py:function"])
    with foreign(file, "it raised"):
        module = vars(load_file(Path(file)))  # stand-ins: it may be in the kernel's file
    if not callable(module.get(function)):
        known = [name for name, value in module.items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function of {file}", function, known)
    copies = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    with foreign(file, f"{function}() raised"):
        if set(copies) <= set(inspect.signature(module[function]).parameters):
            result = module[function](**copies)
        else:
            result = module[function](*(v for v in copies.values() if isinstance(v, np.ndarray)))
        several = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(np.asarray(one, dtype=np.float64) for one in several)


def compare(
    outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray], inputs: Sequence[np.ndarray]
) -> tuple[Agreement, ...]:
    """Return how far each output is from the reference. Raises ShapeError where shapes differ."""
    rtol = default_rtol(outputs, inputs)
    if len(outputs) != len(wanted):
        raise ShapeError(f"the kernel has {len(outputs)} outputs, the reference {len(wanted)}")
    agreements = []
    for i, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        if got.shape != want.shape:
            raise ShapeError(f"output {i} has shape {got.shape}, the reference {want.shape}")
        off = np.abs(got.astype(np.float64) - want)
        worst = np.unravel_index(int(np.argmax(np.nan_to_num(off, nan=np.inf))), off.shape)
        scale = float(np.abs(want).max()) or 1.0
        agreements.append(
            Agreement(
                output=i, error=float(off.max()) / scale, rtol=rtol,
                worst=tuple(int(at) for at in worst),
            )
        )  # fmt: skip
    return tuple(agreements)
