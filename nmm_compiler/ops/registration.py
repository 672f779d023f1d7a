"""The torch ops of the package: `torch.ops.nmm.*`, what a rewritten graph calls.

The families define them, each in its op.py: linear.py has the table of linear layers, chosen.py
what an index chooses. Executor "reference" is PyTorch itself; any
other is looked up in EXECUTORS, which `nmm_compiler.runtime.executor` fills, as "name" or
"name#configuration".

An eager call on the reference differentiates through PyTorch's own products: one Python hop, any
order of derivative. Kernel executors use `gradient`: the kernel keeps its intermediate on chip, so
autograd saves only the operands, and the backward pass computes the intermediate again. For y =
(x u) v that costs one more product and saves an [m, r] tensor. While a graph is traced
without gradients the op stays one node. A change of an op's meaning needs a new op name, since
inner compilers cache code that calls it by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import PACKAGE
from nmm_compiler.ops import autocast_and_vmap, sharding
from nmm_compiler.ops.definition import NORM, Op
from nmm_compiler.ops.linear import ENDS
from nmm_compiler.ops.operands import Given
from nmm_compiler.ops.references import tracing
from nmm_compiler.ops.stored import dequantize_placements

Executor = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the op's name, its positional and its keyword arguments; returns what the op does."""


DEFINITIONS: dict[str, Op] = {
    op.name: op
    for folder in dict.fromkeys(family.folder for family in FAMILIES.values())
    for op in importlib.import_module(f"{PACKAGE}.{folder}.op").OPS
}


EXECUTORS: dict[str, Executor] = {}

_BESIDE = {*NORM, *(one.name for one in ENDS)}
"""The arguments that the bare references do not take."""

NEURON_DEVICES = ("neuron", "xla")


def is_reference(executor: str, x: Tensor) -> bool:
    """Return whether PyTorch computes a call with this executor and input."""
    plain = executor.partition("#")[0]
    return plain == "reference" or (plain == "auto" and x.device.type not in NEURON_DEVICES)


def executor_of(name: str) -> Executor:
    """Return the executor for "name" or "name#configuration"; raises UnknownNameError.

    "auto" is the Neuron device's executor here: `is_reference` has sent the rest to PyTorch.
    """
    plain = name.partition("#")[0]
    found = EXECUTORS.get("neuron" if plain == "auto" else plain)
    if found is None:
        raise UnknownNameError("executor", plain, ("auto", "reference", *EXECUTORS))
    return found


class KernelCall(torch.autograd.Function):
    """One op call: a kernel computes its forward pass, `Op.gradient` its backward pass."""

    @staticmethod
    def forward(ctx: Any, op: Op, run: Callable, form: Any, kwargs: dict, *flat: Any) -> Any:
        """Run the op, computed by `run` below autograd, and save its operands."""
        out = run(tree_unflatten(flat, form), kwargs)
        ctx.op, ctx.form, ctx.kwargs = op, form, kwargs
        ctx.set_materialize_grads(False)  # a result that no loss reads has no gradient
        ctx.save_for_backward(*flat)
        return tuple(out) if isinstance(out, list) else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return one gradient, or None, for each flat operand."""
        need = ctx.needs_input_grad[4:]
        found = ctx.op.gradient(ctx.saved_tensors, ctx.form, ctx.kwargs, grads, need)
        return (None, None, None, None, *found)


def _implementation(name: str, reference: Callable) -> Callable:
    """Return the op's body, below autograd: the reference, or a kernel executor."""

    def run(*args: Any, **kwargs: Any) -> Any:
        executor = kwargs.get("executor", "reference")
        if is_reference(executor, args[0]):
            return reference(*args, **kwargs)
        return executor_of(executor)(name, args, kwargs)

    return run


def _autograd(op: Op) -> Callable:
    """Return the op's entry for every call that autograd may watch.

    The dispatcher leaves out keywords that equal their default, so a missing "executor" is the
    reference. So do torch.func transforms and forward-mode derivatives: a backward formula alone
    would give them a zero tangent, silently, and the reference composes with all of them.
    """
    name, reference, bare = op.name, op.reference, op.bare
    own = sum(one.name not in _BESIDE for one in op.operands)

    def run_below(args: tuple[Any, ...], kwargs: Given) -> Any:
        executor = kwargs.get("executor", "reference")
        if tracing() and not is_reference(executor, args[0]):
            found = executor_of(executor)
            if getattr(found, "traced_device", None) == args[0].device.type:
                return found(name, args, kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return OPS[name](*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        plain = "executor" not in kwargs or is_reference(kwargs["executor"], args[0])
        if plain and not tracing():
            if bare is None or len(args) > own or not _BESIDE.isdisjoint(kwargs):
                return reference(*args, **kwargs)
            return bare(*args, **kwargs)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return reference(*args, **kwargs)
        sharding.register_when_used(RULES)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return run_below(args, kwargs)
        if plain:
            return reference(*args, **kwargs)
        flat, form = tree_flatten(args)
        out = KernelCall.apply(op, run_below, form, kwargs, *flat)
        return list(out) if op.many else out

    return run


_library = torch.library.Library("nmm", "DEF")
OPS: dict[str, Any] = {}

for _name, _op in DEFINITIONS.items():
    _tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    _library.define(_name + _op.schema, tags=_tags)
    OPS[_name] = getattr(torch.ops.nmm, _name).default
    _library.impl(_name, _implementation(_name, _op.reference), "CompositeExplicitAutograd")
    _library.impl(_name, _autograd(_op), "Autograd")
    torch.library.register_fake(f"nmm::{_name}", _op.of_arguments(_op.fake), lib=_library)
    autocast_and_vmap.register(_library, _name, OPS[_name])

RULES = {OPS[name]: op.of_arguments(op.sharding) for name, op in DEFINITIONS.items()}
RULES[torch.ops.nmm.dequantize.default] = dequantize_placements
sharding.register_when_used(RULES)
