"""Gives every spelling of an operation one name; no other module knows torch's spellings.

`operator.matmul`, `torch.matmul`, `Tensor.matmul`, `aten.matmul.default` and a method call all get
the name "matmul"; `operator.iadd` and `aten.add_.Tensor` get "add_", and `x.T` gets "T". Names are
those of ATen where it has one.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import fx

_MODULES = frozenset(
    {
        "_operator",
        "torch",
        "torch._C",
        "torch._C._nn",
        "torch._C._linalg",
        "torch._C._special",
        "torch.functional",
        "torch.nn.functional",
        "torch.linalg",
        "torch.special",
    }
)
# One operation, several names: torch function, method (`__add__` as "add"), ATen, prims.
_SYNONYMS = {
    "truediv": "div",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "imatmul": "matmul_",
    "ipow": "pow_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "ixor": "bitwise_xor_",
    "ilshift": "bitwise_left_shift_",
    "irshift": "bitwise_right_shift_",
    "setitem": "setitem_",
    # these end like in-place names, and write nothing
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "iand": "bitwise_and_",
    "ior": "bitwise_or_",
    "invert": "bitwise_not",
    "multiply": "mul",
    "true_divide": "div",
    "divide": "div",
    "negative": "neg",
    "subtract": "sub",
    "radd": "add",
    "rmul": "mul",
    "and": "bitwise_and",
    "__and__": "bitwise_and",  # of ATen
    "or": "bitwise_or",
    "__or__": "bitwise_or",
    "linalg_matmul": "matmul",
    "linalg_multi_dot": "multi_dot",
    "_unsafe_view": "view",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "numpy_T": "T",
    "matrix_H": "mH",
    "adjoint": "mH",
    "H": "mH",
    "broadcast_to": "expand",
    "convert_element_type": "to",
    "_to_copy": "to",
    "absolute": "abs",
    "_threshold": "threshold",
    "special_expit": "sigmoid",
    "expit": "sigmoid",
    "lift_fresh": "alias",
    "lift_fresh_copy": "clone",
    "alias_copy": "clone",
    "detach_copy": "detach",
    "torch._C._autograd._get_data_attr": "detach",
    "data": "detach",
    "hidden_dropout": "dropout",
}


def target_name(node: Any) -> str | None:
    """Return the canonical name of what a node calls, None for an unknown Python callable and for
    what is no node.

    Operators outside ATen and prims keep their namespace: "nmm::lowrank_matmul".
    """
    if not isinstance(node, fx.Node):
        return None
    target: Any = node.args[1] if node.target is getattr else node.target
    if node.op == "call_method" or node.target is getattr:
        name = str(target).strip("_") if str(target).endswith("__") else str(target)
        return _SYNONYMS.get(name, name)
    if node.op != "call_function":
        return None
    try:
        return _function_name(target)
    except TypeError:  # an unhashable callable
        return _function_name.__wrapped__(target)


@functools.lru_cache(maxsize=1024)
def _function_name(target: Any) -> str | None:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet: Any = getattr(target, "overloadpacket", target)
        space, name = str(packet._qualified_op_name).split("::", 1)
        if space not in ("aten", "prims"):
            return f"{space}::{name}"
    elif isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    else:
        module = getattr(target, "__module__", None) or ""
        short = getattr(target, "__name__", None)
        if short is None or module.split(".")[0] not in ("torch", "_operator", "builtins", "math"):
            return None
        name = short if module in _MODULES else f"{module}.{short}"
    return _SYNONYMS.get(name, name)


def applied(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return what a function or a method of the graph returns for other arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def is_inplace_name(name: str) -> bool:
    """Return whether a canonical name writes into its first argument."""
    return name.endswith("_") and not name.endswith("__")


def changes_gradient(node: fx.Node) -> bool:
    """Return whether a view may change gradients: `detach`, `.data`, a hook, a custom op."""
    name = target_name(node) or "::"
    return name == "detach" or "::" in name or tuple(node.args[1:2]) == ("data",)


@functools.lru_cache(maxsize=1024)
def signature(target: Any) -> tuple[str, ...]:
    """Return the names of the parameters by position of a Python function, an operator, or ATen's
    operator of a name; () for others."""
    named = getattr(torch.ops.aten, target, None) if isinstance(target, str) else target
    if isinstance(named, torch._ops.OpOverloadPacket):
        target = getattr(named, named.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        return tuple(one.name for one in target._schema.arguments if not one.kwarg_only)
    given = inspect.signature(target).parameters if inspect.isfunction(target) else {}
    return tuple(n for n, one in given.items() if one.kind is one.POSITIONAL_OR_KEYWORD)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by the names of its parameters; only those that have one."""
    name = target_name(node)
    names = (signature(node.target) or signature(name)) if name else ()
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
