"""Strided views of HBM tensors, which Beta 1 spells as index expressions.

`src[r : r + 128 * t, c : c + n].reshape_dim(0, (t, 128)).permute((1, 0, 2))` becomes
`src[r + 128 * i_t + i_p, c + i_f]`, i_p, i_t and i_f being `nl.arange` along the axes of the view.
A View holds, per dimension of the tensor, its start and the stride of each axis in it.
"""

# libcst names its visitor methods after node classes.

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import (
    Expression,
    elements,
    integer,
    method,
    minus,
    number,
    parsed,
    plus,
    root,
    same,
    span,
    subscript,
    text,
    times,
)
from nmm_compiler.codegen.beta1.facts import keyword
from nmm_compiler.codegen.tidy import names_used
from nmm_compiler.codegen.trees import Names, bound, only_statement
from nmm_compiler.errors import no_beta1_form

METHODS = ("reshape_dim", "permute", "select", "broadcast", "reshape")
_NAMES = {1: ("i_f",), 2: ("i_p", "i_f"), 3: ("i_p", "i_t", "i_f"), 4: ("i_p", "i_t", "i_s", "i_f")}


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """An axis of a view."""

    size: Expression


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A dimension of the tensor: start + sum(factor * axis).

    spelled: its slice or index in the source, while the view still has that one.
    """

    start: Expression
    terms: tuple[tuple[Axis, Expression], ...]
    spelled: Any = None


@dataclasses.dataclass(frozen=True)
class View:
    """A view of `base`: its dimensions, and its axes in their order.

    flat: the base has one dimension. spread: the shape that it is broadcast to. whole: of a base
    that is another tensor in a new shape, what it is, to be assigned to the name.
    """

    base: Expression
    dimensions: tuple[Dimension, ...]
    axes: tuple[Axis, ...]
    flat: bool = False
    spread: Expression | None = None
    whole: Expression | None = None

    @staticmethod
    def of(base: Expression, indices: Sequence[Any]) -> View:
        """Return base[indices]."""
        dimensions, axes = [], []
        for index in indices:
            if isinstance(index, cst.Index):
                dimensions.append(Dimension(index.value, (), index))
                continue
            if index.lower is None or index.upper is None or index.step is not None:
                raise no_beta1_form(f"a view of {text(base)} with slice {text(index)!r}")
            axes.append(Axis(minus(index.upper, index.lower)))
            dimensions.append(Dimension(index.lower, ((axes[-1], integer(1)),), index))
        return View(base, tuple(dimensions), tuple(axes), flat=len(indices) == 1)

    def at(self, indices: Sequence[Any]) -> View:
        """Return view[indices]."""
        view = self
        kept = []
        for axis, index in zip(self.axes, indices, strict=True):
            if isinstance(index, cst.Index):
                view = view._moved(axis, index.value, None)
                continue
            size = minus(index.upper, index.lower)
            if number(index.lower) == 0 and same(size, axis.size):
                kept.append(axis)
                continue
            kept.append(Axis(size))
            view = view._moved(axis, index.lower, kept[-1])
        return dataclasses.replace(view, axes=tuple(kept))

    def _moved(self, axis: Axis, start: Expression, other: Axis | None) -> View:
        """Return the view with `other` for `axis`, from `start` on."""
        dimensions = []
        for dimension in self.dimensions:
            factors = dict(dimension.terms)
            if axis in factors:
                terms = [(other if a is axis else a, f) for a, f in dimension.terms]
                dimension = Dimension(
                    plus(dimension.start, times(factors[axis], start)),
                    tuple((a, f) for a, f in terms if a is not None),
                )
            dimensions.append(dimension)
        return dataclasses.replace(self, dimensions=tuple(dimensions))

    def split(self, place: int, sizes: Sequence[Expression]) -> View:
        """Return the view with an axis as two, the second of them consecutive."""
        axis = self.axes[place]
        outer, inner = (Axis(size) for size in sizes)
        dimensions = []
        for dimension in self.dimensions:
            terms: list[tuple[Axis, Expression]] = []
            for a, factor in dimension.terms:
                if a is not axis:
                    terms.append((a, factor))
                    continue
                # an axis of one element moves nothing
                if number(outer.size) != 1:
                    terms.append((outer, times(factor, inner.size)))
                if number(inner.size) != 1:
                    terms.append((inner, factor))
            changed = any(a is axis for a, _ in dimension.terms)
            dimensions.append(Dimension(dimension.start, tuple(terms)) if changed else dimension)
        axes = (*self.axes[:place], outer, inner, *self.axes[place + 1 :])
        return dataclasses.replace(self, dimensions=tuple(dimensions), axes=axes)

    def reshaped(self, sizes: Sequence[Expression]) -> View | None:
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

    def _merged(self, size: Expression) -> View:
        """Return the view with its dimensions but the first as one: the tensor has them as one."""
        first, *others = self.dimensions
        shape = cst.Attribute(self.base, cst.Name("shape"))
        lengths = [
            subscript(shape, [cst.Index(integer(place))]) for place in range(len(self.dimensions))
        ]
        start: Expression = integer(0)
        length: Expression = integer(1)
        for dimension, one in zip(reversed(others), reversed(lengths[1:]), strict=True):
            if number(dimension.start) != 0:
                start = plus(times(dimension.start, length), start)
            length = times(one, length)
        whole = cst.Call(
            cst.Attribute(self.base, cst.Name("reshape")),
            [cst.Arg(cst.Tuple([cst.Element(lengths[0]), cst.Element(length)]))],
        )
        axis = Axis(size)
        part = cst.Index(cst.Call(parsed("nl.ds"), [cst.Arg(start), cst.Arg(size)]))
        merged = Dimension(start, ((axis, integer(1)),), part)
        name = cst.Name(f"flat_{root(self.base)}")
        return View(name, (first, merged), (self.axes[0], axis), whole=whole)

    def permuted(self, order: Sequence[int]) -> View:
        """Return the view with its axes in another order."""
        return dataclasses.replace(self, axes=tuple(self.axes[place] for place in order))

    @property
    def plain(self) -> bool:
        """Whether slices can write the view: one axis a dimension, stride 1, in their order."""
        axes = [a for d in self.dimensions for a, _ in d.terms]
        return axes == list(self.axes) and all(
            len(d.terms) < 2 and all(number(f) == 1 for _, f in d.terms) for d in self.dimensions
        )

    def spelled(self) -> tuple[Expression, dict[str, Expression]]:
        """Return the view as a subscript, and the names in it that are new, with their values."""
        made: dict[str, Expression] = {}
        if self.whole is not None:
            made[text(self.base)] = self.whole
        if self.plain:
            slices = [
                d.spelled or (span(d.start, plus(d.start, d.terms[0][0].size)) if d.terms
                              else cst.Index(d.start))
                for d in self.dimensions
            ]  # fmt: skip
            return subscript(self.base, slices), made
        names = dict(zip(self.axes, index_names(len(self.axes)), strict=True))
        used: dict[str, Expression] = {}
        indices: list[cst.BaseSlice] = []
        for dimension in self.dimensions:
            total = dimension.start
            for axis in self.axes:
                for a, factor in dimension.terms:
                    if a is axis:
                        used[names[a]] = along(axis.size, self.axes.index(axis), len(self.axes))
                        total = plus(total, times(factor, cst.Name(names[a])))
            indices.append(cst.Index(total))
        base = self.base
        if self.flat:  # Beta 1 indexes a tensor of one dimension as a row of two
            indices = [cst.Index(integer(0)), *indices]
            base = _row(base)
        made |= {name: used[name] for name in names.values() if name in used}
        return subscript(base, indices), made


def index_names(rank: int) -> tuple[str, ...]:
    """Return the names of the indices along so many axes."""
    return _NAMES[rank]


def along(size: Expression, place: int, rank: int) -> Expression:
    """Return `nl.arange(size)[:, None, None]`, the colon in the place of the axis."""
    indices: list[cst.BaseSlice] = [
        cst.Slice(None, None) if at == place else cst.Index(cst.Name("None")) for at in range(rank)
    ]
    return subscript(cst.Call(parsed("nl.arange"), [cst.Arg(size)]), indices)


def _row(base: Expression) -> Expression:
    """Return `base.reshape((1, base.shape[0]))`."""
    length = subscript(cst.Attribute(base, cst.Name("shape")), [cst.Index(integer(0))])
    shape = cst.Tuple([cst.Element(integer(1)), cst.Element(length)])
    return cst.Call(cst.Attribute(base, cst.Name("reshape")), [cst.Arg(shape)])


@dataclasses.dataclass
class Scope:
    """Known names of a function, while its statements are read in order.

    views: names that stand for views. constants: names of integers. helpers: functions that return
    a view of an argument.
    """

    helpers: Mapping[str, cst.FunctionDef]
    views: dict[str, View] = dataclasses.field(default_factory=dict)
    constants: dict[str, int] = dataclasses.field(default_factory=dict)

    def view(self, node: Expression) -> View | None:
        """Return the view that an expression denotes, or None."""
        if isinstance(node, cst.Name):
            return self.views.get(node.value)
        if isinstance(node, cst.Subscript):
            indices = [element.slice for element in node.slice]
            view = self.view(node.value)
            if view is not None:
                return view.at(indices)
            sliced = any(isinstance(index, cst.Slice) for index in indices)
            return View.of(node.value, indices) if sliced else None
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
            helper = self.helpers.get(node.func.value)
            return self.view(_inlined(node, helper)) if helper is not None else None
        called = method(node)
        if called is None or called[1] not in METHODS:
            return None
        receiver, name, arguments = called
        view = self.view(receiver)
        if view is not None:
            return self._step(view, name, arguments)
        if name != "reshape":
            return None
        # a tensor of one dimension, reshaped as a whole
        return View.of(node, [span(integer(0), size) for size in elements(arguments[0])])

    def _step(self, view: View, name: str, arguments: Sequence[Expression]) -> View:
        if name == "reshape_dim":
            return view.split(self._constant(arguments[0]), elements(arguments[1]))
        if name == "permute":
            return view.permuted([self._constant(place) for place in elements(arguments[0])])
        if name == "select":
            indices: list[Any] = [cst.Slice(integer(0), axis.size) for axis in view.axes]
            indices[self._constant(arguments[0])] = cst.Index(arguments[1])
            return view.at(indices)
        reshaped = view.reshaped(elements(arguments[0])) if name == "reshape" else None
        if reshaped is not None:
            return reshaped
        if name == "broadcast":
            sizes = [axis.size for axis in view.axes]
            sizes[self._constant(arguments[0])] = arguments[1]
            shape = cst.Tuple([cst.Element(size) for size in sizes])
            return dataclasses.replace(view, spread=shape)
        raise no_beta1_form(f"the view .{name}({', '.join(map(text, arguments))})")

    def _constant(self, node: Expression) -> int:
        found = number(node)
        if found is None and isinstance(node, cst.Name):
            found = self.constants.get(node.value)
        if found is None:
            raise no_beta1_form(f"a view along dimension {text(node)}, which is no constant")
        return found


def _inlined(node: cst.Call, helper: cst.FunctionDef) -> Expression:
    """Return what a helper of one `return` statement returns, its parameters written out."""
    given = bound(node, [p.name.value for p in helper.params.params])
    replaced: Expression = Names(given).edit(returned_view(helper))
    return replaced


def returned_view(function: cst.FunctionDef) -> Expression | None:
    """Return the view of an argument that is all that a function returns, else None."""
    only = only_statement(function.body.body)
    value = only.value if isinstance(only, cst.Return) else None
    called = None if value is None else method(value)
    return value if called is not None and called[1] in METHODS else None


class NewNames:
    """The names of one function, while its statements are written in order.

    held: what each name was assigned last. taken: what those of the present statement stand for.
    """

    def __init__(self) -> None:
        self.held: dict[str, Expression] = {}
        self.taken: dict[str, str] = {}

    def forget(self) -> None:
        """Begin or leave a nested block: its names are assigned again behind it."""
        self.held = {}

    def change(self, names: set[str]) -> None:
        """Note that these names hold something else: what was made of them is made again."""
        self.held = {n: value for n, value in self.held.items() if not names_used([value]) & names}

    def begin(self) -> None:
        """Begin a statement."""
        self.taken = {}

    def take(self, values: dict[str, Expression]) -> None:
        """Keep names for these values until the statement ends."""
        self.taken |= {name: text(value) for name, value in values.items()}

    def spelled(self, view: View) -> tuple[Expression, dict[str, Expression]]:
        """Return a view as an expression, and the names in it with their values.

        A name that stands for something else in the statement gets a number.
        """
        node, values = view.spelled()
        renamed: dict[str, Expression] = {}
        made: dict[str, Expression] = {}
        for name, value in values.items():
            own, place = name, 1
            while self.taken.get(own, text(value)) != text(value):
                place += 1
                own = f"{name}{place}"
            if own != name:
                renamed[name] = cst.Name(own)
            made[own] = value
        self.take(made)
        return Names(renamed).edit(node) if renamed else node, made

    def assigned(self, values: dict[str, Expression]) -> list[cst.BaseStatement]:
        """Return assignments of the names that do not hold these values yet."""
        made: list[cst.BaseStatement] = []
        for name, value in values.items():
            if name not in self.held or text(self.held[name]) != text(value):
                self.held[name] = value
                assign = cst.Assign([cst.AssignTarget(cst.Name(name))], value)
                made.append(cst.SimpleStatementLine([assign]))
        return made


_COMPARISONS: dict[str, Any] = {
    "nl.greater_equal": cst.GreaterThanEqual, "nl.greater": cst.GreaterThan,
    "nl.less_equal": cst.LessThanEqual, "nl.less": cst.LessThan,
}  # fmt: skip


def predicate(call: cst.Call, partitions: Expression) -> tuple[Expression, dict[str, Expression]]:
    """Return the comparison of an affine select, and the index names in it with their values."""
    pattern, multiplier = keyword(call, "pattern"), keyword(call, "channel_multiplier")
    compared = keyword(call, "cmp_op")
    comparison = _COMPARISONS.get(text(compared)) if compared is not None else None
    if not isinstance(pattern, cst.List) or multiplier is None or comparison is None:
        raise no_beta1_form("nisa.affine_select without a spelled pattern and comparison")
    rows = [[one.value for one in _list(row.value)] for row in pattern.elements]
    factors = [multiplier, *(factor for factor, _ in rows)]
    sizes = [partitions, *(size for _, size in rows)]
    total = keyword(call, "offset") or integer(0)
    used: dict[str, Expression] = {}
    names = index_names(len(sizes))
    # an axis without a factor is there all the same: the comparison has the shape of the tile
    for place, (name, factor) in enumerate(zip(names, factors, strict=True)):
        used[name] = along(sizes[place], place, len(sizes))
        total = _added(total, factor, cst.Name(name))
    right = cst.ComparisonTarget(comparison(), integer(0))
    return cst.Comparison(total, [right], lpar=[cst.LeftParen()], rpar=[cst.RightParen()]), used


def _list(node: Expression) -> list[cst.Element]:
    if not isinstance(node, cst.List) or len(node.elements) != 2:
        raise no_beta1_form(f"nisa.affine_select with {text(node)} in its pattern")
    return list(node.elements)  # type: ignore[arg-type]


def _added(total: Expression, factor: Expression, index: Expression) -> Expression:
    if isinstance(factor, cst.UnaryOperation) and isinstance(factor.operator, cst.Minus):
        return cst.BinaryOperation(total, cst.Subtract(), times(factor.expression, index))
    return plus(total, times(factor, index))
