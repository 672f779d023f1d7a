"""One kernel launch, and the helpers that lowerings make it with.

A weight stored [outputs, inputs] is passed transposed if a `transpose` function is given, else in
its stored layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Transpose = Callable[[Tensor], Tensor]

TOKEN_AXES = ("m", "k")
"""The sizes of a spec that may count tokens; k where a product sums over them."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the spec for m tokens, and its operands, activations first.

    token_axis: the size of the spec that counts tokens, one of TOKEN_AXES.
    """

    spec: Any
    operands: tuple[Tensor, ...]
    token_axis: str = "m"


@functools.lru_cache(maxsize=4096)
def inputs_of(spec: Any) -> tuple[Any, ...]:
    """Return the operands that a spec's kernel takes; each call of an op asks."""
    return tuple(spec.inputs())


def axes_that_differ(some: Sequence[Any], others: Sequence[Any]) -> list[int | None]:
    """Return the axis in which the shapes of two operands differ, for each pair; None without."""
    found = []
    for one, other in zip(some, others, strict=True):
        sizes = enumerate(zip(one.shape, other.shape, strict=True))
        found.append(next((axis for axis, (a, b) in sizes if a != b), None))
    return found


def dtype_name(t: Tensor) -> str:
    """Return the dtype's name in specs, as "bfloat16"; torch's float8_e4m3fn holds NKI's fp8."""
    return _NAMES.get(t.dtype) or str(t.dtype).removeprefix("torch.")


_NAMES = {torch.float8_e4m3fn: "float8_e4m3"}


def view_turned(w: Tensor) -> Tensor:
    """Return a weight, or a stack of them, transposed: a view, where only specs are asked for."""
    return w.mT


def turned(w: Tensor) -> Tensor:
    """Return a weight, or a stack of them, transposed: a copy."""
    return w.mT.contiguous()
