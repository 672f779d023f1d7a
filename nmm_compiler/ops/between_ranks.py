"""The sum over the processes of a group, inside of an op's reference, with its gradient.

It is a collective of torch.distributed, by the name of a process group. Its gradient is that of the
result, which every rank has. A DTensor knows its devices and what it is on each: a Partial one
becomes its sum, and no other one changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.linear.specs import RANK_AXES


def check_group(tp: int, tp_axis: str, group: str) -> None:
    """Raise UnknownNameError or SpecError unless a call says what it sums, and over which group."""
    check_name("tp_axis", tp_axis, RANK_AXES)
    if not group:
        raise SpecError(
            f"tp={tp}, tp_axis={tp_axis!r} without a group; pass group=, the name of a process "
            "group: mesh.get_group().group_name"
        )


def summed(t: Tensor, group: str) -> Tensor:
    """Return the sum of t over the processes of the group."""
    # by name: an import of the class takes most of a second
    if type(t) is not Tensor and type(t).__name__ == "DTensor":
        return _whole(t)
    return _Summed.apply(t, group) if t.requires_grad else _all_reduce(t, group)


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
