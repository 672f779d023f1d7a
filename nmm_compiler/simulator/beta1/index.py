"""Index expressions of Beta 1, `nl.arange` and `nl.mgrid`, and the masks made of them.

An `Index` is an affine function of the positions in its own shape, const + sum(coeffs[k] * i_k),
which is enough for a strided view. A comparison of two makes a `Mask`. A mask that restricts an
instruction is a box: each comparison cuts one axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import OperandError, UnsupportedInstructionError
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.data import whole

Box = tuple[tuple[int, int], ...]
Part = Box | bool
"""The part of a tile inside a mask: (start, stop) per axis, True for all, False for nothing."""


def full_key(key: Any, rank: int) -> list[Any]:
    """Return a key as a list with an entry for each of `rank` axes, and those that are None."""
    keys = list(key) if isinstance(key, tuple) else [key]
    at = next((n for n, k in enumerate(keys) if k is Ellipsis), len(keys))
    missing = rank - sum(k is not None and k is not Ellipsis for k in keys)
    return keys[:at] + [slice(None)] * missing + keys[at + 1 :]


class Index:
    """const + sum(coeffs[k] * i_k) for i in `shape`; an axis of size 1 has coefficient 0."""

    __slots__ = ("coeffs", "const", "shape")

    def __init__(self, shape: tuple[int, ...], const: int, coeffs: tuple[int, ...]) -> None:
        self.shape = shape
        self.const = const
        self.coeffs = coeffs

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __repr__(self) -> str:
        terms = [f"{a} * i{k}" for k, a in enumerate(self.coeffs) if a]
        return f"Index({' + '.join([str(self.const), *terms])} for {self.shape})"

    def aligned(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (shape, coeffs) with leading axes of size 1 up to `rank`."""
        more = rank - len(self.shape)
        return (1,) * more + self.shape, (0,) * more + self.coeffs

    def part(self, shape: tuple[int, ...], box: Part) -> Index:
        """Return the expression over a box of a tile of `shape`, whose axes it has."""
        if not isinstance(box, tuple):
            return Index(shape, self.const, self.coeffs)
        start = self.const + sum(a * c for (a, _), c in zip(box, self.coeffs, strict=True))
        return Index(tuple(b - a for a, b in box), start, self.coeffs)

    def bounds(self) -> tuple[int, int]:
        """Return the least and the largest value."""
        low = high = self.const
        for size, step in zip(self.shape, self.coeffs, strict=True):
            end = (size - 1) * step
            low += min(end, 0)
            high += max(end, 0)
        return low, high

    def __getitem__(self, key: Any) -> Index:
        shape: list[int] = []
        coeffs: list[int] = []
        const = self.const
        axis = 0
        for k in full_key(key, len(self.shape)):
            if k is None:
                shape.append(1)
                coeffs.append(0)
                continue
            size, step = self.shape[axis], self.coeffs[axis]
            if isinstance(k, slice):
                start, stop, by = k.indices(size)
                const += start * step
                shape.append(len(range(start, stop, by)))
                coeffs.append(step * by if shape[-1] > 1 else 0)
            else:
                number = whole(k)
                if number is None:
                    raise _unsupported(f"an index expression indexed by {type(k).__name__}")
                const += (number % size) * step
            axis += 1
        return Index(tuple(shape), const, tuple(coeffs))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _unsupported(
            "assignment to an index expression; make a tile of it with nisa.iota(expr, dtype)"
        )

    def _plus(self, other: Any, sign: int) -> Any:
        number = whole(other)
        if number is not None:
            return Index(self.shape, self.const + sign * number, self.coeffs)
        if not isinstance(other, Index):
            return NotImplemented
        rank = max(len(self.shape), len(other.shape))
        left, a = self.aligned(rank)
        right, b = other.aligned(rank)
        if any(m != n and 1 not in (m, n) for m, n in zip(left, right, strict=True)):
            raise current().error(
                OperandError, f"index shapes {self.shape} and {other.shape} do not broadcast"
            )
        shape = tuple(max(m, n) for m, n in zip(left, right, strict=True))
        steps = tuple(m + sign * n for m, n in zip(a, b, strict=True))
        return Index(shape, self.const + sign * other.const, steps)

    __add__ = __radd__ = functools.partialmethod(_plus, sign=1)
    __sub__ = functools.partialmethod(_plus, sign=-1)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._plus(other, 1)

    def __neg__(self) -> Index:
        return Index(self.shape, -self.const, tuple(-a for a in self.coeffs))

    def __mul__(self, other: Any) -> Any:
        factor = whole(other)
        if factor is None:
            if isinstance(other, Index):
                raise _unsupported("a product of two index expressions; they must stay affine")
            return NotImplemented
        return Index(self.shape, self.const * factor, tuple(a * factor for a in self.coeffs))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self._quotient(other, "//")

    def __mod__(self, other: Any) -> Any:
        return self - self._quotient(other, "%") * other

    def _quotient(self, other: Any, op: str) -> Index:
        """Return self // other, which must be affine: each term is, or all values are one."""
        factor = whole(other) or 0
        if factor and not any(v % factor for v in (self.const, *self.coeffs)):
            return Index(self.shape, self.const // factor, tuple(a // factor for a in self.coeffs))
        first, last = (bound // factor for bound in self.bounds()) if factor else (0, 1)
        if first != last:
            raise _unsupported(
                f"{self!r} {op} {other!r}, which is not affine; add an axis to the index"
            )
        return Index(self.shape, first, (0,) * len(self.shape))

    def __bool__(self) -> bool:
        raise _no_control_flow()

    def _compare(self, other: Any, op: str) -> Any:
        difference = self._plus(other, -1)
        return difference if difference is NotImplemented else Mask(((difference, op),))

    __lt__ = functools.partialmethod(_compare, op="less")
    __le__ = functools.partialmethod(_compare, op="less_equal")
    __gt__ = functools.partialmethod(_compare, op="greater")
    __ge__ = functools.partialmethod(_compare, op="greater_equal")
    __eq__ = functools.partialmethod(_compare, op="equal")
    __ne__ = functools.partialmethod(_compare, op="not_equal")
    __hash__ = None  # type: ignore[assignment]

    def reshape(self, *shape: Any) -> Index:
        """Return the expression with axes of size 1 added or dropped."""
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        kept = [(s, c) for s, c in zip(self.shape, self.coeffs, strict=True) if s != 1]
        if math.prod(wanted) != math.prod(self.shape) or [s for s in wanted if s != 1] != [
            s for s, _ in kept
        ]:
            raise _unsupported(f"reshape of an index of shape {self.shape} to {wanted}")
        steps = iter([c for _, c in kept])
        return Index(tuple(wanted), self.const, tuple(0 if s == 1 else next(steps) for s in wanted))

    def expand_dims(self, axis: int) -> Index:
        """Return the expression with an axis of size 1 at `axis`."""
        at = axis + len(self.shape) + 1 if axis < 0 else axis
        return self[(slice(None),) * at + (None,)]


class Mask:
    """Comparisons of index expressions with zero that must all hold: (expression, operator)."""

    __slots__ = ("terms",)

    def __init__(self, terms: tuple[tuple[Index, str], ...]) -> None:
        self.terms = terms

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Mask):
            return Mask(self.terms + other.terms)
        if other is True or other is False or type(other).__name__ in ("bool", "bool_"):
            return self if other else False
        return NotImplemented

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        raise _unsupported("`|` of masks; use `&`, or two instructions with a mask each")

    __ror__ = __or__

    def __invert__(self) -> Mask:
        opposite = {
            "less": "greater_equal", "less_equal": "greater", "greater": "less_equal",
            "greater_equal": "less", "equal": "not_equal", "not_equal": "equal",
        }  # fmt: skip
        if len(self.terms) != 1:
            raise _unsupported("`~` of several comparisons; write the opposite comparison")
        ((expression, op),) = self.terms
        return Mask(((expression, opposite[op]),))

    def __bool__(self) -> bool:
        raise _no_control_flow()

    def box(self, shape: tuple[int, ...]) -> Box | None:
        """Return (start, stop) per axis of `shape` where the mask holds; None where nowhere.

        Raises UnsupportedInstructionError for a region that is no box.
        """
        limits = [[0, size] for size in shape]
        for expression, op in self.terms:
            for low in _at_least_zero(expression, op):
                if not _cut(low, limits, shape):
                    return None
        return tuple((a, b) for a, b in limits) if all(a < b for a, b in limits) else None


def _at_least_zero(expression: Index, op: str) -> Iterator[Index]:
    """Yield expressions that are >= 0 where the comparison with 0 holds."""
    if op == "not_equal":
        raise _unsupported("a mask with `!=`, which leaves no box; use `<` or `>`")
    if op in ("greater", "greater_equal", "equal"):
        yield expression - 1 if op == "greater" else expression
    if op in ("less", "less_equal", "equal"):
        yield -expression - 1 if op == "less" else -expression


def _cut(low: Index, limits: list[list[int]], shape: tuple[int, ...]) -> bool:
    """Cut `limits` to where low >= 0; return whether something may be left."""
    least, most = low.bounds()
    if least >= 0:
        return True
    if most < 0:
        return False
    rank = len(shape)
    sizes, steps = low.shape, low.coeffs
    while len(sizes) > rank and sizes[-1] == 1:
        sizes, steps = sizes[:-1], steps[:-1]
    if len(sizes) > rank:
        raise _unsupported(f"a mask of shape {low.shape} for a tile of shape {shape}")
    if len(sizes) < rank:
        # the axes of a mask are those of the tile; what is left out is a block of size 1, or free
        sizes, steps = sizes + (1,) * (rank - len(sizes)), steps + (0,) * (rank - len(steps))
    varying = [k for k, step in enumerate(steps) if step]
    if len(varying) != 1:
        raise _unsupported(
            f"a mask over {len(varying)} axes at once ({low!r} >= 0), which is no box; compare one "
            "index at a time, or use nisa.affine_select"
        )
    (axis,) = varying
    if sizes[axis] != shape[axis]:
        raise _unsupported(f"a mask of shape {low.shape} for a tile of shape {shape}")
    step, const = steps[axis], low.const
    if step > 0:
        limits[axis][0] = max(limits[axis][0], -(const // step))
    else:
        limits[axis][1] = min(limits[axis][1], const // -step + 1)
    return limits[axis][0] < limits[axis][1]


def box_of(mask: Any, shape: tuple[int, ...]) -> Part:
    """Return the box of a mask argument: True for everything, False for nothing."""
    if mask is None or mask is True:
        return True
    if isinstance(mask, Mask):
        found = mask.box(shape)
        if found is None:
            return False
        return True if found == tuple((0, size) for size in shape) else found
    if mask is False or type(mask).__name__ in ("bool", "bool_"):
        return bool(mask)
    raise _unsupported(
        f"mask={type(mask).__name__}; a mask is a comparison of nl.arange expressions (and `&`)"
    )


def common_part(a: Part, b: Part) -> Part:
    """Return what two parts of one tile have in common."""
    if a is True or b is False:
        return b
    if b is True or a is False:
        return a
    assert isinstance(a, tuple)
    assert isinstance(b, tuple)
    both = tuple((max(m[0], n[0]), min(m[1], n[1])) for m, n in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else False


def _unsupported(what: str) -> UnsupportedInstructionError:
    return current().error(  # type: ignore[return-value]
        UnsupportedInstructionError, f"NKI Beta 1: {what}"
    )


def _no_control_flow() -> UnsupportedInstructionError:
    return _unsupported(
        "control flow on an nl.arange or nl.mgrid expression is not supported "
        "(err_control_flow_condition_depending_on_arange); pass it as mask="
    )


def arange(start: Any, stop: Any = None, step: Any = None) -> Index:
    """Return the index of start .. stop; shape (n,)."""
    first, last = (0, start) if stop is None else (start, stop)
    low, high, by = whole(first), whole(last), whole(1 if step is None else step)
    if low is None or high is None or by is None or high <= low or by < 1:
        raise _unsupported(
            f"nl.arange({first!r}, {last!r}); use integers, the first below the last"
        )
    count = len(range(low, high, by))
    return Index((count,), low, (by if count > 1 else 0,))


class Grid(tuple):
    """The result of `nl.mgrid[...]`: one dense index per axis, also as .p (partitions), .x, .y,
    .z."""

    __slots__ = ()

    p = property(lambda self: self[0])
    x = property(lambda self: self[1])
    y = property(lambda self: self[2])
    z = property(lambda self: self[3])


class _MakeGrid:
    """`nl.mgrid`: indexed by slices as `numpy.mgrid` is."""

    def __getitem__(self, key: Any) -> Grid:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(p, slice) and p.stop is not None for p in parts):
            raise _unsupported("nl.mgrid takes slices with an end, nl.mgrid[0:128, 0:512]")
        lines = [arange(p.start or 0, p.stop, p.step) for p in parts]
        shape = tuple(line.shape[0] for line in lines)
        return Grid(
            Index(shape, line.const, tuple(line.coeffs[0] * (j == k) for j in range(len(shape))))
            for k, line in enumerate(lines)
        )


mgrid = _MakeGrid()
