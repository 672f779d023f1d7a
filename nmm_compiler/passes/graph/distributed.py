"""Tensors that are cut over devices (DTensor): the steps between two of them that change nothing.

Tensor parallelism puts them between the two products of a chain that is cut along its rank:

    h = linear(x, a)                          # a cut by outputs, h cut by features
    h = from_local(to_local(h.redistribute([Shard(-1)])), mesh, [Shard(-1)])
    y = linear(h, b)                          # b cut by inputs, y a sum over the devices
    y.redistribute([Replicate()])

A redistribution to where a tensor is already, and a local tensor that becomes the same tensor
again, are rearrangements that rearrange nothing. Every other one moves data between devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Handler, Result
from nmm_compiler.passes.graph.torch_names import Call, target_name


def is_distributed(value: Any) -> bool:
    """Say whether a value is a DTensor; the class itself takes most of a second to import."""
    return isinstance(value, torch.Tensor) and type(value).__name__ == "DTensor"


def local_part(value: Any) -> Any:
    """Return what a value is on this device."""
    return value._local_tensor if is_distributed(value) else value


def _redistribute(c: Canonical, call: Call) -> Result:
    source = call.get(0, "self")
    return _unchanged(c, source, call.node)


def _from_local(c: Canonical, call: Call) -> Result:
    local = call.get(0, "local_tensor")
    if not isinstance(local, fx.Node) or target_name(local) != "to_local":
        return None
    if not _given_in_full(call):
        return None
    result = _unchanged(c, Call(local, "to_local").get(0, "self"), call.node)
    if result is not None:
        c.helpers[call.node] = frozenset((local,))
    return result


def _given_in_full(call: Call) -> bool:
    """Say whether a call leaves gradients as they are: nothing but mesh and placements is given."""
    return not any(call.kwargs.get(name) for name in ("grad_placements", "run_check"))


def _unchanged(c: Canonical, source: Any, node: fx.Node) -> Result:
    """Read a node as its source where both are one tensor, cut in one way over one mesh."""
    if not isinstance(source, fx.Node):
        return None
    old, new = c.tensor(source), c.tensor(node)
    if not is_distributed(old) or not is_distributed(new):
        return None
    before, after = old._spec, new._spec  # type: ignore[union-attr]
    shape = c.shape(source)
    if shape is None or shape != c.shape(node) or before.mesh != after.mesh:
        return None
    return (source, views.identity(shape)) if before.placements == after.placements else None


DISTRIBUTED: dict[str, Handler] = {
    "redistribute": _redistribute,
    "from_local": _from_local,
    "torch.distributed.tensor.from_local": _from_local,
    "torch.distributed.tensor._api.from_local": _from_local,
}
