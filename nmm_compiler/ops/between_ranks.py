"""Sums over the processes of a group, inside of an op's reference, with their gradients.

    summed(t, group)    the sum over the group; its gradient is the result's, which every rank has
    spread(t, group)    t itself, which every rank has; its gradient is the sum over the group

Both are collectives of torch.distributed, by the name of a process group. A DTensor knows its
devices and what it is on each: a Partial one becomes its sum, and no other one changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError


def check_group(tp: int, tp_axis: str, group: str) -> None:
    """Raise SpecError unless a call that sums names its group."""
    if not group:
        raise SpecError(
            f"tp={tp}, tp_axis={tp_axis!r} without a group; pass group=, the name of a process "
            "group: mesh.get_group().group_name"
        )


def summed(t: Tensor, group: str) -> Tensor:
    """Return the sum of t over the processes of the group."""
    if _is_dtensor(t):
        return _whole(t)
    return _Summed.apply(t, group) if t.requires_grad else _all_reduce(t, group)


def spread(t: Tensor, group: str) -> Tensor:
    """Return t, with a gradient that is the sum over the processes of the group."""
    if _is_dtensor(t):
        return t
    return _Spread.apply(t, group) if t.requires_grad else t


def _is_dtensor(t: Tensor) -> bool:
    """Say so without an import of the class, which takes most of a second."""
    return type(t) is not Tensor and type(t).__name__ == "DTensor"


def _whole(t: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    made: Tensor = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return made


def _all_reduce(t: Tensor, group: str) -> Tensor:
    functional: Any = torch.ops._c10d_functional
    made: Tensor = functional.wait_tensor(functional.all_reduce(t.contiguous(), "sum", group))
    return made


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: str) -> Tensor:
        return _all_reduce(t, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: str) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.group), None
