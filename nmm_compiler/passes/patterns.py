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

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from nmm_compiler.errors import BrokenRuleError, unreadable_pattern
from nmm_compiler.passes.chains.safety import Refusal, covered, part_of_one, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    AlongLast,
    Canonical,
    Cast,
    Key,
    Leaf,
    Norm,
    Opaque,
    Product,
    Scale,
    Side,
    describe,
    owner_of,
)
from nmm_compiler.passes.graph.capture import collect_values
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.graph.torch_names import named_arguments
from nmm_compiler.passes.graph.views import Dims, Size
from nmm_compiler.passes.rules.base import Match, Rule

_SIZE = 8
_RANKS = (2, 1)
_ABSENT = -1


def parameters_of(
    function: Callable[..., Any],
) -> tuple[list[str], list[str], dict[str, float]]:
    """Return the parameters of a pattern: tensors, those of them that may be absent, and numbers
    with the value for tracing.

    Raises BrokenRuleError for *args, **kwargs and the like.
    """
    tensors: list[str] = []
    optional: list[str] = []
    numbers: dict[str, float] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise unreadable_pattern(function, f"parameter {name!r} has no single value")
        if parameter.default is parameter.empty:
            tensors.append(name)
        elif parameter.default is None:
            tensors.append(name)
            optional.append(name)
        elif isinstance(parameter.default, (int, float)):
            numbers[name] = 0.8171 + len(numbers) / 977
        else:
            raise unreadable_pattern(function, f"the default of {name!r} is no number")
    if len(optional) == len(tensors):
        raise unreadable_pattern(function, "it takes no tensor")
    return tensors, optional, numbers


class Pattern:
    """One reading of a pattern function. root, root_dims: its result as a view of a base."""

    def __init__(
        self, rule: PatternRule, tensors: Collection[str], c: Canonical, result: Node
    ) -> None:
        self.rule, self.c = rule, c
        # The parameter, power and sign that a number of the trace stands for.
        self._said = {
            sign * traced**power: (name, power, sign)
            for name, traced in rule.numbers.items()
            for power, sign in ((1, 1), (1, -1), (-1, 1))
        }
        holders = [n for n in c.graph.nodes if n.op == "placeholder"]
        self.names = dict(zip(holders, tensors, strict=True))
        self.root, dims = c.base(result)
        self.root_shape = c.sizes(self.root)
        # The axis of the base that each dimension of the result is; None for no whole axis.
        self.axes = tuple(views.whole_axis(dim, self.root_shape) for dim in dims)

    @property
    def unread(self) -> list[str]:
        """Return the tensors that the pattern does not read, and numbers that no form holds."""
        said = (one for key in self.c.forms for one in spellings(self.c, key))
        held = {abs(number) for one in said for number in one.numbers}
        numbers = self.rule.numbers.items()
        lost = [name for name, n in numbers if not held & {n, 1.0 / n}]
        return [*(name for holder, name in self.names.items() if not holder.users), *lost]

    def numbers(
        self, own: Sequence[float], theirs: Sequence[float], known: Mapping[str, float]
    ) -> dict[str, float] | None:
        """Return the values of the pattern's parameters for numbers of a graph; None where one is
        another number than the pattern's."""
        values = dict(known)
        for mine, number in zip(own, theirs, strict=True):
            name, power, sign = self._said.get(mine, ("", 1, 1))
            if number == 0.0 and power == -1:
                return None
            value = sign * number**power
            wanted = values.setdefault(name, value) if name else mine
            if wanted != value:
                return None
        return values


def read_pattern(rule: PatternRule, ranks: Mapping[str, int], dtype: torch.dtype) -> Pattern:
    """Trace and read a rule's function, where the tensors without a rank are absent.

    Raises what it raises, BrokenRuleError for an unusable result.
    """
    function = rule.function

    def call(*given: Any) -> Any:
        return function(**rule.given(dict(zip(ranks, given, strict=True)), rule.numbers))

    with torch.no_grad(), FakeTensorMode():
        values = [torch.empty((_SIZE,) * rank, dtype=dtype) for rank in ranks.values()]
        module = make_fx(call, tracing_mode="real", pre_dispatch=True)(*values)
    (result,) = next(iter(reversed(module.graph.nodes))).args
    if not isinstance(result, Node):
        raise unreadable_pattern(function, "it returns other than one tensor")
    pattern = Pattern(rule, ranks, read_graph(module, collect_values(module, None)), result)
    axes = {*range(len(pattern.root_shape))}
    faults = {
        "it returns a parameter as it is": isinstance(pattern.c.forms[pattern.root], Leaf),
        "its result is reshaped": {*pattern.axes} - {None} != axes,
        f"it does not use {', '.join(pattern.unread)} as it is": pattern.unread,
    }
    for reason, holds in faults.items():
        if holds:
            raise unreadable_pattern(function, reason)
    return pattern


def read_patterns(rule: PatternRule, dtype: torch.dtype) -> list[Pattern]:
    """Return the readings of a rule's function with each rank that its parameters may have, all
    parameters and matrices first.

    A parameter that a product of the first reading reads has that rank in all of them. Raises
    BrokenRuleError where no ranks let the function run.
    """
    fixed: dict[str, int] = {}
    readings: list[Pattern] = []
    error: Exception | None = None
    choices = itertools.product(*map(rule.ranks_of, rule.tensors))
    for choice in sorted(choices, key=lambda one: (-one.count(_ABSENT), sum(one)), reverse=True):
        chosen = dict(zip(rule.tensors, choice, strict=True))
        ranks = {name: rank for name, rank in chosen.items() if rank != _ABSENT}
        if any(ranks.get(name, rank) != rank for name, rank in fixed.items()):
            continue
        try:
            pattern = read_pattern(rule, ranks, dtype)
        except Exception as failed:  # ranks that the function does not take are no reading of it
            if isinstance(failed, BrokenRuleError) and not readings:
                raise
            error = error or failed
            continue
        fixed = fixed or {name: ranks[name] for name in _in_products(pattern)}
        readings.append(pattern)
    if not readings:
        raise unreadable_pattern(rule.function, f"it runs on no matrices and vectors: {error}")
    return readings


def _in_products(pattern: Pattern) -> Iterator[str]:
    """Yield the parameters that a product reads."""
    for form in pattern.c.forms.values():
        for side in (form.lhs, form.rhs) if isinstance(form, Product) else ():
            base = pattern.c.base(side)[0]
            if base in pattern.names:
                yield pattern.names[base]


@dataclass(frozen=True)
class Spelling:
    """A way to say what a value is computed from.

    name, arguments: what has to be the same in a pattern and in a graph. numbers: parameters of a
    pattern may stand for them. nodes: further ones that it covers. in_place: nothing is known of
    the operation, so every axis of an operand has to be in its place.
    """

    name: str
    operands: Sequence[Key]
    numbers: tuple[float, ...] = ()
    nodes: frozenset[Node] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        return f"{self.name} with {', '.join(words)}" if words else self.name


def spellings(c: Canonical, key: Key) -> Iterator[Spelling]:
    """Yield the ways to say what a value is computed from; none for products and leaves."""
    form = c.forms[key]
    if isinstance(form, (Activation, Cast)):
        yield Spelling(describe(form), [form.value])
    elif isinstance(form, Scale):
        if isinstance(form.factor, float):
            yield Spelling("scale by a number", [form.value], (form.factor,))
        yield from (Spelling("scale", order) for order in form.orders)
    elif isinstance(form, Add):
        if isinstance(form.b, float):
            yield Spelling("add of a number", [form.a], (form.alpha, form.beta * form.b))
        else:
            one, two = _terms(c, form.a, form.alpha), _terms(c, form.b, form.beta)
            for a, b in (*itertools.product(one, two), *itertools.product(two, one)):
                yield Spelling("add", (a[0], b[0]), (a[1], b[1]), a[2] | b[2])
    elif isinstance(form, Norm) and form.eps is not None:
        vectors = {"weight": form.weight, "bias": form.bias}
        held = {name: vector for name, vector in vectors.items() if vector is not None}
        same = {"offset": form.offset, "vectors": [*held]}
        operands = [form.value, *held.values()]
        yield Spelling(describe(form), operands, (form.eps,), arguments=same)
    elif isinstance(form, Opaque) and isinstance(key, Node):
        yield from _call(key, form)


def _terms(c: Canonical, key: Key, number: float) -> list[tuple[Key, float, frozenset[Node]]]:
    """Return a term of a sum as it is, and without a number that multiplies it, if one does."""
    terms = [(key, number, frozenset[Node]())]
    base = c.base(key)[0]
    form = c.forms[base]
    if isinstance(form, Scale) and isinstance(form.factor, float) and c.is_whole(key):
        terms.append((form.value, number * form.factor, covered(c, key, [base]) | {owner_of(base)}))
    return terms


def _call(node: Node, form: Opaque) -> Iterator[Spelling]:
    """Yield the call of an operation by its name and its arguments by ATen's names, without those
    that are off, tensors in order of names."""
    named = named_arguments(node)
    if len(named) < len(node.args) + len(node.kwargs):
        return  # what has no name cannot be compared
    renamed = {"self" if n in ("input", "self") else n: v for n, v in named.items()}
    given = {n: v for n, v in renamed.items() if v is not None and v is not False and n[0] != "_"}
    along_last = isinstance(form, AlongLast)
    operands = {name: given[name] for name in sorted(given) if isinstance(given[name], Node)}
    rest = {name: value for name, value in given.items() if name not in operands}
    if along_last:
        rest.pop("dim", None)
    target = node.target
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    yield Spelling(
        form.name, [*operands.values()], arguments={"tensors": [*operands], **rest},
        in_place=not (along_last or pointwise),
    )  # fmt: skip


@dataclass(frozen=True)
class Occurrence:
    """A part of a pattern in a graph, or the whole.

    values: for each base value of the pattern, the graph's base value and `seen`; of a whole
    pattern, for each parameter by its name. nodes: those of the graph that the pattern covers.
    out_dims: of a whole pattern, the result's dims.
    """

    values: Mapping[Any, tuple[Key, Dims]]
    numbers: Mapping[str, float]
    nodes: frozenset[Node]
    out_dims: Dims = ()

    def shapes(self) -> dict[str, list[Any]]:
        """Return the shapes of the parameters, symbolic sizes as text."""
        return {
            name: [s if isinstance(s, int) else str(s) for s in views.shape_of(dims)]
            for name, (_, dims) in self.values.items()
        }


Operand = tuple[Key, Key, Dims, Dims]
"""A value of the pattern and one of the graph, and the same dimensions over the base of each."""
Way = tuple[list[Operand], Occurrence]
"""Operands that have to agree, and what is found with them."""


class Unifier:
    """Compares one pattern with a graph, where it would end at a node.

    nearest: the mismatch that came furthest, with how many values agreed.
    """

    def __init__(self, pattern: Pattern, c: Canonical, node: Node) -> None:
        self.pattern, self.p, self.c, self.node = pattern, pattern.c, c, node
        self.nearest = Refusal("pattern", "", node)

    def sites(self) -> Iterator[Occurrence]:
        """Yield every way in which the pattern ends at the node."""
        pattern = self.pattern
        for seen in self._readings(self.c.sizes(self.node)):
            out_dims = tuple(seen[axis] for axis in pattern.axes if axis is not None)
            for site in self._value(pattern.root, self.node, seen, Occurrence({}, {}, frozenset())):
                values = {name: site.values[holder] for holder, name in pattern.names.items()}
                yield replace(site, values=values, out_dims=out_dims)

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

    def _value(self, own: Key, theirs: Key, seen: Dims, site: Occurrence) -> Iterator[Occurrence]:
        """Compare a base value of the pattern with one of the graph."""
        known, form, other = site.values.get(own), self.p.forms[own], self.c.forms[theirs]
        here = replace(site, values={**site.values, own: (theirs, seen)})
        if known is not None:
            if known == (theirs, seen):
                yield site
        elif self.p.dtype(own) != self.c.dtype(theirs):
            self._differs(site, theirs, self.p.dtype(own), self.c.dtype(theirs))
        elif isinstance(form, Leaf):
            if part_of_one(theirs) is None:
                yield here
        elif type(form) is not type(other):
            self._differs(here, theirs, describe(form), describe(other))
        else:
            nodes = {owner_of(theirs)} | self.c.helpers.get(theirs, frozenset())
            last_moves = not seen or seen[-1:] != self.c.whole(theirs)[-1:]
            moved = last_moves and isinstance(form, (Norm, AlongLast))
            here = replace(here, nodes=here.nodes | nodes)
            read = self._products if isinstance(form, Product) else self._spelled
            allowed = not moved and nodes.isdisjoint(self.c.effects.writers)
            for operands, with_numbers in read(own, theirs, seen, here) if allowed else ():
                yield from self._operands(operands, with_numbers)

    def _differs(self, site: Occurrence, at: Key, wanted: object, got: object) -> None:
        if len(site.values) > self.nearest.agreed:
            why = f"{wanted} is wanted, not {got}"
            self.nearest = Refusal("pattern", why, at, agreed=len(site.values))

    def _operands(self, operands: list[Operand], site: Occurrence) -> Iterator[Occurrence]:
        """Compare all operands, one after the other."""
        if not operands:
            yield site
            return
        for one in self._placed(*operands[0], site):
            yield from self._operands(operands[1:], one)

    def _placed(
        self, own: Key, theirs: Key, mine: Dims, over: Dims, site: Occurrence
    ) -> Iterator[Occurrence]:
        """Compare the bases of two operands, if the dimensions cover all of the graph's value."""
        base, other = self.p.base(own)[0], self.c.base(theirs)[0]
        shape = self.p.sizes(base)
        place: dict[int | None, views.Dim] = {}
        for dim, theirs_dim in zip(mine, over, strict=True):
            axis = views.whole_axis(dim, shape)
            if axis is None and any(a.axis != views.BROADCAST for a in (*dim, *theirs_dim)):
                return
            place[axis] = views.coalesce(theirs_dim)
        if {*place} - {None} != {*range(len(shape))}:
            return
        dims = tuple(place[axis] for axis in range(len(shape)))
        sizes = dict(enumerate(self.c.sizes(other)))
        if views.invert(dims, views.identity(views.shape_of(dims)), sizes) is None:
            return  # other than all of the graph's value, or a repeated one
        if not isinstance(self.p.forms[base], Leaf):  # a parameter leaves its views to the graph
            site = replace(site, nodes=site.nodes | covered(self.c, theirs, [other]))
        yield from self._value(base, other, dims, site)

    def _spelled(self, own: Key, theirs: Key, seen: Dims, site: Occurrence) -> Iterator[Way]:
        """Yield the ways in which two spellings of an operation agree."""
        said = list(spellings(self.p, own))
        for one in spellings(self.c, theirs) if said else ():
            mine = max(said, key=lambda two: len(two.nodes))
            if (mine.name, mine.arguments) != (one.name, one.arguments):
                self._differs(site, theirs, mine, one)
                continue
            numbers = self.pattern.numbers(mine.numbers, one.numbers, site.numbers)
            if numbers is None:
                self._differs(site, theirs, [*mine.numbers], [*one.numbers])
                continue
            operands = self._read_operands(mine, one, own, theirs, seen)
            if operands is not None:
                nodes = site.nodes | one.nodes
                yield operands, replace(site, numbers=numbers, nodes=nodes)

    def _read_operands(
        self, mine: Spelling, its: Spelling, own: Key, theirs: Key, seen: Dims
    ) -> list[Operand] | None:
        """Return operands that are read element by element or broadcast, or all of whose axes are
        in their places."""
        pairs = list(zip(mine.operands, its.operands, strict=True))
        operands = [(a, b, self.p.base(a)[1], self.c.base(b)[1]) for a, b in pairs]
        if mine.in_place:
            both = (own, theirs), *pairs
            alike = all(len(self.p.sizes(a)) == len(self.c.sizes(b)) for a, b in both)
            return operands if alike and seen == self.c.whole(theirs) else None
        moved: list[Operand] = []
        for a, b, dims, over in operands:
            wide = views.expand(dims, self.p.sizes(own))
            its_wide = views.expand(over, self.c.sizes(theirs))
            at = None if its_wide is None else views.compose(seen, its_wide)
            if wide is None or at is None:
                return None
            moved.append((a, b, wide, at))
        return moved

    def _products(self, own: Key, theirs: Key, seen: Dims, site: Occurrence) -> Iterator[Way]:
        """Yield the ways in which the labels of two products agree."""
        form: Any = self.p.forms[own]
        there: Any = self.c.forms[theirs]
        mine = summed_labels(self.p, form.orders[0], form.out_labels)
        groups = [labels_of(dim, there, self.c.sizes(theirs)) for dim in seen]
        for sides in there.orders if None not in groups else ():
            summed = summed_labels(self.c, sides, there.out_labels)
            apart = [summed] if len(mine) == 1 else [(label,) for label in summed]
            if len(mine) == len(apart):
                paired = dict(zip((*form.out_labels, *mine), (*groups, *apart), strict=True))
                both = zip(form.orders[0], sides, strict=True)
                operands = [self._over(one, its, paired) for one, its in both]
                whole = [operand for operand in operands if operand is not None]
                if len(whole) == len(operands):
                    yield whole, site

    def _over(self, mine: Side, its: Side, paired: Mapping[int, tuple[int, ...]]) -> Operand | None:
        """Return an operand of a product, with the graph's labels of each of the pattern's."""
        (own, own_labels), (theirs, labels) = mine, its
        over = dict(zip(labels, self.c.base(theirs)[1], strict=True))
        groups = [paired.get(label) for label in own_labels]
        if any(group is None or not over.keys() >= {*group} for group in groups):
            return None
        moved = (itertools.chain(*(over[x] for x in group or ())) for group in groups)
        return own, theirs, self.p.base(own)[1], tuple(map(tuple, moved))


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


Where = Callable[..., bool | str]


class PatternRule(Rule):
    """A rule of two functions, asked at every node with the operation of the pattern's last one;
    `rule` makes it."""

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
        self.where, self.constants, self.ranks = where, tuple(constants), ranks
        self.tensors, self.optional, self.numbers = parameters_of(pattern)
        for given in (*self.constants, *ranks):
            if given not in self.tensors:
                raise unreadable_pattern(pattern, f"it has no tensor parameter {given!r}")
        self.patterns = functools.cache(functools.partial(read_patterns, self))
        ends = [type(one.c.forms[one.root]) for one in self.patterns(torch.float32)]
        self.ends_at: tuple[type, ...] = tuple(dict.fromkeys(ends))

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the ranks that a tensor may have, and whether it may be absent."""
        ranks = (self.ranks[name],) if name in self.ranks else _RANKS
        return (*ranks, _ABSENT) if name in self.optional else ranks

    def given(self, tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
        """Return the arguments of the rule's functions, None for what is absent."""
        return {**dict.fromkeys(self.optional), **tensors, **numbers}

    def check(self, graph: Canonical, candidate: Node) -> Match | Refusal | None:
        """Find the pattern at a node, and check whether it may be replaced there."""
        node, dtype = candidate, graph.dtype(candidate)
        floating = dtype is not None and dtype.is_floating_point
        if not floating or not isinstance(graph.forms.get(node), self.ends_at):
            return None
        refusal: Refusal | None = None
        nearest = Refusal("pattern", "", node)
        for pattern in self.patterns(dtype):
            unifier = Unifier(pattern, graph, node)
            for site in unifier.sites():
                answer = self._refused(graph, node, site)
                if answer is None:
                    told = {**site.numbers, "operands": site.shapes()}
                    return Match(self.name, node, site.nodes, data=site, info=told)
                refusal = refusal or answer
            nearest = max(nearest, unifier.nearest, key=lambda one: one.agreed)
        return refusal or nearest

    def _refused(self, graph: Canonical, node: Node, site: Occurrence) -> Refusal | None:
        """Return why a place may not be replaced."""
        for name in self.constants:
            key = site.values[name][0] if name in site.values else None
            if key is not None and not graph.is_constant(key):
                return Refusal("weight", f"{name} is no stored weight", key)
        why = unsafe(graph, site.nodes, node, [key for key, _ in site.values.values()])
        if why is not None or self.where is None:
            return why
        tensors = {name: _value(graph, place) for name, place in site.values.items()}
        answer = self.where(**self.given(tensors, site.numbers))
        if answer is True:
            return None
        reason = answer if isinstance(answer, str) else "the rule's condition does not hold"
        return Refusal("pattern", reason, node)

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> Node:
        """Emit the replacement's graph on the tensors of the site."""
        site: Occurrence = match.data
        given: dict[str, Node] = {}
        for name, (key, dims) in site.values.items():
            node = editor.node(key)
            given[name] = editor.arrange(node, views.identity(editor.shape(node)), dims)
        result = _inline(editor, self, given, site.numbers)
        want = graph.whole(match.node)
        if editor.shape(result) != views.shape_of(site.out_dims):
            raise ValueError(
                f"the replacement returns {list(editor.shape(result))} where the pattern returns "
                f"{list(views.shape_of(site.out_dims))}"
            )
        return editor.like(editor.arrange(result, site.out_dims, want), match.node)


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
            in the body for itself. One with None as default may be absent: both functions get
            None then.
        replacement: what to compute in its place, of the same shape and dtype.
        where: called with the parameters by name, as tensors without data (shape, dtype, device),
            None and numbers; returns True, or False or a reason.
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

    fake = own if isinstance(own, FakeTensor) else FakeTensorMode().from_tensor(own)
    return fake.new_empty([size(dim) for dim in dims])


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _inline(
    editor: Editor,
    rule: PatternRule,
    given: Mapping[str, Node],
    numbers: Mapping[str, float],
) -> Node:
    """Add the nodes of a replacement's graph on the given ones; return the node of its result."""

    def call(*tensors: Any) -> Any:
        named = dict(zip(given, tensors, strict=True))
        return rule.replacement(**rule.given(named, numbers))

    # Values of one graph may have several modes; the one with symbolic sizes is needed.
    values = [editor.c.values[node] for node in given.values()]
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor) and _is_symbolic(v)]
    with torch.no_grad(), modes[0] if modes else FakeTensorMode():
        fakes = [
            v if _is_symbolic(v) else torch.empty(v.shape, dtype=v.dtype, device=v.device)
            for v in values
        ]
        module = make_fx(call, tracing_mode="real", pre_dispatch=True)(*fakes)
    nodes = dict(zip(module.graph.find_nodes(op="placeholder"), given.values(), strict=True))
    for node in module.graph.nodes:
        if node.op == "get_attr":
            raise TypeError("the replacement holds a tensor of its own; pass it as a parameter")
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), nodes.__getitem__)
            nodes[node] = editor.call(node.target, *args, **kwargs)
    (result,) = module.graph.output_node().args
    if not isinstance(result, Node):
        raise TypeError(f"the replacement returns {result!r}; return one tensor")
    return nodes[result]
