"""The check of a kernel when it first meets a device: random operands, some tokens in float64.

Every result must be finite and of the right shape; TOKENS tokens, the first and the last among
them, are compared with the float64 reference, in all their features, as a proof in the simulator
compares them. A reference of all tokens would take minutes for the layers of a large model.

A kernel of several ranks runs in the processes of all of them, with the same operands in each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmm_compiler.codegen.check_against_float64 import compare, random_arrays

TOKENS = 16
FP8 = torch.float8_e4m3fn
"""torch's dtype for nki's float8_e4m3: the same bits for the same numbers up to 240, nki's largest.
torch-neuronx takes one for the other on trn2 (its utils.map_external_dtype_to_torch)."""

Launcher = Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]


def fault(kernel: Any, device: torch.device, launch: Launcher) -> str | None:
    """Run the kernel on seeded random operands; return what is wrong, or None."""
    spec = kernel.spec
    arrays = random_arrays(spec)
    tensors = [tensor(array).to(device) for array in arrays]
    try:
        results = launch(kernel, tensors)
        got = [y.detach().to("cpu").to(torch.float64).numpy() for y in results]
    except Exception as error:  # the vendor's compiler and runtime may raise anything
        return f"its first run failed with {type(error).__name__}: {error}"
    wrong = misfit(got, [tuple(operand.shape) for operand in spec.outputs()])
    return _difference(spec, arrays, got) if wrong is None else f"its first run {wrong}"


def misfit(got: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Return how many results, of which shape or which elements cannot be right, or None."""
    if len(got) != len(shapes):
        return f"returned {len(got)} results, not {len(shapes)}"
    for values, shape in zip(got, shapes, strict=True):
        if values.shape != shape:
            return f"returned shape {values.shape}, not {shape}"
        finite = int(np.isfinite(values).sum())
        if finite < values.size:
            return f"is not finite in {values.size - finite} of {values.size} elements"
    return None


def _difference(spec: Any, arrays: Sequence[Any], got: Sequence[Any]) -> str | None:
    """Return how the results of some tokens differ from the float64 reference, or None."""
    chosen = _chosen(spec.m) if spec.splits_tokens else np.arange(spec.m)
    small = dataclasses.replace(spec, m=len(chosen))
    arrays = _of_tokens(arrays, spec.inputs(), small.inputs(), chosen)
    if spec.world_size > 1:  # operands of the product that all ranks compute
        arrays = small.joined(*arrays)
    references = (small.reference, small.error_bound, small.typical_error)
    wanted, bounds, typical = (several(one(*arrays)) for one in references)
    proof = compare(
        "first run",
        tuple(_of_tokens(got, spec.outputs(), small.outputs(), chosen)),
        wanted,
        bounds,
        typical,
    )
    if proof.passed:
        return None
    return (
        f"its first run differs from the float64 reference by up to {proof.max_error:.3g} in "
        f"{proof.elements} elements compared, {100 * proof.norm_share:.0f} % of the limit in norm"
    )


def _chosen(m: int) -> Any:
    """Return the tokens that are compared, in order: the first, the last and random ones."""
    if m <= TOKENS:
        return np.arange(m)
    between = np.random.default_rng(0).choice(m - 2, TOKENS - 2, replace=False)
    return np.sort([0, m - 1, *(1 + between)])


def _of_tokens(arrays: Sequence[Any], whole: Any, small: Any, chosen: Any) -> list[Any]:
    """Return each array with the chosen tokens only, where it has tokens.

    `whole` and `small` are the same operands with all tokens and with the chosen ones, so their
    shapes differ in the axis of the tokens.
    """
    found = []
    for array, long, short in zip(arrays, whole, small, strict=True):
        axes = [i for i, (a, b) in enumerate(zip(long.shape, short.shape, strict=True)) if a != b]
        found.append(np.take(array, chosen, axis=axes[0]) if axes else array)
    return found


def several(value: Any) -> tuple[Any, ...]:
    """Return one result, or a tuple or list of them, as a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def tensor(array: Any) -> Tensor:
    """Return an array, perhaps of an ml_dtypes type, as a tensor with the same bits."""
    dtype = FP8 if array.dtype.name == "float8_e4m3" else getattr(torch, array.dtype.name)
    bits = np.ascontiguousarray(array).view(f"i{array.itemsize}")
    return torch.from_numpy(bits).view(dtype)
