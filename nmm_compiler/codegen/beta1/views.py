"""Strided views of HBM tensors, which Beta 1 spells as index expressions.

`src[r : r + 128 * t, c : c + n].reshape_dim(0, (t, 128)).permute((1, 0, 2))` becomes
`src[r + 128 * i_t + i_p, c + i_f]`, i_p, i_t and i_f being `nl.arange` along the axes of the view.
A View holds, per dimension of the tensor, its start and the stride of each axis in it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from nmm_compiler.codegen.beta1.expressions import (
    attribute,
    call,
    elements,
    indices_of,
    integer,
    keyword,
    method,
    minus,
    number,
    plus,
    same,
    several,
    subscript,
    times,
)
from nmm_compiler.codegen.printed import text
from nmm_compiler.codegen.tidy import names_used
from nmm_compiler.codegen.trees import Names, assign, name, parsed, root
from nmm_compiler.errors import no_beta1_form

METHODS = ("reshape_dim", "permute", "select", "broadcast", "reshape")
_NAMES = {1: ("i_f",), 2: ("i_p", "i_f"), 3: ("i_p", "i_t", "i_f"), 4: ("i_p", "i_t", "i_s", "i_f")}


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a view: along which dimension of the tensor it goes, and by how many elements.

    dimension: None for an axis of one element.
    """

    size: ast.expr
    dimension: int | None = None
    factor: ast.expr = dataclasses.field(default_factory=lambda: integer(1))


@dataclasses.dataclass(frozen=True)
class View:
    """A view of `base`: where it starts in each dimension, and its axes in their order.

    spellings: slices and indices in the source, of the dimensions that are as they were there.
    spread: the shape that it is broadcast to. whole: of a base that is another tensor in a new
    shape, what it is, to be assigned to the name.
    """

    base: ast.expr
    starts: tuple[ast.expr, ...]
    axes: tuple[Axis, ...]
    spellings: tuple[Any, ...]
    spread: ast.expr | None = None
    whole: ast.expr | None = None

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
        return View(base, tuple(map(_start, indices)), tuple(axes), tuple(indices))

    def at(self, indices: Sequence[Any]) -> View:
        """Return view[indices]."""
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
        starts, spellings = list(self.starts), list(self.spellings)
        if axis.dimension is not None:
            moved = plus(starts[axis.dimension], times(axis.factor, start))
            starts[axis.dimension], spellings[axis.dimension] = moved, None
        return dataclasses.replace(self, starts=tuple(starts), spellings=tuple(spellings))

    def split(self, place: int, sizes: Sequence[ast.expr]) -> View:
        """Return the view with an axis as two, the second of them consecutive."""
        axis, (outer, inner) = self.axes[place], sizes
        both = [
            Axis(size, None if number(size) == 1 else axis.dimension, factor)
            for size, factor in ((outer, times(axis.factor, inner)), (inner, axis.factor))
        ]
        view = self._moved(axis, integer(0))
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
            return dataclasses.replace(self, axes=(*self.axes, Axis(integer(1))))
        if len(sizes) == 2 < len(given) and self.plain and same(given[0], sizes[0]):
            return self._merged(sizes[1])
        return None

    def _merged(self, size: ast.expr) -> View:
        """Return the view with its dimensions but the first as one: the tensor has them as one."""
        shape = attribute(self.base, "shape")
        lengths = [subscript(shape, [integer(d)]) for d in range(len(self.starts))]
        start: ast.expr = integer(0)
        length: ast.expr = integer(1)
        for own, one in zip(self.starts[:0:-1], lengths[:0:-1], strict=True):
            start = plus(times(own, length), start) if number(own) != 0 else start
            length = times(one, length)
        whole = call(attribute(self.base, "reshape"), several(lengths[0], length))
        part = call(parsed("nl.ds"), start, size)
        flat = name(f"flat_{root(self.base)}")
        axes, spellings = (self.axes[0], Axis(size, 1)), (self.spellings[0], part)
        return View(flat, (self.starts[0], start), axes, spellings, whole=whole)

    def permuted(self, order: Sequence[int]) -> View:
        """Return the view with its axes in another order."""
        return dataclasses.replace(self, axes=tuple(self.axes[place] for place in order))

    @property
    def plain(self) -> bool:
        """Whether slices can write the view: one axis a dimension, stride 1, in their order."""
        along = [-1 if axis.dimension is None else axis.dimension for axis in self.axes]
        ones = all(number(axis.factor) == 1 for axis in self.axes)
        return ones and -1 not in along and along == sorted(set(along))

    def spelled(self) -> tuple[ast.expr, dict[str, ast.expr]]:
        """Return the view as a subscript, and the names in it that are new, with their values."""
        made = {} if self.whole is None else {text(self.base): self.whole}
        if self.plain:
            slices = list(self.starts)
            for axis in self.axes:
                assert axis.dimension is not None
                start = self.starts[axis.dimension]
                slices[axis.dimension] = ast.Slice(start, plus(start, axis.size))
            own = zip(self.spellings, slices, strict=True)
            return subscript(self.base, [given or new for given, new in own]), made
        totals = list(self.starts)
        for place, (index, axis) in enumerate(zip(_NAMES[len(self.axes)], self.axes, strict=True)):
            if axis.dimension is not None:
                made[index] = along(axis.size, place, len(self.axes))
                step = times(axis.factor, name(index))
                totals[axis.dimension] = plus(totals[axis.dimension], step)
        base = self.base
        if len(totals) == 1:  # Beta 1 indexes a tensor of one dimension as a row of two
            totals = [integer(0), *totals]
            base = _row(base)
        return subscript(base, totals), made


def _is_slice(index: Any) -> bool:
    return isinstance(index, ast.Slice)


def _start(index: Any) -> Any:
    return index.lower if _is_slice(index) else index


def along(size: ast.expr, place: int, rank: int) -> ast.expr:
    """Return `nl.arange(size)[:, None, None]`, the colon in the place of the axis."""
    indices = [ast.Slice() if at == place else parsed("None") for at in range(rank)]
    return subscript(call(parsed("nl.arange"), size), indices)


def _row(base: ast.expr) -> ast.expr:
    """Return `base.reshape((1, base.shape[0]))`."""
    length = subscript(attribute(base, "shape"), [integer(0)])
    return call(attribute(base, "reshape"), several(integer(1), length))


@dataclasses.dataclass
class Scope:
    """Known names of a function, while its statements are read in order.

    views: names that stand for views. values: what other names were assigned last.
    """

    views: dict[str, View] = dataclasses.field(default_factory=dict)
    values: dict[str, ast.expr | None] = dataclasses.field(default_factory=dict)

    def view(self, node: ast.expr) -> View | None:
        """Return the view that an expression denotes, or None."""
        if isinstance(node, ast.Name):
            return self.views.get(node.id)
        if isinstance(node, ast.Subscript):
            indices = indices_of(node)
            view = self.view(node.value)
            if view is not None:
                return view.at(indices)
            sliced = any(isinstance(index, ast.Slice) for index in indices)
            return View.of(node.value, indices) if sliced else None
        found = method(node)
        if found is None or found[1] not in METHODS:
            return None
        receiver, how, arguments = found
        view = self.view(receiver)
        part = self.values.get(receiver.id) if isinstance(receiver, ast.Name) else None
        if view is None and isinstance(part, ast.Subscript):  # of a tile, and viewed here only
            view = self.view(part)
        if view is not None:
            return self._step(view, how, arguments)
        if how != "reshape":
            return None
        # a tensor of one dimension, reshaped as a whole
        return View.of(node, [ast.Slice(integer(0), size) for size in elements(arguments[0])])

    def _step(self, view: View, how: str, arguments: Sequence[ast.expr]) -> View:
        if how == "reshape_dim" and len(elements(arguments[1])) == 2:
            return view.split(self._constant(arguments[0]), elements(arguments[1]))
        if how == "permute":
            return view.permuted([self._constant(place) for place in elements(arguments[0])])
        if how == "select":
            indices: list[Any] = [ast.Slice(integer(0), axis.size) for axis in view.axes]
            indices[self._constant(arguments[0])] = arguments[1]
            return view.at(indices)
        reshaped = view.reshaped(elements(arguments[0])) if how == "reshape" else None
        if reshaped is not None:
            return reshaped
        if how == "broadcast":
            sizes = [axis.size for axis in view.axes]
            sizes[self._constant(arguments[0])] = arguments[1]
            return dataclasses.replace(view, spread=several(*sizes))
        raise no_beta1_form(f"the view .{how}({', '.join(map(text, arguments))})")

    def _constant(self, node: ast.expr) -> int:
        found = number(node)
        if found is None and isinstance(node, ast.Name):
            found = number(self.values.get(node.id))
        if found is None:
            raise no_beta1_form(f"a view along dimension {text(node)}, which is no constant")
        return found


class IndexNames:
    """The names of index expressions in one function, while its statements are written in order.

    held: what each name was assigned last. new: what those of the present statement stand for.
    """

    def __init__(self) -> None:
        self.held: dict[str, ast.expr] = {}
        self.new: dict[str, ast.expr] = {}

    def change(self, names: set[str]) -> None:
        """Note that these names hold something else: what was made of them is made again."""
        self.held = {n: value for n, value in self.held.items() if not names_used([value]) & names}

    def taken(self, values: dict[str, ast.expr]) -> dict[str, ast.expr]:
        """Return the names for these values, with a number for those that stand for others."""
        names: dict[str, ast.expr] = {}
        for index, value in values.items():
            own, place = index, 1
            while text(self.new.setdefault(own, value)) != text(value):
                place += 1
                own = f"{index}{place}"
            names[index] = name(own)
        return names

    def spelled(self, view: View) -> Any:
        """Return a view as an expression."""
        node, values = view.spelled()
        return Names(self.taken(values)).visit(node)

    def assignments(self) -> list[Any]:
        """End a statement; return assignments of its names that do not hold their values yet."""
        made = []
        for index, value in self.new.items():
            if index not in self.held or text(self.held[index]) != text(value):
                self.held[index] = value
                made.append(assign(index, value))
        self.new = {}
        return made


_COMPARISONS: dict[str, Any] = {
    "nl.greater_equal": ast.GtE, "nl.greater": ast.Gt, "nl.less_equal": ast.LtE, "nl.less": ast.Lt,
}  # fmt: skip


def predicate(select: ast.Call, partitions: ast.expr) -> tuple[ast.expr, dict[str, ast.expr]]:
    """Return the comparison of an affine select, and the index names in it with their values."""
    pattern, multiplier = keyword(select, "pattern"), keyword(select, "channel_multiplier")
    compared = keyword(select, "cmp_op")
    comparison = _COMPARISONS.get(text(compared)) if compared is not None else None
    if not isinstance(pattern, ast.List) or multiplier is None or comparison is None:
        raise no_beta1_form("nisa.affine_select without a spelled pattern and comparison")
    rows = [_list(row) for row in pattern.elts]
    factors = [multiplier, *(factor for factor, _ in rows)]
    sizes = [partitions, *(size for _, size in rows)]
    total = keyword(select, "offset") or integer(0)
    used: dict[str, ast.expr] = {}
    # an axis without a factor is there all the same: the comparison has the shape of the tile
    for place, (index, factor) in enumerate(zip(_NAMES[len(sizes)], factors, strict=True)):
        used[index] = along(sizes[place], place, len(sizes))
        total = _added(total, factor, name(index))
    return ast.Compare(total, [comparison()], [integer(0)]), used


def _list(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.List) or len(node.elts) != 2:
        raise no_beta1_form(f"nisa.affine_select with {text(node)} in its pattern")
    return node.elts


def _added(total: ast.expr, factor: ast.expr, index: ast.expr) -> ast.expr:
    if isinstance(factor, ast.UnaryOp) and isinstance(factor.op, ast.USub):
        return ast.BinOp(total, ast.Sub(), times(factor.operand, index))
    return plus(total, times(factor, index))
