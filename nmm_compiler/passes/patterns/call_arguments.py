"""The arguments of a call by the names that ATen gives them, however the call is spelled."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.graph.torch_names import target_name


def is_pointwise(node: fx.Node) -> bool:
    """Return whether ATen calls an operation pointwise."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def call_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return a call's arguments by ATen's names, without those that equal their default."""
    name = target_name(node)
    packet = getattr(torch.ops.aten, name or "", None)
    if packet is None or node.op not in ("call_function", "call_method"):
        return None
    target = node.target
    names: tuple[str, ...]
    if isinstance(target, torch._ops.OpOverload):
        names = tuple(a.name for a in target._schema.arguments)
    elif inspect.isfunction(target):
        names = tuple(inspect.signature(target).parameters)
    else:
        overload = getattr(packet, packet.overloads()[0])
        names = tuple(a.name for a in overload._schema.arguments)
    if len(node.args) > len(names):
        return None
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    renamed = {"self" if n in ("input", "self") else n: v for n, v in given.items()}
    return {n: v for n, v in renamed.items() if v is not None and v is not False and n[0] != "_"}
