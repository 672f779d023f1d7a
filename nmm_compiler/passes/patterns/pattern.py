"""A pattern: a PyTorch function of a few tensors and numbers, read into canonical forms.

The function is traced on tensors whose sizes are all alike, since canonical forms hold labels and
axes and no sizes. A parameter with a number as its default matches any number: it is traced with a
number that no graph contains, which `Pattern.number` recognizes. A parameter without one stands for
a tensor. It is a matrix [tokens, features] where a product reads it; elsewhere it may be a matrix
or a vector over features, and each reading is a pattern of its own.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nmm_compiler.errors import PatternError
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Form, Leaf, Product
from nmm_compiler.passes.graph.metadata import collect_values
from nmm_compiler.passes.graph.read_graph import read_graph

_SIZE = 8
_RANKS = (2, 1)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a pattern by name: tensors, and numbers with the value for tracing."""

    tensors: tuple[str, ...]
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read a function's signature; raises PatternError for *args, **kwargs and the like."""
        tensors: list[str] = []
        numbers: dict[str, float] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise PatternError(function, f"parameter {name!r} has no single value")
            if parameter.default is parameter.empty:
                tensors.append(name)
            elif isinstance(parameter.default, (int, float)):
                numbers[name] = 0.8171 + len(numbers) / 977
            else:
                raise PatternError(function, f"the default of {name!r} is no number")
        if not tensors:
            raise PatternError(function, "it takes no tensor")
        return cls(tuple(tensors), numbers)


class Pattern:
    """One reading of a pattern function. root, root_dims: its result as a view of a base."""

    def __init__(self, parameters: Parameters, c: Canonical, result: fx.Node) -> None:
        self.parameters, self.c = parameters, c
        holders = [n for n in c.graph.nodes if n.op == "placeholder"]
        self.names = dict(zip(holders, parameters.tensors, strict=True))
        self.root, dims = c.base(result)
        self.root_shape = c.shape(self.root) or ()
        # The axis of the base that each dimension of the result is; None for no whole axis.
        self.axes = tuple(views.whole_axis(dim, self.root_shape) for dim in dims)

    @property
    def unread(self) -> list[str]:
        """Return the tensors that the pattern does not read, and numbers that no form holds."""
        held = {abs(n) for form in self.c.forms.values() for n in _numbers(form)}
        numbers = self.parameters.numbers.items()
        lost = [name for name, n in numbers if not held & {n, 1.0 / n}]
        return [*(name for holder, name in self.names.items() if not holder.users), *lost]

    def number(self, own: float, theirs: float, known: Mapping[str, float]) -> dict[str, float]:
        """Return the values of the pattern's parameters for a number of a graph.

        Raises ValueError where it is another number than the pattern's.
        """
        for name, traced in self.parameters.numbers.items():
            for there, back in (
                (lambda v: v, lambda v: v),
                (lambda v: -v, lambda v: -v),
                (lambda v: 1.0 / v, lambda v: 1.0 / v),
            ):
                if own != there(traced):
                    continue
                if theirs == 0.0 and there(2.0) == 0.5:
                    raise ValueError("no number has the inverse 0")
                value = back(theirs)
                if known.get(name, value) != value:
                    raise ValueError(f"{name} is {known[name]} and {value}")
                return {name: value}
        if own != theirs:
            raise ValueError(f"{theirs} is not {own}")
        return {}


def _numbers(form: Form) -> list[float]:
    held = [getattr(form, name, None) for name in ("factor", "alpha", "beta", "b", "eps")]
    return [n for n in held if isinstance(n, float)]


def read_pattern(
    function: Callable[..., Any],
    parameters: Parameters,
    ranks: Mapping[str, int],
    dtype: torch.dtype,
) -> Pattern:
    """Trace and read a function; raises what it raises, and PatternError for an unusable result."""

    def call(*given: Any) -> Any:
        return function(**dict(zip(parameters.tensors, given, strict=True)), **parameters.numbers)

    with torch.no_grad(), FakeTensorMode():
        values = [torch.empty((_SIZE,) * ranks[name], dtype=dtype) for name in parameters.tensors]
        module = make_fx(call, tracing_mode="real", pre_dispatch=True)(*values)
    (result,) = next(iter(reversed(module.graph.nodes))).args
    if not isinstance(result, fx.Node):
        raise PatternError(function, "it returns other than one tensor")
    pattern = Pattern(parameters, read_graph(module, collect_values(module, None)), result)
    if isinstance(pattern.c.forms[pattern.root], Leaf):
        raise PatternError(function, "it returns a parameter as it is")
    if sorted(a for a in pattern.axes if a is not None) != list(range(len(pattern.root_shape))):
        raise PatternError(function, "its result is reshaped")
    if pattern.unread:
        raise PatternError(function, f"it does not use {', '.join(pattern.unread)} as it is")
    return pattern


def readings(
    function: Callable[..., Any], parameters: Parameters, given: Mapping[str, int]
) -> list[dict[str, int]]:
    """Return the ranks of parameters that a pattern may be read with, matrices first.

    given: ranks that the user states. Raises PatternError where no ranks let the function run.
    """
    free = [name for name in parameters.tensors if name not in given]
    error: Exception | None = None
    for vectors in itertools.chain.from_iterable(
        itertools.combinations(free, count) for count in range(len(free) + 1)
    ):
        ranks = {name: 1 if name in vectors else 2 for name in free} | dict(given)
        try:
            pattern = read_pattern(function, parameters, ranks, torch.float32)
        except PatternError:
            raise
        except Exception as failed:  # the function does not take these ranks: try others
            error = error or failed
            continue
        fixed = {*given, *_in_products(pattern)}
        return list(_variants(function, parameters, ranks, fixed))
    raise PatternError(function, f"it runs on no matrices and vectors: {error}")


def _in_products(pattern: Pattern) -> Iterator[str]:
    """Yield the parameters that a product reads."""
    for form in pattern.c.forms.values():
        if isinstance(form, Product):
            for side in (form.lhs, form.rhs):
                base = pattern.c.base(side)[0]
                if base in pattern.names:
                    yield pattern.names[base]


def _variants(
    function: Callable[..., Any], parameters: Parameters, ranks: dict[str, int], fixed: set[str]
) -> Iterator[dict[str, int]]:
    yield ranks
    free = [name for name in parameters.tensors if name not in fixed]
    for choice in itertools.product(_RANKS, repeat=len(free)):
        variant = ranks | dict(zip(free, choice, strict=True))
        try:
            read_pattern(function, parameters, variant, torch.float32)
        except Exception:  # ranks that the function does not take are no reading of it
            variant = ranks
        if variant != ranks:
            yield variant
