"""Strided views of HBM tensors, which Beta 1 spells as index expressions, and their arithmetic.

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

from nmm_compiler.codegen.fold_constants import Folder
from nmm_compiler.codegen.trees import NameWriter, parsed
from nmm_compiler.errors import no_beta1_form


def same(a: ast.expr, b: ast.expr) -> bool:
    """Return whether two expressions are spelled alike."""
    return a is b or ast.unparse(a) == ast.unparse(b)


def number(node: ast.AST | None) -> int | None:
    """Return the value of a literal integer, else None."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def plus(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a + b, or what b is spelled minus a of."""
    if isinstance(b, ast.BinOp) and isinstance(b.op, ast.Sub) and same(b.right, a):
        return b.left
    return _folded(ast.BinOp(a, ast.Add(), b))


def times(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a * b."""
    return _folded(ast.BinOp(a, ast.Mult(), b))


def minus(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a - b, or what is left of a where it is spelled b + something."""
    if isinstance(a, ast.BinOp) and isinstance(a.op, ast.Add) and same(a.left, b):
        return a.right
    return _folded(ast.BinOp(a, ast.Sub(), b))


def _folded(operation: ast.BinOp) -> Any:
    return Folder({}).visit(operation)


def subscript(value: ast.expr, indices: Sequence[ast.expr]) -> ast.Subscript:
    """Return value[indices]."""
    one = len(indices) == 1
    index = indices[0] if one else ast.Tuple([*indices], ast.Load())
    return ast.Subscript(value, index, ast.Load())


def indices_of(node: ast.Subscript) -> list[ast.expr]:
    """Return the slices and indices of a subscript."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def quoted(source: str, /, **given: ast.expr) -> Any:
    """Return a piece of source as an expression, with expressions in place of names."""
    return NameWriter(given).visit(parsed(source))


def elements(node: ast.expr) -> list[ast.expr]:
    """Return the elements of a literal tuple."""
    assert isinstance(node, ast.Tuple), f"{ast.unparse(node)} is not spelled as a tuple"
    return node.elts


def keyword(node: object, name: str) -> Any:
    """Return an argument of a call by its keyword, None where there is none."""
    given = node.keywords if isinstance(node, ast.Call) else ()
    return next((one.value for one in given if one.arg == name), None)


METHODS = ("reshape_dim", "permute", "select", "broadcast", "reshape")


@dataclasses.dataclass(frozen=True)
class ViewAxis:
    """An axis of a view: along which dimension of the tensor it goes, and by how many elements.

    dimension: None for an axis of one element.
    """

    size: ast.expr
    dimension: int | None = None
    factor: ast.expr = dataclasses.field(default_factory=lambda: ast.Constant(1))


@dataclasses.dataclass(frozen=True)
class View:
    """A view of `base`: where it starts in each of its dimensions, and its axes in order.

    spread: the shape that it is broadcast to.
    """

    base: ast.expr
    starts: tuple[ast.expr, ...]
    axes: tuple[ViewAxis, ...]
    spread: ast.expr | None = None

    @staticmethod
    def of(base: ast.expr, indices: Sequence[Any]) -> View:
        """Return base[indices]."""
        starts, axes = list(indices), []
        for place, index in enumerate(indices):
            if isinstance(index, ast.Slice):
                if index.lower is None or index.upper is None or index.step is not None:
                    raise no_beta1_form(
                        f"a view of {ast.unparse(base)} with slice {ast.unparse(index)!r}"
                    )
                starts[place] = index.lower
                axes.append(ViewAxis(minus(index.upper, index.lower), place))
        return View(base, tuple(starts), tuple(axes))

    def at(self, indices: Sequence[Any]) -> View:
        """Return view[indices]."""
        if not self.axes:
            return View.of(self.base, (*self.starts, *indices))
        starts, kept = list(self.starts), []
        for axis, index in zip(self.axes, indices, strict=True):
            start = getattr(index, "lower", index)  # of a slice
            if axis.dimension is not None and number(start) != 0:
                starts[axis.dimension] = plus(starts[axis.dimension], times(axis.factor, start))
            if start is not index:
                kept.append(dataclasses.replace(axis, size=minus(index.upper, start)))
        return dataclasses.replace(self, starts=tuple(starts), axes=tuple(kept))

    def split(self, place: int, sizes: Sequence[ast.expr]) -> View:
        """Return the view with an axis as two, the second of them consecutive."""
        axis, (outer, inner) = self.axes[place], sizes
        both = [
            ViewAxis(size, None if number(size) == 1 else axis.dimension, factor)
            for size, factor in ((outer, times(axis.factor, inner)), (inner, axis.factor))
        ]
        axes = (*self.axes[:place], *both, *self.axes[place + 1 :])
        return dataclasses.replace(self, axes=axes)

    def _merged(self, size: ast.expr) -> View:
        """Return the view with its dimensions but the first as one: the tensor has them as one."""
        start: ast.expr = ast.Constant(0)
        length: ast.expr = ast.Constant(1)
        for dimension in reversed(range(1, len(self.starts))):
            own = self.starts[dimension]
            start = plus(times(own, length), start) if number(own) != 0 else start
            size_of = quoted("base.shape[place]", base=self.base, place=ast.Constant(dimension))
            length = times(size_of, length)
        flat = quoted("base.reshape((base.shape[0], length))", base=self.base, length=length)
        return View(flat, (self.starts[0], start), (self.axes[0], ViewAxis(size, 1)))

    def step(self, how: str, arguments: Sequence[Any]) -> View:
        """Return the view that a method gives.

        A reshape makes two axes of the only one, adds an axis of one element behind all, or makes
        one of all axes but the first: these lie behind each other, or the current dialect has no
        such view either.
        """
        sizes = [axis.size for axis in self.axes]
        match how, arguments:
            case "reshape_dim", [place, ast.Tuple([_, _] as parts)]:
                return self.split(place.value, parts)
            case "permute", [ast.Tuple() as order]:
                axes = [self.axes[place] for place in ast.literal_eval(order)]
                return dataclasses.replace(self, axes=tuple(axes))
            case "select", [place, index]:
                indices: list[Any] = [ast.Slice(ast.Constant(0), size) for size in sizes]
                indices[place.value] = index
                return self.at(indices)
            case "broadcast", [place, size]:
                sizes[place.value] = size
                return dataclasses.replace(self, spread=ast.Tuple(sizes, ast.Load()))
            case "reshape", [ast.Tuple([_, _] as parts)] if len(sizes) == 1:
                return self.split(0, parts)
            case "reshape", [ast.Tuple([*parts, ast.Constant(1) as one])] if len(parts) == len(
                sizes
            ) and all(map(same, sizes, parts)):
                return dataclasses.replace(self, axes=(*self.axes, ViewAxis(one)))
            case "reshape", [ast.Tuple([rows, size])] if (
                len(sizes) > 2 and self.plain and same(sizes[0], rows)
            ):
                return self._merged(size)
        raise no_beta1_form(f"the view .{how}({', '.join(map(ast.unparse, arguments))})")

    @property
    def plain(self) -> bool:
        """Whether slices can write the view: one axis a dimension, stride 1, in their order."""
        along = [-1 if axis.dimension is None else axis.dimension for axis in self.axes]
        ones = all(number(axis.factor) == 1 for axis in self.axes)
        return ones and -1 not in along and along == sorted(set(along))

    def spelled(self) -> ast.expr:
        """Return the view as a subscript."""
        indices, plain = list(self.starts), self.plain
        for place, axis in enumerate(self.axes):
            if axis.dimension is None:
                continue
            start = indices[axis.dimension]
            if plain:
                indices[axis.dimension] = ast.Slice(start, plus(start, axis.size))
            else:
                step = times(axis.factor, along(axis.size, place, len(self.axes)))
                indices[axis.dimension] = plus(start, step)
        if plain or len(indices) > 1:
            return subscript(self.base, indices)
        # Beta 1 indexes a tensor of one dimension as a row of two
        row = quoted("base.reshape((1, base.shape[0]))", base=self.base)
        return subscript(row, [ast.Constant(0), *indices])


def along(size: ast.expr, place: int, rank: int) -> ast.expr:
    """Return `nl.arange(size)[:, None]`, the colon in the place of the axis."""
    indices = [ast.Slice() if at == place else ast.Constant(None) for at in range(rank)]
    return subscript(quoted("nl.arange(size)", size=size), indices)


_COMPARISONS: dict[str, Any] = {
    "nl.greater_equal": ast.GtE, "nl.greater": ast.Gt, "nl.less_equal": ast.LtE, "nl.less": ast.Lt,
}  # fmt: skip


def predicate(select: ast.Call, partitions: ast.expr) -> ast.expr:
    """Return the comparison of an affine select."""
    pattern, multiplier = keyword(select, "pattern"), keyword(select, "channel_multiplier")
    comparison = _COMPARISONS[ast.unparse(keyword(select, "cmp_op"))]
    axes = [axis.elts for axis in pattern.elts]
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
