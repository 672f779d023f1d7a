"""The op calls that the backward pass of an op call makes, found without data.

The gradient formula runs on meta tensors, and a dispatch mode notes the calls. So the backend knows
the kernels of a training step before it runs one, from the same code that will run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from nmm_compiler.ops.lower import op_name
from nmm_compiler.ops.operands import Given
from nmm_compiler.ops.registration import DEFINITIONS

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The op's name, its positional and its keyword arguments."""
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


class _Noted(TorchDispatchMode):
    """Notes the calls of this package's ops, and the products that PyTorch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.by_torch: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = op_name(func)
        if name is not None and 0 not in args[0].shape:  # no tokens, nothing to launch
            self.calls.append((name, args, kwargs or {}))
        elif func.overloadpacket in _PRODUCTS:
            left, right = args[-2:]
            self.by_torch.append(f"{list(left.shape)} x {list(right.shape)}")
        return func(*args, **(kwargs or {}))


def backward_calls(
    name: str, args: Sequence[Any], kwargs: Given, size: Callable[[Any], int] = int
) -> tuple[list[Call], list[str]]:
    """Return the calls in the backward pass of op `name`, and the products that PyTorch computes.

    There are none where no operand needs a gradient. size: the number that a size stands for, which
    may be symbolic.
    """
    op, noted = DEFINITIONS[name], _Noted()
    flat, form = tree_flatten(tuple(args))
    need = [isinstance(one, Tensor) and one.requires_grad for one in flat]
    with torch.no_grad():
        held = tree_map_only(Tensor, lambda t: _without_data(t, size), tuple(args))
        made = op.fake(op.bound(held, kwargs))
        with noted:
            op.gradient(tree_leaves(held), form, kwargs, made if op.many else [made], need)
    return noted.calls, noted.by_torch


def _without_data(t: Tensor, size: Callable[[Any], int]) -> Tensor:
    shape, strides = (
        [n if type(n) is int else size(n) for n in of] for of in (t.shape, t.stride())
    )
    return torch.empty_strided(shape, strides, dtype=t.dtype, device="meta")
