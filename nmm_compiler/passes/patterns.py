"""`rule(pattern, replacement)`: a rewrite rule made of two PyTorch functions.

    rule(lambda x, w, g: F.linear(F.rms_norm(x, x.shape[-1:], g), w),
         lambda x, w, g: torch.ops.mine.norm_linear(x, w, g))

Both the pattern and the graph are read as canonical forms, so that one function matches every
spelling. The function is traced on tensors whose sizes are all alike, since canonical forms hold
labels and axes and no sizes. A parameter with a number as its default matches any number: it is
traced with a number that no graph contains, which `Pattern.number` recognizes. A parameter without
one stands for a tensor. It is a matrix [tokens, features] where a product reads it; elsewhere it
may be a matrix or a vector over features, and each reading is a pattern of its own.

A value of the pattern is compared with a base value of the graph. `seen` maps the pattern's axes to
dims over the axes of the graph's value: a pattern's axis of tokens stands for all axes that count
tokens, in any order, and a weight may be transposed. Each reading of the axes of the graph's result
is tried; every form passes the map on to its operands, a product by its labels. `Unifier` yields
every way in which the two agree, so that after a wrong guess the search tries the next one. Values
that are not certain to agree do not agree, so there is never a wrong match.

The replacement is called on the found tensors, in the shapes of the pattern's parameters, and its
graph replaces the pattern's last node. Values in between must have no other reader, and the checks
of the built-in rules hold here too.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nmm_compiler.errors import BrokenRuleError, unreadable_pattern
from nmm_compiler.passes.chains.chain import path_nodes
from nmm_compiler.passes.chains.safety import Refusal, part_of_one, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    AlongLast,
    Canonical,
    Cast,
    Concatenation,
    Form,
    Key,
    Leaf,
    Norm,
    Opaque,
    Part,
    Product,
    Scale,
    Side,
    Softmax,
    Virtual,
    describe,
    dtype_name,
    owner_of,
)
from nmm_compiler.passes.graph.metadata import collect_values
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import Atom, Dims, Size
from nmm_compiler.passes.rules.base import Match, Rule

_SIZE = 8
_RANKS = (2, 1)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a pattern by name: tensors, and numbers with the value for tracing."""

    tensors: tuple[str, ...]
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read a function's signature; raises BrokenRuleError for *args, **kwargs and the like."""
        tensors: list[str] = []
        numbers: dict[str, float] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise unreadable_pattern(function, f"parameter {name!r} has no single value")
            if parameter.default is parameter.empty:
                tensors.append(name)
            elif isinstance(parameter.default, (int, float)):
                numbers[name] = 0.8171 + len(numbers) / 977
            else:
                raise unreadable_pattern(function, f"the default of {name!r} is no number")
        if not tensors:
            raise unreadable_pattern(function, "it takes no tensor")
        return cls(tuple(tensors), numbers)


class Pattern:
    """One reading of a pattern function. root, root_dims: its result as a view of a base."""

    def __init__(self, parameters: Parameters, c: Canonical, result: fx.Node) -> None:
        self.parameters, self.c = parameters, c
        holders = [n for n in c.graph.nodes if n.op == "placeholder"]
        self.names = dict(zip(holders, parameters.tensors, strict=True))
        self.root, dims = c.base(result)
        self.root_shape = c.sizes(self.root)
        # The axis of the base that each dimension of the result is; None for no whole axis.
        self.axes = tuple(views.whole_axis(dim, self.root_shape) for dim in dims)

    @property
    def unread(self) -> list[str]:
        """Return the tensors that the pattern does not read, and numbers that no form holds."""
        held = {abs(n) for form in self.c.forms.values() for n in _numbers(form)}
        numbers = self.parameters.numbers.items()
        lost = [name for name, n in numbers if not held & {n, 1.0 / n}]
        return [*(name for holder, name in self.names.items() if not holder.users), *lost]

    def number(
        self, own: float, theirs: float, known: Mapping[str, float]
    ) -> dict[str, float] | None:
        """Return the values of the pattern's parameters for a number of a graph; None where it is
        another number than the pattern's."""
        for name, traced in self.parameters.numbers.items():
            for power, sign in ((1, 1), (1, -1), (-1, 1)):
                if own == sign * traced**power:
                    if theirs == 0.0 and power == -1:
                        return None
                    value = sign * theirs**power
                    return {name: value} if known.get(name, value) == value else None
        return {} if own == theirs else None


def _numbers(form: Form) -> list[float]:
    held = [getattr(form, name, None) for name in ("factor", "alpha", "beta", "b", "eps")]
    return [n for n in held if isinstance(n, float)]


def read_pattern(
    function: Callable[..., Any],
    parameters: Parameters,
    ranks: Mapping[str, int],
    dtype: torch.dtype,
) -> Pattern:
    """Trace and read a function; raises what it raises, BrokenRuleError for an unusable result."""

    def call(*given: Any) -> Any:
        return function(**dict(zip(parameters.tensors, given, strict=True)), **parameters.numbers)

    with torch.no_grad(), FakeTensorMode():
        values = [torch.empty((_SIZE,) * ranks[name], dtype=dtype) for name in parameters.tensors]
        module = make_fx(call, tracing_mode="real", pre_dispatch=True)(*values)
    (result,) = next(iter(reversed(module.graph.nodes))).args
    if not isinstance(result, fx.Node):
        raise unreadable_pattern(function, "it returns other than one tensor")
    pattern = Pattern(parameters, read_graph(module, collect_values(module, None)), result)
    if isinstance(pattern.c.forms[pattern.root], Leaf):
        raise unreadable_pattern(function, "it returns a parameter as it is")
    if sorted(a for a in pattern.axes if a is not None) != list(range(len(pattern.root_shape))):
        raise unreadable_pattern(function, "its result is reshaped")
    if pattern.unread:
        raise unreadable_pattern(function, f"it does not use {', '.join(pattern.unread)} as it is")
    return pattern


def pattern_readings(
    function: Callable[..., Any], parameters: Parameters, given: Mapping[str, int]
) -> list[dict[str, int]]:
    """Return the ranks of parameters that a pattern may be read with, matrices first.

    A parameter that a product of the first reading reads has that rank in all of them. given: ranks
    that the user states. Raises BrokenRuleError where no ranks let the function run.
    """
    free = [name for name in parameters.tensors if name not in given]
    choices = sorted(itertools.product(_RANKS, repeat=len(free)), key=sum, reverse=True)
    fixed: dict[str, int] = {}
    found: list[dict[str, int]] = []
    error: Exception | None = None
    for choice in choices:
        ranks = {**dict(zip(free, choice, strict=True)), **given}
        if not fixed.items() <= ranks.items():
            continue
        try:
            pattern = read_pattern(function, parameters, ranks, torch.float32)
        except Exception as failed:  # ranks that the function does not take are no reading of it
            if isinstance(failed, BrokenRuleError) and not found:
                raise
            error = error or failed
            continue
        fixed = fixed or {name: ranks[name] for name in _in_products(pattern)}
        found.append(ranks)
    if not found:
        raise unreadable_pattern(function, f"it runs on no matrices and vectors: {error}")
    return found


def _in_products(pattern: Pattern) -> Iterator[str]:
    """Yield the parameters that a product reads."""
    for form in pattern.c.forms.values():
        for side in (form.lhs, form.rhs) if isinstance(form, Product) else ():
            base = pattern.c.base(side)[0]
            if base in pattern.names:
                yield pattern.names[base]


def summed_labels(
    c: Canonical, sides: tuple[Side, Side], out_labels: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the labels that a product sums over, without those of size 1."""
    (left, labels), (_, others) = sides
    real = (label for label, size in zip(labels, c.sizes(left), strict=True) if size != 1)
    return tuple(label for label in real if label in others and label not in out_labels)


def labels_of(dim: views.Dim, form: Product, shape: tuple[Size, ...]) -> tuple[int, ...] | None:
    """Return the labels of whole axes of a product's result; None where one is cut."""
    axes = [views.whole_axis((atom,), shape) for atom in dim]
    return None if None in axes else tuple(form.out_labels[a] for a in axes if a is not None)


def is_pointwise(key: Key) -> bool:
    """Return whether ATen calls an operation pointwise."""
    target = getattr(key, "target", None)
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def call_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return a call's arguments by ATen's names, without those that equal their default."""
    name = target_name(node)
    packet = getattr(torch.ops.aten, name or "", None)
    if packet is None or node.op not in ("call_function", "call_method"):
        return None
    target = node.target
    names: tuple[str, ...]
    if isinstance(target, torch._ops.OpOverload):
        names = tuple(a.name for a in target._schema.arguments)
    elif inspect.isfunction(target):
        names = tuple(inspect.signature(target).parameters)
    else:
        overload = getattr(packet, packet.overloads()[0])
        names = tuple(a.name for a in overload._schema.arguments)
    if len(node.args) > len(names):
        return None
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    renamed = {"self" if n in ("input", "self") else n: v for n, v in given.items()}
    return {n: v for n, v in renamed.items() if v is not None and v is not False and n[0] != "_"}


@dataclass(frozen=True)
class Found:
    """A part of a pattern in a graph.

    values: for each base value of the pattern, the graph's base value and `seen`. nodes: those of
    the graph that the pattern covers.
    """

    values: Mapping[Key, tuple[Key, Dims]]
    numbers: Mapping[str, float]
    nodes: frozenset[fx.Node]


NOTHING = Found({}, {}, frozenset())


Pair = tuple[Key, Key]
"""A value of the pattern and one of the graph."""
Operand = tuple[Key, Key, Dims, Dims]
"""Such a pair, and the same dimensions over the base of each."""
Operands = list[Operand] | None
"""All operands that have to agree; None where their dimensions do not."""
Way = tuple[Operands, Sequence[tuple[float, float]], frozenset[fx.Node]] | str
"""Operands and numbers that have to agree, and nodes that are covered then; or why none do."""
_NO_NODES = frozenset[fx.Node]()


class Unifier:
    """Compares one pattern with a graph, where it would end at a node.

    nearest: the mismatch that came furthest, with how many values agreed.
    """

    def __init__(self, pattern: Pattern, c: Canonical, node: fx.Node) -> None:
        self.pattern, self.p, self.c, self.node = pattern, pattern.c, c, node
        self.nearest = Refusal("pattern", "", node)

    def ways(self) -> Iterator[Found]:
        """Yield every way in which the pattern ends at the node."""
        for seen in self._readings(self.c.sizes(self.node)):
            yield from self._value(self.pattern.root, self.node, seen, NOTHING)

    def _readings(self, shape: tuple[Size, ...]) -> Iterator[Dims]:
        """Yield all readings of axes as those of the pattern's result.

        First the one with the last axes as features and all before them as tokens.
        """
        rank, whole = len(self.pattern.root_shape), views.identity(shape)
        lead = len(shape) - rank
        atoms = [(dim[0], max(0, axis - lead)) for axis, dim in enumerate(whole) if dim]
        first = tuple(place for _, place in atoms)
        places = itertools.product(range(rank), repeat=len(atoms))
        for chosen in sorted(places, key=lambda one: one != first):
            held = list(zip(atoms, chosen, strict=True))
            groups = ([atom for (atom, _), at in held if at == axis] for axis in range(rank))
            yield tuple(map(views.coalesce, groups))

    # -- values ---------------------------------------------------------------------------

    def _value(self, own: Key, theirs: Key, seen: Dims, found: Found) -> Iterator[Found]:
        """Compare a base value of the pattern with one of the graph."""
        known = found.values.get(own)
        if known is not None:
            if known == (theirs, seen):
                yield found
            return
        if self.p.dtype(own) != self.c.dtype(theirs):
            dtypes = f"{self.p.dtype(own)} is wanted, not {self.c.dtype(theirs)}"
            self._differs(found, theirs, dtypes)
            return
        form, other = self.p.forms[own], self.c.forms[theirs]
        inside = dataclasses.replace(found, values={**found.values, own: (theirs, seen)})
        if isinstance(form, Leaf):
            if part_of_one(theirs) is None:
                yield inside
            return
        if type(form) not in _WAYS or type(form) is not type(other):
            self._differs(found, theirs, f"{describe(form)} is wanted, not {describe(other)}")
            return
        nodes = {owner_of(theirs)} | self.c.helpers.get(theirs, frozenset())
        along_last = isinstance(form, (Norm, AlongLast))
        if nodes & self.c.effects.writers or (along_last and not self._last_is_last(theirs, seen)):
            return
        inside = dataclasses.replace(inside, nodes=found.nodes | nodes)
        for way in _WAYS[type(form)](self, (own, theirs), form, other, seen):
            agreed = way if isinstance(way, str) else self._numbers(inside, *way[1:])
            if isinstance(agreed, str):
                self._differs(inside, theirs, agreed)
            elif not isinstance(way, str) and way[0] is not None:
                yield from self._operands(way[0], agreed)

    def _differs(self, found: Found, at: Key, why: str) -> None:
        if len(found.values) > self.nearest.agreed:
            self.nearest = Refusal("pattern", why, at, agreed=len(found.values))

    def _last_is_last(self, theirs: Key, seen: Dims) -> bool:
        """Return whether the last axis of the pattern's value is that of the graph's."""
        return bool(seen) and seen[-1:] == self.c.whole(theirs)[-1:]

    def _numbers(
        self, found: Found, pairs: Sequence[tuple[float, float]], nodes: frozenset[fx.Node]
    ) -> Found | str:
        """Return what was found with numbers of the pattern and nodes, or which number differs."""
        numbers = dict(found.numbers)
        for own, theirs in pairs:
            more = self.pattern.number(own, theirs, numbers)
            if more is None:
                return f"the number {own} is wanted, not {theirs}"
            numbers |= more
        return dataclasses.replace(found, numbers=numbers, nodes=found.nodes | nodes)

    # -- operands -------------------------------------------------------------------------

    def _operands(self, operands: list[Operand], found: Found) -> Iterator[Found]:
        """Compare all operands, one after the other."""
        if not operands:
            yield found
            return
        for one in self._placed(*operands[0], found):
            yield from self._operands(operands[1:], one)

    def _placed(
        self, own: Key, theirs: Key, mine: Dims, over: Dims, found: Found
    ) -> Iterator[Found]:
        """Compare the bases of two operands, if the dimensions cover all of the graph's value."""
        base, other = self.p.base(own)[0], self.c.base(theirs)[0]
        shape = self.p.sizes(base)
        place: dict[int | None, views.Dim] = {}
        for dim, theirs_dim in zip(mine, over, strict=True):
            axis = views.whole_axis(dim, shape)
            real = tuple(a for a in theirs_dim if a.axis != views.BROADCAST)
            if axis is None and (real or any(a.axis != views.BROADCAST for a in dim)):
                return
            if axis is not None and len(real) != len(theirs_dim):
                return  # the graph repeats what the pattern has in full
            place[axis] = views.coalesce(theirs_dim)
        if {*place} - {None} != {*range(len(shape))}:
            return
        dims = tuple(place[axis] for axis in range(len(shape)))
        if not _covers([a for dim in dims for a in dim], self.c.sizes(other)):
            return
        if not isinstance(self.p.forms[base], Leaf):  # a parameter leaves its views to the graph
            found = dataclasses.replace(found, nodes=found.nodes | path_nodes(self.c, theirs))
        yield from self._value(base, other, dims, found)

    def _by_element(self, pairs: Iterable[Pair], at: Pair, seen: Dims) -> Operands:
        """Return operands that are read element by element, or broadcast."""
        found: list[Operand] = []
        for own, theirs in pairs:
            mine = views.expand(self.p.base(own)[1], self.p.sizes(at[0]))
            over = views.expand(self.c.base(theirs)[1], self.c.sizes(at[1]))
            moved = None if over is None else views.compose(seen, over)
            if mine is None or moved is None:
                return None
            found.append((own, theirs, mine, moved))
        return found

    def _in_place(self, pairs: Sequence[Pair], at: Pair, seen: Dims) -> Operands:
        """Return operands of an operation of which nothing is known: every axis has to be in its
        place."""
        ranks = (
            (len(self.p.sizes(own)), len(self.c.sizes(theirs))) for own, theirs in (at, *pairs)
        )
        if seen != self.c.whole(at[1]) or any(own != theirs for own, theirs in ranks):
            return None
        found = [self._by_element([pair], pair, self.c.whole(pair[1])) for pair in pairs]
        return [operand for one in found for operand in one or ()] if all(found) else None

    # -- forms ----------------------------------------------------------------------------

    def _scale(self, at: Pair, form: Any, there: Any, seen: Dims) -> Iterator[Way]:
        kinds = {isinstance(one.factor, float) for one in (form, there)}
        if kinds == {True}:
            value = self._by_element([(form.value, there.value)], at, seen)
            yield value, [(form.factor, there.factor)], _NO_NODES
        for a, b in there.orders if kinds == {False} else ():
            yield self._by_element([(form.value, a), (form.factor, b)], at, seen), [], _NO_NODES

    def _add(self, at: Pair, form: Any, there: Any, seen: Dims) -> Iterator[Way]:
        kinds = {isinstance(one.b, float) for one in (form, there)}
        if kinds == {True}:
            numbers = [(form.alpha, there.alpha), (form.beta * form.b, there.beta * there.b)]
            yield self._by_element([(form.a, there.a)], at, seen), numbers, _NO_NODES
        if True in kinds:
            return
        (mine_a, alpha, _), (mine_b, beta, _) = (
            _terms(self.p, k, n)[-1] for k, n in ((form.a, form.alpha), (form.b, form.beta))
        )
        first, second = (
            _terms(self.c, k, n) for k, n in ((there.a, there.alpha), (there.b, there.beta))
        )
        for a, b in (*itertools.product(first, second), *itertools.product(second, first)):
            operands = self._by_element([(mine_a, a[0]), (mine_b, b[0])], at, seen)
            yield operands, [(alpha, a[1]), (beta, b[1])], a[2] | b[2]

    def _named(self, at: Pair, form: Any, there: Any, seen: Dims) -> Iterator[Way]:
        """Compare activations and casts, which must be the same in all but the value."""
        if dataclasses.replace(form, value=there.value) == there:
            yield self._by_element([(form.value, there.value)], at, seen), [], _NO_NODES
        else:
            yield f"{describe(form)} is wanted, not {describe(there)}"

    def _norm(self, at: Pair, form: Any, there: Any, seen: Dims) -> Iterator[Way]:
        same = (form.kind, form.offset) == (there.kind, there.offset)
        both = [(form.weight, there.weight), (form.bias, there.bias)]
        if any((a is None) != (b is None) for a, b in both):
            yield "another set of weight and bias is wanted in a norm"
        elif same and form.eps is not None and there.eps is not None:
            vectors = [(a, b) for a, b in both if a is not None]
            operands = self._by_element([(form.value, there.value), *vectors], at, seen)
            yield operands, [(form.eps, there.eps)], _NO_NODES

    def _opaque(self, at: Pair, form: Any, there: Any, seen: Dims) -> Iterator[Way]:
        key, other = at
        if isinstance(key, Virtual) or isinstance(other, Virtual) or form.name != there.name:
            yield f"{form.name} is wanted, not {there.name}"
            return
        mine, given = call_arguments(key), call_arguments(other)
        if mine is None or given is None or set(mine) != set(given):
            return
        along_last = isinstance(form, AlongLast)
        tensors = [n for n, v in mine.items() if isinstance(v, fx.Node)]
        for name in set(mine) - {*tensors, *(("dim",) if along_last else ())}:
            if mine[name] != given[name]:
                yield f"{form.name} with {name}={mine[name]} is wanted, not {given[name]}"
                return
        if all(isinstance(given[name], fx.Node) for name in tensors):
            pairs = [(mine[name], given[name]) for name in tensors]
            placed = self._by_element if along_last or is_pointwise(key) else self._in_place
            yield placed(pairs, at, seen), [], _NO_NODES

    def _product(self, at: Pair, form: Any, there: Any, seen: Dims) -> Iterator[Way]:
        mine = summed_labels(self.p, form.orders[0], form.out_labels)
        groups = [labels_of(dim, there, self.c.sizes(at[1])) for dim in seen]
        for sides in there.orders:
            summed = summed_labels(self.c, sides, there.out_labels)
            apart = [summed] if len(mine) == 1 else [(label,) for label in summed]
            if None in groups or len(mine) != len(apart):
                continue
            paired = dict(zip((*form.out_labels, *mine), (*groups, *apart), strict=True))
            operands = [
                self._over(own, its, paired) for own, its in zip(form.orders[0], sides, strict=True)
            ]
            yield None if None in operands else operands, [], _NO_NODES  # type: ignore[misc]

    def _over(
        self, mine: Side, its: Side, paired: Mapping[int, tuple[int, ...] | None]
    ) -> Operand | None:
        """Return an operand of a product, with the graph's labels of each of the pattern's."""
        (own, own_labels), (theirs, labels) = mine, its
        over = dict(zip(labels, self.c.base(theirs)[1], strict=True))
        groups = [paired.get(label) for label in own_labels]
        if any(group is None or not over.keys() >= {*group} for group in groups):
            return None
        moved = (itertools.chain(*(over[x] for x in group or ())) for group in groups)
        return own, theirs, self.p.base(own)[1], tuple(map(tuple, moved))


_WAYS: dict[type[Form], Callable[[Unifier, Pair, Any, Any, Dims], Iterator[Way]]] = {
    Product: Unifier._product,
    Scale: Unifier._scale,
    Add: Unifier._add,
    Activation: Unifier._named,
    Cast: Unifier._named,
    Norm: Unifier._norm,
    **dict.fromkeys((Opaque, AlongLast, Softmax, Concatenation, Part), Unifier._opaque),
}


def _covers(atoms: Sequence[Atom], shape: tuple[Size, ...]) -> bool:
    """Return whether atoms are all the elements of a value, each once."""
    if any(a.axis < 0 for a in atoms):
        return False
    for axis, size in enumerate(shape):
        own = sorted((a for a in atoms if a.axis == axis), key=lambda a: str(a.inner))
        if views.product([a.size for a in own]) != size or len({a.inner for a in own}) != len(own):
            return False
    return True


def _terms(c: Canonical, key: Key, number: float) -> list[tuple[Key, float, frozenset[fx.Node]]]:
    """Return a term of a sum as it is, and without a number that multiplies it, if one does."""
    terms = [(key, number, _NO_NODES)]
    base = c.base(key)[0]
    form = c.forms[base]
    if isinstance(form, Scale) and isinstance(form.factor, float) and c.is_whole(key):
        terms.append((form.value, number * form.factor, path_nodes(c, key) | {owner_of(base)}))
    return terms


Where = Callable[..., bool | str]


@dataclass(frozen=True)
class Site:
    """A place of a pattern: parameters as base values and dims, numbers, the result's dims."""

    tensors: Mapping[str, tuple[Key, Dims]]
    numbers: Mapping[str, float]
    out_dims: Dims

    def shapes(self) -> dict[str, list[Any]]:
        """Return the shapes of the parameters, symbolic sizes as text."""
        return {
            name: [s if isinstance(s, int) else str(s) for s in views.shape_of(dims)]
            for name, (_, dims) in self.tensors.items()
        }


class PatternRule(Rule):
    """A rule of two functions; `rule` makes it."""

    def __init__(
        self,
        name: str,
        pattern: Callable[..., Any],
        replacement: Callable[..., Any],
        where: Where | None,
        constants: Collection[str],
        ranks: Mapping[str, int],
    ) -> None:
        self.name, self.function, self.replacement = name, pattern, replacement
        self.where, self.constants = where, tuple(constants)
        self.parameters = Parameters.of(pattern)
        for given in (*self.constants, *ranks):
            if given not in self.parameters.tensors:
                raise unreadable_pattern(pattern, f"it has no tensor parameter {given!r}")
        self.readings = pattern_readings(pattern, self.parameters, ranks)
        self._patterns: dict[torch.dtype, list[Pattern]] = {}
        first = self._read(torch.float32)[0]
        self._root = type(first.c.forms[first.root])

    def _read(self, dtype: torch.dtype) -> list[Pattern]:
        """Return the pattern_readings of the pattern for a dtype."""
        if dtype not in self._patterns:
            self._patterns[dtype] = [
                read_pattern(self.function, self.parameters, ranks, dtype)
                for ranks in self.readings
            ]
        return self._patterns[dtype]

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every node with the operation of the pattern's last node."""
        dtype = graph.dtype(node)
        floating = dtype is not None and dtype.is_floating_point
        if floating and isinstance(graph.forms.get(node), self._root):
            yield node

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Find the pattern at a node, and check whether it may be replaced there."""
        node: fx.Node = candidate
        dtype = graph.dtype(node)
        assert dtype is not None
        refusal: Refusal | None = None
        nearest = Refusal("pattern", "", node)
        for pattern in self._read(dtype):
            unifier = Unifier(pattern, graph, node)
            for found in unifier.ways():
                seen = found.values[pattern.root][1]
                out_dims = tuple(seen[axis] for axis in pattern.axes if axis is not None)
                tensors = {name: found.values[holder] for holder, name in pattern.names.items()}
                site = Site(tensors, found.numbers, out_dims)
                answer = self._refused(graph, node, found, site)
                if answer is None:
                    told = {**site.numbers, "operands": site.shapes(), "chains": 0}
                    told["dtype"] = dtype_name(dtype)
                    return Match(self.name, node, found.nodes, data=site, info=told)
                refusal = refusal or answer
            nearest = max(nearest, unifier.nearest, key=lambda one: one.agreed)
        return refusal or nearest

    def _refused(self, graph: Canonical, node: fx.Node, found: Found, site: Site) -> Refusal | None:
        """Return why a place may not be replaced."""
        for name in self.constants:
            key = site.tensors[name][0]
            if not graph.is_constant(key):
                return Refusal("weight", f"{name} is no stored weight", key)
        operands = [key for key, _ in site.tensors.values()]
        why = unsafe(graph, found.nodes, node, operands)
        if why is not None or self.where is None:
            return why
        tensors = {name: _value(graph, place) for name, place in site.tensors.items()}
        answer = self.where(**tensors, **site.numbers)
        if answer is True:
            return None
        reason = answer if isinstance(answer, str) else "the rule's condition does not hold"
        return Refusal("pattern", reason, node)

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the replacement's graph on the tensors of the site."""
        site: Site = match.data
        given: dict[str, fx.Node] = {}
        for name, (key, dims) in site.tensors.items():
            node = editor.node(key)
            given[name] = editor.arrange(node, views.identity(editor.shape(node)), dims)
        made = _inline(editor, self.replacement, given, site.numbers)
        want = graph.whole(match.node)
        if editor.shape(made) != views.shape_of(site.out_dims):
            raise ValueError(
                f"the replacement returns {list(editor.shape(made))} where the pattern returns "
                f"{list(views.shape_of(site.out_dims))}"
            )
        return editor.like(editor.arrange(made, site.out_dims, want), match.node)


def rule(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    where: Where | None = None,
    constants: Collection[str] = (),
    ranks: Mapping[str, int] | None = None,
    name: str | None = None,
) -> PatternRule:
    """Make a rule of two PyTorch functions with the same parameters.

    Args:
        pattern: what to look for. Its parameters stand for tensors, as [tokens, features]
            matrices or vectors of features: a match may have any number of token dimensions and
            any memory order. A parameter with a number as default stands for any number; a number
            in the body for itself.
        replacement: what to compute in its place, of the same shape and dtype.
        where: called with the parameters by name, as tensors without data (shape, dtype, device)
            and numbers; returns True, or False or a reason.
        constants: parameters that have to be stored weights.
        ranks: 0, 1 or 2 dimensions of a parameter, where the pattern leaves it open, or more.
        name: what reports call the rule; the pattern's name by default.

    Returns:
        A rule for `rules=` of `rewrite`, `explain` and `Options`.

    Raises:
        BrokenRuleError: the pattern cannot be read.
    """
    shown = name or str(getattr(pattern, "__name__", "rule")).replace("<lambda>", "pattern")
    return PatternRule(shown, pattern, replacement, where, constants, ranks or {})


def _value(c: Canonical, place: tuple[Key, Dims]) -> torch.Tensor:
    """Return a tensor without data, like a parameter at a site."""
    key, dims = place
    own = c.tensor(key)
    assert own is not None
    shape = own.shape

    def size(dim: views.Dim) -> Any:
        axes = ((atom.size, shape[atom.axis]) for atom in dim)
        return math.prod(own if views.as_size(own) == size else size for size, own in axes)

    mode = own.fake_mode if isinstance(own, FakeTensor) else FakeTensorMode()
    with mode:
        return torch.empty([size(dim) for dim in dims], dtype=own.dtype, device=own.device)


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _inline(
    editor: Editor,
    function: Callable[..., Any],
    given: Mapping[str, fx.Node],
    numbers: Mapping[str, float],
) -> fx.Node:
    """Add the nodes of a function's graph on the given ones; return the node of its result."""
    names, nodes = list(given), list(given.values())

    def call(*tensors: Any) -> Any:
        return function(**dict(zip(names, tensors, strict=True)), **numbers)

    # Values of one graph may have several modes; the one with symbolic sizes is needed.
    values = [editor.c.values[node] for node in nodes]
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor) and _is_symbolic(v)]
    with torch.no_grad(), modes[0] if modes else FakeTensorMode():
        fakes = [
            v if _is_symbolic(v) else torch.empty(v.shape, dtype=v.dtype, device=v.device)
            for v in values
        ]
        module = make_fx(call, tracing_mode="real", pre_dispatch=True)(*fakes)
    made: dict[fx.Node, Any] = {}
    arguments = iter(nodes)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            made[node] = next(arguments)
        elif node.op == "output":
            (result,) = node.args
            if not isinstance(result, fx.Node):
                raise TypeError(f"the replacement returns {result!r}; return one tensor")
            return made[result]
        elif node.op == "get_attr":
            raise TypeError("the replacement holds a tensor of its own; pass it as a parameter")
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made[n])
            made[node] = editor.call(node.target, *args, **kwargs)
    raise AssertionError("a graph ends with its output")
