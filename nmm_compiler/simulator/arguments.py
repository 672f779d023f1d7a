"""A kernel's arguments: arrays become tensors in HBM, and changed tensors are copied back."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import KernelArgumentError, nearest
from nmm_compiler.simulator.language.base import private_hbm, shared_hbm
from nmm_compiler.simulator.machine import Machine, defined_at
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.tensor import NkiTensor, make_tensor


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array that does not exist (timing mode)."""

    shape: tuple[int, ...]
    dtype: Any


def bind(function: Any, arrays: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a kernel's arguments by its signature; raises KernelArgumentError."""
    signature = inspect.signature(function)
    try:
        return signature.bind(*arrays, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "kernel")
        raise KernelArgumentError(
            f"arguments do not fit {name}{signature}: {error}", *defined_at(function)
        ) from None


def each(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Return a value, or containers of values, with what a function makes of each one's name and
    it."""
    if type(value) in (tuple, list):
        return type(value)(each(function, f"{name}[{i}]", v) for i, v in enumerate(value))
    if type(value) is dict:
        return {key: each(function, f"{name}[{key!r}]", v) for key, v in value.items()}
    return function(name, value)


class Binder:
    """Turns arguments into tensors, and writes arrays that the kernel changed back.

    seen: (tensor, argument, its array) by the argument's identity.
    """

    def __init__(self, machine: Machine, grid: int) -> None:
        self.machine = machine
        self.region = shared_hbm if grid > 1 else private_hbm
        self.seen: dict[int, tuple[NkiTensor, Any, np.ndarray]] = {}

    def convert(self, name: str, value: Any) -> Any:
        """Return a tensor for an array or an ArraySpec, else the value."""
        of_torch = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")
        array = _from_torch(name, value) if of_torch else value
        if isinstance(array, np.ndarray):
            if id(value) not in self.seen:
                self.seen[id(value)] = self._tensor(name, array), value, array
            return self.seen[id(value)][0]
        return self._tensor(name, value) if isinstance(value, ArraySpec) else value

    def _tensor(self, name: str, given: Any) -> NkiTensor:
        """Return a tensor in HBM for an array or an ArraySpec."""
        kind, raw = dtypes.find(given.dtype), None
        if kind is None or kind.item_bytes == 8:
            raise KernelArgumentError(
                f"argument {name!r} is {given.dtype}; NKI has "
                f"{nearest(given.dtype, sorted(dtypes.ALL))}; convert it first"
            )
        shape = tuple(int(s) for s in given.shape) or (1,)
        if 0 in shape:
            raise KernelArgumentError(f"argument {name!r} has shape {shape}, which is empty")
        if self.machine.data:
            if isinstance(given, ArraySpec):
                raise KernelArgumentError(
                    f'argument {name!r} is an ArraySpec; only mode="timing" takes shapes for arrays'
                )
            raw = np.array(given, order="C").reshape(-1).view(np.uint8)
        storage = Storage(self.machine, name, self.region, "hbm", shape, kind, None, raw)
        storage.is_input = True
        return make_tensor(storage)

    def write_back(self, machines: list[Machine]) -> None:
        """Copy what the kernel wrote into its inputs back into the caller's arrays."""
        for tensor, _, array in self.seen.values():
            of_programs = [m.trace.allocations[tensor.storage.identity] for m in machines]
            if any(a.last_write >= 0 for a in of_programs) and array.flags.writeable:
                values = tensor.array()
                if array.dtype.names:  # x4-packed
                    values = np.ascontiguousarray(values).view(array.dtype)
                array[...] = values.reshape(array.shape)


def _from_torch(name: str, value: Any) -> np.ndarray:
    """Return a NumPy view of a torch CPU tensor, by its bits; NumPy lacks some dtypes."""
    if value.device.type != "cpu":
        raise KernelArgumentError(
            f"argument {name!r} is on device {value.device}; move it to the CPU"
        )
    torch = sys.modules["torch"]
    tensor = value.detach()
    kind = dtypes.find(value.dtype)
    if kind is None:
        raise KernelArgumentError(f"argument {name!r} is {value.dtype}, which NKI does not have")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.item_bytes]
    return np.asarray(tensor.view(bits).numpy().view(kind.numpy))
