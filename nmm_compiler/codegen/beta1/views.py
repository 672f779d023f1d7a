"""Strided views of HBM tensors, which Beta 1 spells as index expressions.

`src[r : r + 128 * t, c : c + n].reshape_dim(0, (t, 128)).permute((1, 0, 2))` becomes
`src[r + i_p + 128 * i_t, c + i_f]`, i_p being `nl.arange(128)[:, None, None]`, and i_t and i_f the
`nl.arange` of the other axes. A View holds, per dimension of the tensor, its start and the stride
of each axis in it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from nmm_compiler.codegen.beta1.expressions import (
    keyword,
    minus,
    number,
    plus,
    quoted,
    same,
    subscript,
    times,
)
from nmm_compiler.codegen.printed import text
from nmm_compiler.errors import no_beta1_form

METHODS = ("reshape_dim", "permute", "select", "broadcast", "reshape")


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a view: along which dimension of the tensor it goes, and by how many elements.

    dimension: None for an axis of one element.
    """

    size: ast.expr
    dimension: int | None = None
    factor: ast.expr = dataclasses.field(default_factory=lambda: ast.Constant(1))


@dataclasses.dataclass(frozen=True)
class View:
    """A view of `base`: an index for each of its dimensions, and the axes of the view in order.

    indices: as they are in the source; of a slice that was moved or split, where it starts.
    spread: the shape that it is broadcast to.
    """

    base: ast.expr
    indices: tuple[Any, ...]
    axes: tuple[Axis, ...]
    spread: ast.expr | None = None

    @staticmethod
    def of(base: ast.expr, indices: Sequence[Any]) -> View:
        """Return base[indices]."""
        axes = []
        for place, index in enumerate(indices):
            if not _is_slice(index):
                continue
            if index.lower is None or index.upper is None or index.step is not None:
                raise no_beta1_form(f"a view of {text(base)} with slice {text(index)!r}")
            axes.append(Axis(minus(index.upper, index.lower), place))
        return View(base, tuple(indices), tuple(axes))

    def at(self, indices: Sequence[Any]) -> View:
        """Return view[indices]."""
        if not self.axes:
            return View.of(self.base, (*self.indices, *indices))
        view, kept = self, []
        for axis, index in zip(self.axes, indices, strict=True):
            if not _is_slice(index):
                view = view._moved(axis, index)
                continue
            size = minus(index.upper, index.lower)
            whole = number(index.lower) == 0 and same(size, axis.size)
            view = view if whole else view._moved(axis, index.lower)
            kept.append(axis if whole else dataclasses.replace(axis, size=size))
        return dataclasses.replace(view, axes=tuple(kept))

    def _moved(self, axis: Axis, start: ast.expr) -> View:
        """Return the view from `start` of an axis on."""
        indices = list(self.indices)
        if axis.dimension is not None:
            before = _start(indices[axis.dimension])
            indices[axis.dimension] = plus(before, times(axis.factor, start))
        return dataclasses.replace(self, indices=tuple(indices))

    def split(self, place: int, sizes: Sequence[ast.expr]) -> View:
        """Return the view with an axis as two, the second of them consecutive."""
        axis, (outer, inner) = self.axes[place], sizes
        both = [
            Axis(size, None if number(size) == 1 else axis.dimension, factor)
            for size, factor in ((outer, times(axis.factor, inner)), (inner, axis.factor))
        ]
        view = self._moved(axis, ast.Constant(0))
        return dataclasses.replace(view, axes=(*self.axes[:place], *both, *self.axes[place + 1 :]))

    def reshaped(self, sizes: Sequence[ast.expr]) -> View | None:
        """Return the view in another shape, or None where index expressions have no form for it.

        One axis becomes two, an axis of one element comes last, or all axes but the first become
        one: these lie behind each other, or the current dialect has no such view either.
        """
        given = [axis.size for axis in self.axes]
        if len(given) == 1 and len(sizes) == 2:
            return self.split(0, sizes)
        longer = len(sizes) == len(given) + 1 and number(sizes[-1]) == 1
        if longer and all(map(same, given, sizes)):
            return dataclasses.replace(self, axes=(*self.axes, Axis(ast.Constant(1))))
        if len(sizes) == 2 < len(given) and self.plain and same(given[0], sizes[0]):
            return self._merged(sizes[1])
        return None

    def _merged(self, size: ast.expr) -> View:
        """Return the view with its dimensions but the first as one: the tensor has them as one."""
        start: ast.expr = ast.Constant(0)
        length: ast.expr = ast.Constant(1)
        for dimension in reversed(range(1, len(self.indices))):
            own = _start(self.indices[dimension])
            start = plus(times(own, length), start) if number(own) != 0 else start
            size_of = quoted("base.shape[place]", base=self.base, place=ast.Constant(dimension))
            length = times(size_of, length)
        flat = quoted("base.reshape((base.shape[0], length))", base=self.base, length=length)
        return View(flat, (self.indices[0], start), (self.axes[0], Axis(size, 1)))

    def step(self, how: str, arguments: Sequence[ast.expr]) -> View:
        """Return the view that a method gives."""
        reshaped: View | None = None
        match how, arguments:
            case "reshape_dim", [place, ast.Tuple([_, _] as parts)]:
                reshaped = self.split(_constant(place), parts)
            case "permute", [ast.Tuple(order)]:
                axes = [self.axes[_constant(place)] for place in order]
                reshaped = dataclasses.replace(self, axes=tuple(axes))
            case "select", [place, index]:
                indices: list[Any] = [ast.Slice(ast.Constant(0), axis.size) for axis in self.axes]
                indices[_constant(place)] = index
                reshaped = self.at(indices)
            case "reshape", [ast.Tuple(shape)]:
                reshaped = self.reshaped(shape)
            case "broadcast", [place, size]:
                sizes = [axis.size for axis in self.axes]
                sizes[_constant(place)] = size
                reshaped = dataclasses.replace(self, spread=ast.Tuple(sizes, ast.Load()))
        if reshaped is None:
            raise no_beta1_form(f"the view .{how}({', '.join(map(text, arguments))})")
        return reshaped

    @property
    def plain(self) -> bool:
        """Whether slices can write the view: one axis a dimension, stride 1, in their order."""
        along = [-1 if axis.dimension is None else axis.dimension for axis in self.axes]
        ones = all(number(axis.factor) == 1 for axis in self.axes)
        return ones and -1 not in along and along == sorted(set(along))

    def spelled(self) -> ast.expr:
        """Return the view as a subscript."""
        indices = list(self.indices)
        if self.plain:
            for axis in self.axes:
                assert axis.dimension is not None  # of no plain view
                start = indices[axis.dimension]
                if not _is_slice(start):
                    indices[axis.dimension] = ast.Slice(start, plus(start, axis.size))
            return subscript(self.base, indices)
        indices = list(map(_start, indices))
        for place, axis in enumerate(self.axes):
            if axis.dimension is not None:
                step = times(axis.factor, along(axis.size, place, len(self.axes)))
                indices[axis.dimension] = plus(indices[axis.dimension], step)
        if len(indices) > 1:
            return subscript(self.base, indices)
        # Beta 1 indexes a tensor of one dimension as a row of two
        row = quoted("base.reshape((1, base.shape[0]))", base=self.base)
        return subscript(row, [ast.Constant(0), *indices])


def _is_slice(index: Any) -> bool:
    return isinstance(index, ast.Slice)


def _start(index: Any) -> Any:
    return index.lower if _is_slice(index) else index


def along(size: ast.expr, place: int, rank: int) -> ast.expr:
    """Return `nl.arange(size)[:, None]`, the colon in the place of the axis."""
    indices = [ast.Slice() if at == place else ast.Constant(None) for at in range(rank)]
    return subscript(quoted("nl.arange(size)", size=size), indices)


def _constant(node: ast.expr) -> int:
    found = number(node)
    if found is None:
        raise no_beta1_form(f"a view along dimension {text(node)}, which is no constant")
    return found


_COMPARISONS: dict[str, Any] = {
    "nl.greater_equal": ast.GtE, "nl.greater": ast.Gt, "nl.less_equal": ast.LtE, "nl.less": ast.Lt,
}  # fmt: skip


def predicate(select: ast.Call, partitions: ast.expr) -> ast.expr:
    """Return the comparison of an affine select."""
    pattern, multiplier = keyword(select, "pattern"), keyword(select, "channel_multiplier")
    compared = keyword(select, "cmp_op")
    comparison = _COMPARISONS.get(text(compared)) if compared is not None else None
    axes: list[Any] = [getattr(axis, "elts", ()) for axis in getattr(pattern, "elts", ())]
    if set(map(len, axes)) != {2} or multiplier is None or comparison is None:
        raise no_beta1_form("nisa.affine_select without a spelled pattern and comparison")
    total = keyword(select, "offset") or ast.Constant(0)
    rows = [(multiplier, partitions), *axes]
    # an axis without a factor is there all the same: the comparison has the shape of the tile
    for place, (factor, size) in enumerate(rows):
        total = _added(total, factor, along(size, place, len(rows)))
    return ast.Compare(total, [comparison()], [ast.Constant(0)])


def _added(total: ast.expr, factor: ast.expr, index: ast.expr) -> ast.expr:
    if isinstance(factor, ast.UnaryOp) and isinstance(factor.op, ast.USub):
        return ast.BinOp(total, ast.Sub(), times(factor.operand, index))
    return plus(total, times(factor, index))
