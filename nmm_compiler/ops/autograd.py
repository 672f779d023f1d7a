"""First-order gradients of the `torch.ops.nmm.*` ops when a kernel computes the forward pass.

The kernel keeps its intermediate on chip, so autograd saves only the operands, and the backward
pass computes the intermediate again. For y = (x u) v that costs one more product and saves an [m,
r] tensor. Each op has the formula of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.ops.definition import ROW, Op


def _flatten(args: tuple) -> tuple[tuple[int | None, ...], list[Any]]:
    """Return each argument's length (None for a single one) and the flat list of all of them."""
    form = tuple(len(a) if isinstance(a, (list, tuple)) else None for a in args)
    flat: list[Any] = []
    for a in args:
        flat.extend(a if isinstance(a, (list, tuple)) else [a])
    return form, flat


def _unflatten(form: tuple[int | None, ...], flat: Sequence[Any]) -> tuple:
    args: list[Any] = []
    position = 0
    for count in form:
        if count is None:
            args.append(flat[position])
            position += 1
        else:
            args.append(list(flat[position : position + count]))
            position += count
    return tuple(args)


class KernelCall(torch.autograd.Function):
    """One op call: a kernel computes its forward pass, `Op.gradient` its backward pass."""

    @classmethod
    def call(cls, op: Op, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run `op` so that autograd sees one node; returns a Tensor or a list of them.

        run computes it below autograd.
        """
        form, flat = _flatten(args)
        out = cls.apply(op, run, form, kwargs, *flat)
        return list(out) if isinstance(out, tuple) else out

    @staticmethod
    def forward(ctx: Any, op: Op, run: Callable, form: tuple, kwargs: dict, *flat: Any) -> Any:
        """Run the op and save its operands."""
        out = run(_unflatten(form, flat), kwargs)
        ctx.op, ctx.form, ctx.kwargs = op, form, kwargs
        ctx.set_materialize_grads(False)  # a result that no loss reads has no gradient
        ctx.save_for_backward(*flat)
        return tuple(out) if isinstance(out, list) else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return one gradient, or None, for each flat operand."""
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        args = _unflatten(ctx.form, ctx.saved_tensors)
        need = _unflatten(ctx.form, ctx.needs_input_grad[4:])
        found = ctx.op.gradient(args, {**ROW, **ctx.kwargs}, grads, need)
        return (None, None, None, None, *_flatten(tuple(found))[1])
