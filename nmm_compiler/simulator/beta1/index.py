"""Index expressions of Beta 1, `nl.arange` and `nl.mgrid`, and the masks made of them.

Both are NumPy arrays: an `Index` of positions, a `Mask` of where its comparisons hold. So NumPy
broadcasts, adds, cuts and compares them. A strided view needs an index that is affine in the places
(i0, i1, ...) of its own shape, const + sum(steps[k] * i_k), and an instruction needs a mask that is
a box. `affine` and `box_of` find either in the array, and refuse an array that has none.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    NmmError,
    OperandError,
    SimulationError,
    UnsupportedInstructionError as Unsupported,
)
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.registers import whole

Shape = tuple[int, ...]
Affine = tuple[int, Shape]
"""(const, steps) of an index."""
Box = tuple[range, ...]
Part = Box | None
"""The part of a tile inside a mask: the places of each axis, None for all, () for nothing."""
_OPERATORS = {"add": "+", "subtract": "-", "negative": "-", "multiply": "*", "floor_divide": "//",
              "remainder": "%"}  # fmt: skip
_COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")


def fail(kind: type[SimulationError], message: str) -> NmmError:
    """Return an error of `kind` at the kernel's current line."""
    return current().error(kind, f"NKI Beta 1: {message}")


def need(holds: object, message: str, kind: type[SimulationError] = OperandError) -> None:
    """Refuse what does not hold, at the kernel's current line."""
    if not holds:
        raise fail(kind, message)


def full_key(key: Any, rank: int) -> list[Any]:
    """Return a key as a list with an entry for each of `rank` axes, and those that are None."""
    keys = list(key) if isinstance(key, tuple) else [key]
    at = next((n for n, k in enumerate(keys) if k is Ellipsis), len(keys))
    missing = rank - sum(k is not None and k is not Ellipsis for k in keys)
    return keys[:at] + [slice(None)] * missing + keys[at + 1 :]


def whole_box(shape: Shape) -> Box:
    """Return the box that is all of a tile."""
    return tuple(map(range, shape))


def bounds(line: Affine, box: Box) -> tuple[int, int]:
    """Return the least and the largest value of an affine index in a box."""
    const, steps = line
    ends = [(step * axis[0], step * axis[-1]) for step, axis in zip(steps, box, strict=True)]
    return const + sum(map(min, ends)), const + sum(map(max, ends))


def common_shape(*shapes: Shape) -> Shape:
    """Return the shape that shapes of indices broadcast to."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        shown = " and ".join(map(str, shapes))
        raise fail(OperandError, f"index shapes {shown} do not broadcast") from None


class _Lazy(np.ndarray):
    """An array that the compiler knows as an expression only."""

    terms: tuple[tuple[str, Any, Any], ...] = ()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Return what NumPy makes of index expressions, masks and integers."""
        name, others = ufunc.__name__, [v for v in inputs if not isinstance(v, (_Lazy, np.bool_))]
        if method != "__call__" or options or None in map(whole, others):
            return NotImplemented
        shape = common_shape(*map(np.shape, inputs))
        found = np.broadcast_to(
            ufunc(*(_varying(v) if isinstance(v, _Lazy) else v for v in inputs)), shape
        )
        masks = [v for v in inputs if isinstance(v, Mask)]
        if masks or name in _COMPARISONS:
            need(
                not masks or name in ("bitwise_and", "logical_and"),
                f"np.{name} of masks; use `&`, or two instructions with a mask each",
                Unsupported,
            )
            mask: Mask = np.asarray(found, np.bool_).view(Mask)
            mask.terms = tuple(term for v in masks for term in v.terms) or ((name, *inputs),)
            return mask
        need(
            name in _OPERATORS,
            f"np.{name} of an index expression; use +, -, *, // and %",
            Unsupported,
        )
        index: Index = found.view(Index)
        linear = name in ("add", "subtract", "negative") or (name == "multiply" and others)
        if not linear and not _is_affine(index):
            shown = f" {_OPERATORS[name]} ".join(map(repr, inputs))
            raise fail(Unsupported, f"{shown}, which is not affine; add an axis to the index")
        return index

    def __bool__(self) -> bool:
        raise fail(
            Unsupported,
            "control flow on an nl.arange or nl.mgrid expression is not supported "
            "(err_control_flow_condition_depending_on_arange); pass it as mask=",
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        raise fail(
            Unsupported,
            "assignment to an index expression; make a tile of it with nisa.iota(expr, dtype)",
        )


class Index(_Lazy):
    """The positions that an index expression takes."""

    def __repr__(self) -> str:
        const, steps = affine(self)
        terms = [str(const), *(f"{step} * i{k}" for k, step in enumerate(steps) if step)]
        return f"Index({' + '.join(terms)} for {self.shape})"


class Mask(_Lazy):
    """Where comparisons of index expressions hold; terms: (operator, left, right) of each."""


def _varying(array: _Lazy) -> np.ndarray:
    """Return an array with size 1 for each axis over which it repeats, as one of mgrid does."""
    return array.view(np.ndarray)[tuple(slice(None if step else 1) for step in array.strides)]


def affine(index: np.ndarray) -> Affine:
    """Return an index as a function of its places; it has no step along an axis of size 1."""
    values, origin = index.view(np.ndarray), (0,) * index.ndim
    const = int(values[origin])
    steps = (
        int(values[*origin[:axis], 1, *origin[axis + 1 :]]) - const if size > 1 and step else 0
        for axis, (size, step) in enumerate(zip(values.shape, values.strides, strict=True))
    )
    return const, tuple(steps)


def _is_affine(index: Index) -> bool:
    """Return whether an index is an integer and affine in its places."""
    values = _varying(index)
    const, steps = affine(values)
    lines = np.ogrid[tuple(slice(size) for size in values.shape)]
    found = sum((s * line for s, line in zip(steps, lines, strict=True)), const)
    return index.dtype.kind == "i" and bool((values == found).all())


def box_of(mask: Any, shape: Shape) -> Part:
    """Return the part of a tile of `shape` in a mask argument.

    Raises UnsupportedInstructionError for a region that is no box.
    """
    if mask is None or isinstance(mask, (bool, np.bool_)):
        return None if mask is None or mask else ()
    need(
        isinstance(mask, Mask),
        f"mask={type(mask).__name__}; a mask is a comparison of nl.arange expressions (and `&`)",
        Unsupported,
    )
    holds = _varying(mask)
    need(
        "not_equal" not in (operator for operator, _, _ in mask.terms),
        "a mask with `!=`, which leaves no box; use `<` or `>`",
        Unsupported,
    )
    places = np.argwhere(holds)
    if len(places) in (0, holds.size):
        return None if len(places) else ()
    # the axes of a mask are those of the tile; what is left out is a block of size 1, or free
    sizes = (*holds.shape, *(1,) * (len(shape) - holds.ndim))
    need(
        all(n in (1, m) for n, m in itertools.zip_longest(sizes, shape, fillvalue=1)),
        f"a mask of shape {mask.shape} for a tile of shape {shape}",
        Unsupported,
    )
    spans = [*map(range, places.min(axis=0).tolist(), (places.max(axis=0) + 1).tolist())]
    need(
        math.prod(map(len, spans)) == len(places),
        f"a mask over {sum(size > 1 for size in sizes)} axes at once, which is no box; "
        "compare one index at a time, or use nisa.affine_select",
        Unsupported,
    )
    return tuple(
        range(m) if n == 1 else spans[d] for d, (n, m) in enumerate(zip(sizes, shape, strict=False))
    )


def common_part(a: Part, b: Part) -> Part:
    """Return what two parts of one tile have in common."""
    if a is None or b is None:
        return b if a is None else a
    both = tuple(
        range(max(m.start, n.start), min(m.stop, n.stop)) for m, n in zip(a, b, strict=False)
    )
    return both if all(both) else ()


def carried(part: Part, over: Shape, shape: Shape) -> Part:
    """Return the part of a result for that of its operands `over`; other dimensions are whole."""
    if not part:
        return part
    every = whole_box(shape)
    rows = part[:1] if shape[0] == over[0] else every[:1]
    free = part[1:] if shape[1:] == over[1:] else every[1:]
    return (*rows, *free)


def arange(start: Any, stop: Any = None, step: Any = None) -> Index:
    """Return the index of start .. stop; shape (n,)."""
    first, last = (0, start) if stop is None else (start, stop)
    low, high, by = whole(first), whole(last), whole(1 if step is None else step)
    if low is None or high is None or by is None or high <= low or by < 1:
        raise fail(
            Unsupported, f"nl.arange({first!r}, {last!r}); use integers, the first below the last"
        )
    return np.arange(low, high, by).view(Index)


class IndexGrid(tuple):
    """The result of `nl.mgrid[...]`: one dense index per axis, also as .p (partitions), .x, .y,
    .z."""

    __slots__ = ()

    p = property(lambda self: self[0])
    x = property(lambda self: self[1])
    y = property(lambda self: self[2])
    z = property(lambda self: self[3])


class _MakeGrid:
    """`nl.mgrid`: indexed by slices as `numpy.mgrid` is."""

    def __getitem__(self, key: Any) -> IndexGrid:
        parts = key if isinstance(key, tuple) else (key,)
        need(
            all(isinstance(p, slice) and p.stop is not None for p in parts),
            "nl.mgrid takes slices with an end, nl.mgrid[0:128, 0:512]",
            Unsupported,
        )
        lines = np.ix_(*(arange(p.start or 0, p.stop, p.step).view(np.ndarray) for p in parts))
        return IndexGrid(line.view(Index) for line in np.broadcast_arrays(*lines))


mgrid = _MakeGrid()
