"""Forms: the geometry of views, numbered, so that it is worked out once and not for every tensor.

A kernel allocates thousands of tensors of one shape and takes the same parts of each. Two views of
one form differ only in their storage, and in where they begin in HBM; no check of an instruction
tells them apart. The form of a view and a key give the part's form, so a part of another tensor
takes its shape, strides and region from there.

Views that are like each other may also begin at different bytes of SBUF. That matters only to an
instruction whose operands share a tensor, which `isa/alike.py` tells apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from nmm_compiler.simulator.tensors.data import DynamicSlice
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.trace import Access

NkiTensor = Any  # its file knows this one

_FIXED = frozenset({int, type(None), type, bool})
"""The classes of what a key may consist of, if its part is to be kept."""
_KEPT = 100_000
_NUMBERS = itertools.count(1)
_FORMS: dict[tuple[Any, ...], tuple[int, int]] = {}
_LIKE: dict[tuple[Any, ...], int] = {}
_WHOLE: dict[tuple[Any, ...], Part] = {}
_PARTS: dict[tuple[Any, ...], Part] = {}


class Part:
    """How to make a view: of a whole storage, or by a key into a view of some form.

    offset, start: in HBM from where that view begins; on chip they are the form's own. offset in
    elements, start and extent in bytes.
    """

    __slots__ = (
        "dtype", "extent", "first", "form", "item", "like", "memory", "offset", "pattern", "rows",
        "shape", "special", "start", "strides",
    )  # fmt: skip

    def __init__(self, view: NkiTensor, begin: int) -> None:
        access = view.access()
        self.shape, self.strides, self.dtype = view.shape, view.strides, view.dtype
        self.memory, self.pattern, self.item = access.memory, access.pattern, access.item_bytes
        self.first, self.rows = access.partition_start, access.partitions
        hbm = access.memory == "hbm"
        self.offset = view.offset - begin if hbm else view.offset
        self.start = access.byte_start - begin * self.item if hbm else access.byte_start
        self.extent = access.byte_stop - access.byte_start
        self.special, self.form, self.like = view.special, form_of(view), view.like

    def of(self, kind: Callable[..., NkiTensor], storage: Storage, begin: int) -> NkiTensor:
        """Return the view of `storage`; begin: where the parent begins, in elements, 0 on chip."""
        view = kind(storage, self.shape, self.strides, self.offset + begin, self.dtype)
        start = self.start + begin * self.item
        first = self.first
        view._access = Access(
            storage.identity, self.memory, first, first + self.rows, start, start + self.extent,
            self.pattern, self.dtype, self.item,
        )  # fmt: skip
        view.special, view.form, view.like = self.special, self.form, self.like
        return view


def form_of(view: NkiTensor) -> int:
    """Return the number of a view's geometry; where it begins in HBM does not count.

    A view with runtime addresses gets a number that no other has.
    """
    access = view._access or view.access()
    if view.indirection is not None:
        return next(_NUMBERS)
    storage = view.storage
    memory = access.memory
    key: tuple[Any, ...] = (memory, view.shape, view.strides, view.dtype, storage.constant)
    if memory != "hbm":
        key += (access.partition_start, storage.bytes_per_partition, storage.address,
                storage.shape[0])  # fmt: skip
    exact = (*key, view.offset) if memory != "hbm" else key
    found = _FORMS.get(exact)
    if found is None:
        if len(_FORMS) >= _KEPT:  # numbers are never given twice
            _FORMS.clear()
            _LIKE.clear()
        if memory == "psum":
            key = exact  # its banks tell where a product may lie
        like = _LIKE.setdefault(key, next(_NUMBERS))
        found = _FORMS[exact] = next(_NUMBERS), like
    view.form, view.like = found
    return view.form


def like_of(view: NkiTensor) -> int:
    """Return the number of a view that is equal for views which no check tells apart."""
    form = form_of(view)
    return form if view.indirection is not None else view.like


def numbers_of(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a key consists of, slices taken apart."""
    numbers: list[Any] = []
    for k in key:
        kind = k.__class__
        if kind is slice:
            numbers += k.start, k.stop, k.step
        elif kind is DynamicSlice:
            numbers += DynamicSlice, k.start, k.size
        else:
            numbers += kind, k
    return tuple(numbers)


def part_of(view: NkiTensor, at: tuple[Any, ...]) -> NkiTensor | None:
    """Return the part of a view without runtime addresses, if one of its form is known.

    at: the key as a flat tuple of numbers.
    """
    known = _PARTS.get((view.form or form_of(view), at))
    if known is None:
        return None
    begin = view.offset if view.storage.memory == "hbm" else 0
    return known.of(view.__class__, view.storage, begin)


def remember_part(view: NkiTensor, at: tuple[Any, ...], part: NkiTensor) -> bool:
    """Keep how a part was made, for the views of this form; return whether it may be kept.

    A part by a register, say, may not: the value may change.
    """
    for number in at:
        if number.__class__ not in _FIXED:
            return False
    if len(_PARTS) >= _KEPT:
        _PARTS.clear()
    begin = view.offset if view.storage.memory == "hbm" else 0
    _PARTS[view.form, at] = Part(part, begin)
    return True


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return element strides of a dense tensor."""
    if len(shape) == 2:
        return (shape[1], 1)
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def whole_of(kind: Callable[..., NkiTensor], storage: Storage) -> NkiTensor:
    """Return the view of a whole storage."""
    if storage.address is not None:
        return kind(storage, storage.shape, row_major(storage.shape), 0, storage.dtype)
    key = (storage.memory, storage.shape, storage.dtype, storage.constant)
    known = _WHOLE.get(key)
    if known is not None:
        return known.of(kind, storage, 0)
    view = kind(storage, storage.shape, row_major(storage.shape), 0, storage.dtype)
    if len(_WHOLE) >= _KEPT:
        _WHOLE.clear()
    _WHOLE[key] = Part(view, 0)
    return view
