"""`rule(pattern, replacement)`: a rewrite rule made of two PyTorch functions.

    rule(lambda x, w, g: F.linear(F.rms_norm(x, x.shape[-1:], g), w),
         lambda x, w, g: torch.ops.mine.norm_linear(x, w, g))

The pattern is found by its canonical forms (`unify`), so that one function matches every spelling.
The replacement is called on the found tensors, in the shapes of the pattern's parameters, and its
graph replaces the pattern's last node. Values in between must have no other reader, and the checks
of the built-in rules hold here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nmm_compiler.errors import unreadable_pattern
from nmm_compiler.passes.chains.safety import Refusal, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Key
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.patterns.unify import (
    Found,
    Parameters,
    Pattern,
    Unifier,
    read_pattern,
    readings,
)
from nmm_compiler.passes.rules.base import Match, Rule

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
        self.readings = readings(pattern, self.parameters, ranks)
        self._patterns: dict[torch.dtype, list[Pattern]] = {}
        first = self._read(torch.float32)[0]
        self._root = type(first.c.forms[first.root])

    def _read(self, dtype: torch.dtype) -> list[Pattern]:
        """Return the readings of the pattern for a dtype."""
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
        nearest: tuple[int, str, fx.Node] | None = None
        for pattern in self._read(dtype):
            unifier = Unifier(pattern, graph)
            for found in unifier.at(node):
                site = _site(pattern, found)
                answer = self._refused(graph, node, found, site)
                if answer is None:
                    told = {**site.numbers, "operands": site.shapes(), "chains": 0}
                    told["dtype"] = str(dtype).removeprefix("torch.")
                    return Match(self.name, node, found.nodes, data=site, info=told)
                refusal = refusal or answer
            if unifier.nearest is not None and (nearest is None or unifier.nearest[0] > nearest[0]):
                nearest = unifier.nearest
        if refusal is None and nearest is not None:
            depth, why, at = nearest
            return Refusal("pattern", why, at, agreed=depth)
        return refusal

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
        want = views.identity(graph.shape(match.node) or ())
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


def _site(pattern: Pattern, found: Found) -> Site:
    tensors = {name: found.values[holder] for holder, name in pattern.names.items()}
    seen = found.values[pattern.root][1]
    return Site(tensors, found.numbers, tuple(seen[a] for a in pattern.axes if a is not None))


def _value(c: Canonical, place: tuple[Key, Dims]) -> torch.Tensor:
    """Return a tensor without data, like a parameter at a site."""
    key, dims = place
    own = c.tensor(key)
    assert own is not None
    shape = own.shape

    def size(dim: views.Dim) -> Any:
        total: Any = 1
        for atom in dim:
            whole = views.as_size(shape[atom.axis]) == atom.size
            total = total * (shape[atom.axis] if whole else atom.size)
        return total

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
