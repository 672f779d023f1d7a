"""First-order gradients of the `torch.ops.nmm.*` ops when a kernel computes the forward pass.

The kernel keeps its intermediate on chip, so autograd saves only the operands, and the backward
pass computes the intermediate again. For y = (x u) v that costs one more product and saves an [m,
r] tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from nmm_compiler.ops.definition import Op


class KernelCall(torch.autograd.Function):
    """One op call: a kernel computes its forward pass, `Op.gradient` its backward pass."""

    @classmethod
    def call(cls, op: Op, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run `op` so that autograd sees one node; returns a Tensor or a list of them.

        run computes it below autograd.
        """
        flat, form = tree_flatten(args)
        out = cls.apply(op, run, form, kwargs, *flat)
        return list(out) if isinstance(out, tuple) else out

    @staticmethod
    def forward(ctx: Any, op: Op, run: Callable, form: Any, kwargs: dict, *flat: Any) -> Any:
        """Run the op and save its operands."""
        out = run(tree_unflatten(flat, form), kwargs)
        ctx.op, ctx.form, ctx.kwargs = op, form, kwargs
        ctx.set_materialize_grads(False)  # a result that no loss reads has no gradient
        ctx.save_for_backward(*flat)
        return tuple(out) if isinstance(out, list) else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return one gradient, or None, for each flat operand."""
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        args = tree_unflatten(ctx.saved_tensors, ctx.form)
        need = tree_unflatten(ctx.needs_input_grad[4:], ctx.form)
        found = ctx.op.gradient(args, ctx.kwargs, grads, need)
        return (None, None, None, None, *tree_flatten(tuple(found))[0])
