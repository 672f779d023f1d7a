"""Copies of weights in the layout that kernels read best, made once and never stale.

`nn.Linear` stores [outputs, inputs] and kernels read [inputs, outputs] fastest, so a weight is
transposed once, not per call. Weights are inputs of a compiled graph: an in-place update or a
replaced Parameter recompiles nothing, so every use of a copy first checks that its origin is
unchanged. A copy is found by the origin's storage, offset, shape, strides and dtype; the storage
is known by a weak reference, so that no later one is taken for it. The copy is valid while the
origin's version counter is the same. Writes through `.data` or NumPy do not change that counter,
so on the CPU the values are compared bit by bit as well, which costs one read. On a device that
would stop the stream: there, such writes need `Packs.clear()`. With freeze there is no check.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Packs:
    """Transposed copies of weights, each for as long as the storage of its weight lives."""

    def __init__(self) -> None:
        self.made = 0
        self._packs: WeakKeyDictionary[Any, dict[Any, tuple[int, Tensor]]] = WeakKeyDictionary()

    def transposed(self, w: Tensor, *, freeze: bool = False) -> Tensor:
        """Return w.mT [.., inputs, outputs] as a contiguous tensor, for w [.., outputs, inputs].

        freeze: the caller promises that w never changes; its cached copy is used without a check.
        """
        if w.mT.is_contiguous():
            return w.detach().mT
        if not has_own_memory(w):
            return w.detach().mT.contiguous()
        packs = self._packs.setdefault(w.untyped_storage(), {})
        key = (w.storage_offset(), w.shape, w.stride(), w.dtype)
        version = 0 if w.is_inference() else w._version
        if key in packs:
            then, copy = packs[key]
            if freeze or (then == version and _same_bits(w, copy)):
                return copy
        copy = w.detach().mT.contiguous()
        self.made += 1
        packs[key] = version, copy
        return copy

    def clear(self) -> None:
        """Forget all copies; the next calls make them again."""
        self._packs.clear()

    def __len__(self) -> int:
        return sum(map(len, self._packs.values()))


def has_own_memory(w: Tensor) -> bool:
    """Return whether `w` has a storage with an address, which tensors of lazy devices lack."""
    return w.device.type not in ("xla", "meta") and type(w) in (Tensor, torch.nn.Parameter)


def _same_bits(w: Tensor, copy: Tensor) -> bool:
    """Compare on the CPU, as integers: a NaN equals itself, and -0.0 is not 0.0."""
    if w.device.type != "cpu":
        return True
    integers = _INTEGERS[w.element_size()]
    return torch.equal(w.detach().mT.view(integers), copy.view(integers))


PACKS = Packs()
"""The process's copies, shared by all executors."""
