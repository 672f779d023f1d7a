"""The kernel calls of an exported graph: `torch.ops.nmm.*` nodes as plain data.

A `KernelCall` says which op, which tensors it takes (flattened in schema order, absent ones left
out), every other argument, and the shapes. Two calls with the same `signature` are served by one
kernel. `rebuild` turns a flat list of tensors back into the op's arguments, so that a reference
body can be traced for the kernel.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NAMESPACE = "nmm"


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of tensor number `index` among an op's arguments."""

    index: int


@dataclasses.dataclass(frozen=True)
class TensorType:
    """Shape (None for a size known at run time only) and dtype of an operand or a result."""

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorType:
        """Return the type of a (fake) tensor."""
        shape = tuple(int(s) if isinstance(s, int) else None for s in tensor.shape)
        return cls(shape, str(tensor.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{'x'.join('?' if s is None else str(s) for s in self.shape)}x{self.dtype}"


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One call of a fused kernel.

    node: the FX node's name. op: the op's name in namespace nmm. args, kwargs: the op's arguments
    in schema order with a Slot for each tensor; executor is left out. operands, results: types.
    """

    node: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments, defaults filled in."""
        return dict(self.kwargs)

    @property
    def dynamic(self) -> bool:
        """Whether a size of an operand is known at run time only."""
        return any(None in operand.shape for operand in self.operands)

    def signature(self) -> str:
        """Return canonical JSON of everything that identifies the kernel, without the node."""
        parts = {
            "op": self.op,
            "args": _with_slots(self.args, "%{}".format),
            "kwargs": _with_slots(dict(self.kwargs), "%{}".format),
            "operands": [str(operand) for operand in self.operands],
        }
        return json.dumps(parts, sort_keys=True)

    def digest(self) -> str:
        """Return 8 hex digits of the sha256 of the signature."""
        return hashlib.sha256(self.signature().encode()).hexdigest()[:8]

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the op's positional and keyword arguments with `tensors` in their slots."""
        args, kwargs = _with_slots((self.args, dict(self.kwargs)), tensors.__getitem__)
        return list(args), kwargs


def is_kernel_call(node: torch.fx.Node) -> bool:
    """Return whether an FX node calls one of this package's fused ops."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE


def calls_of(graph: torch.fx.Graph) -> list[KernelCall]:
    """Return the kernel calls of a graph in order; every node needs meta["val"]."""
    return [_call(node) for node in graph.nodes if is_kernel_call(node)]


def _call(node: torch.fx.Node) -> KernelCall:
    assert isinstance(node.target, torch._ops.OpOverload)
    tensors: list[Tensor] = []

    def slot(operand: torch.fx.Node) -> Slot:
        tensors.append(operand.meta["val"])
        return Slot(len(tensors) - 1)

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == "executor":
            continue
        value = node.kwargs.get(parameter.name, parameter.default_value)
        value = node.args[position] if position < len(node.args) else value
        value = pytree.tree_map_only(torch.fx.Node, slot, value)
        value = tuple(value) if isinstance(value, list) else value
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    made = node.meta["val"]
    results = tuple(made) if isinstance(made, (list, tuple)) else (made,)
    return KernelCall(
        node=node.name,
        op=node.target._schema.name.partition("::")[2],
        args=tuple(args),
        kwargs=tuple(kwargs.items()),
        operands=tuple(TensorType.of(tensor) for tensor in tensors),
        results=tuple(TensorType.of(tensor) for tensor in results),
    )


def _with_slots(values: Any, of: Callable[[int], Any]) -> Any:
    """Return values with `of(index)` in the place of each slot."""
    return pytree.tree_map_only(Slot, lambda slot: of(slot.index), values)
