"""Compares a kernel's outputs with a user's function: `nmm simulate --reference FILE:fn`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmm_compiler.cli.models import foreign
from nmm_compiler.errors import ShapeError, UnknownNameError
from nmm_compiler.simulator.loading.loader import load_file


def tolerance(arrays: Sequence[np.ndarray]) -> float:
    """Return eps of the coarsest type plus that of float32 times sqrt of the longest dimension.

    A sum of K products of independent rounding errors is off by about eps sqrt(K); the longest
    dimension is the longest sum that a kernel can make of its inputs.
    """
    import ml_dtypes

    coarsest = [float(ml_dtypes.finfo(a.dtype).eps) for a in arrays if a.dtype.kind in "fV"]
    longest = max((size for array in arrays for size in array.shape), default=1)
    return max(coarsest) + float(np.finfo(np.float32).eps) * math.sqrt(longest) if coarsest else 0.0


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
    arrays = [v for v in copies.values() if isinstance(v, np.ndarray)]
    with foreign(file, f"{function}() raised"):
        by_name = set(copies) <= set(inspect.signature(module[function]).parameters)
        result = module[function](**copies) if by_name else module[function](*arrays)
        several = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(np.asarray(one, dtype=np.float64) for one in several)


def compare(
    outputs: Sequence[np.ndarray], wanted: Sequence[np.ndarray], inputs: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return how far each output is from the reference, as a share of the reference's largest
    value. Raises ShapeError where shapes differ."""
    rtol = tolerance((*outputs, *inputs))
    if len(outputs) != len(wanted):
        raise ShapeError(f"the kernel has {len(outputs)} outputs, the reference {len(wanted)}")
    agreements = []
    for i, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        if got.shape != want.shape:
            raise ShapeError(f"output {i} has shape {got.shape}, the reference {want.shape}")
        off = np.abs(got.astype(np.float64) - want)
        worst = np.unravel_index(int(np.argmax(np.nan_to_num(off, nan=np.inf))), off.shape)
        error = float(off.max()) / (float(np.abs(want).max()) or 1.0)
        figures = {"output": i, "error": error, "rtol": rtol, "worst": [int(at) for at in worst]}
        agreements.append({**figures, "passed": error <= rtol})  # NaN is not
    return agreements


def said(figures: Mapping[str, Any]) -> str:
    """Return one of the comparisons in words."""
    verdict = "agrees with" if figures["passed"] else "DIFFERS from"
    return (
        f"output {figures['output']} {verdict} the reference: largest error "
        f"{figures['error']:.3g} of the largest value, tolerance {figures['rtol']:.3g}, at "
        f"{figures['worst']}"
    )
