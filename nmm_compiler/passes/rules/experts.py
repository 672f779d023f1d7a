"""Rule `experts`: the experts of a mixture, as transformers spells them, become one call.

    rows = x.repeat_interleave(k, 0)              or   x[perm // k], perm = sort(index.reshape(-1))
    h    = bmm(rows, gate_up[index.reshape(-1)])  or   grouped_mm(rows, gate_up, cumsum(histc))
    y    = bmm(act(h), down[index.reshape(-1)])   or   grouped_mm(act(h), down, offs)
    (y * gates.reshape(-1)[.., None])[inverse].view(tokens, k, -1).sum(1)
      ->   nmm.experts(x, gate_up, down, index, gates)

The function between the products is recognized by its values: an activation of the gate times up,
or gpt-oss's clamped product. Experts in a Python loop break the graph and cannot be seen here.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.kernels.experts.spec import HALVES, ExpertsSpec
from nmm_compiler.ops.chosen import gated
from nmm_compiler.passes.chains.safety import DTYPES, Refusal, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.rules.base import Match, Rule

GROUPED = frozenset({"grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback"})
RESHAPES = frozenset({"view", "reshape", "contiguous", "flatten", "unsqueeze", "squeeze"})


_PLAIN: dict[str, Any] = {
    "halves": "joined", "activation": "silu", "limit": 0.0, "slope": 1.0, "plus": 0.0,
}  # fmt: skip


# What may stand between the products of an expert, beside casts.
_OF_ELEMENTS = frozenset({
    "chunk", "split", "unbind", "getitem", "mul", "add", "sub", "div", "neg", "pow", "square",
    "exp", "silu", "gelu", "relu", "sigmoid", "tanh", "erf",
    "clamp", "clamp_max", "clamp_min", "clip",
})  # fmt: skip
_CASTS = frozenset({"to", "_to_copy", "float", "type_as", "contiguous"})


class NotExpertsError(Exception):
    """The pattern ends here: nothing to refuse."""


def name_of(value: Any) -> str | None:
    """Return the canonical name of what a node calls, None for what is no node."""
    return target_name(value) if isinstance(value, fx.Node) else None


@dataclass(frozen=True)
class _Linear:
    """One product: its rows, the weights and biases of all experts, whether they lie [out, in]."""

    rows: Any
    weight: fx.Node
    bias: fx.Node | None
    turned: bool
    last: fx.Node


@dataclass(frozen=True)
class _Call:
    """writes: the nodes that write in place what the call stands for, and nothing else."""

    operands: tuple[fx.Node | None, ...]
    said: dict[str, Any]
    writes: tuple[fx.Node, ...]


class Experts(Rule):
    """A sum over the picks of each token of gated MLPs that an index chooses."""

    name = "experts"
    ends_at = None

    def pattern(self, graph: Canonical, node: Any) -> Iterator[Any]:
        """Propose sums over the picks of tokens."""
        plain = name_of(node) == "sum" and not set(node.kwargs) - {"dim"} and len(node.args) <= 2
        if plain and _given(node, 1, "dim") in (1, [1], (1,)):
            yield node

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the picks, both products and what stands between them."""
        node = candidate
        try:
            call, spec = self._read(graph, node)
        except NotExpertsError:
            return None
        if isinstance(call, Refusal):
            return call
        reads = tuple(one for one in call.operands if one is not None)
        inner = _between([node, *call.writes], set(reads))
        return unsafe(graph, inner, node, reads, allowed=call.writes) or Match(
            rule=self.name,
            node=node,
            nodes=frozenset(inner),
            data=call,
            info={
                **{name: getattr(spec, name) for name in ("m", "k", "n", "groups", "top_k")},
                "chains": 0,  # its products are dense
            },
            length=spec.k + spec.n,
        )

    def _read(self, graph: Canonical, node: Any) -> tuple[Any, Any]:
        """Return the call and its spec, or a refusal and None; raise NotExpertsError for others."""
        view = _named(node.args[0], RESHAPES)
        shape = graph.shape(view) or ()
        if len(shape) != 3:
            raise NotExpertsError
        product, inverse = view.args[0], None
        if name_of(product) == "getitem" and isinstance(product.args[1], fx.Node):
            product, inverse = product.args
        both = _named(product, ("mul",)).args
        sides = [one for one in both if isinstance(one, fx.Node)]
        spread = [one for one in sides if name_of(one) == "unsqueeze"]
        if len(sides) != 2 or not spread or spread[-1].args[1] not in (-1, 1):
            raise NotExpertsError
        made, gates = _other(sides, spread[-1]), spread[-1].args[0]
        down = self._linear(graph, made, inverse is not None)
        between, h = _region(down.rows)
        up = self._linear(graph, h, inverse is not None)
        x, index, gates = self._picks(graph, up, down, gates, inverse, shape)
        kinds = {one.turned for one in (up, down)}
        weights = graph.shape(down.weight) or ()
        if len(weights) != 3 or len(kinds) != 1 or not _same_tokens(graph, x, shape):
            raise NotExpertsError
        turned = kinds.pop()
        said = _function(graph, between, h, down.rows)
        if said is None:
            why = "the function between the products of the experts is no gated product"
            return Refusal("no_kernel", why, down.rows), None
        try:
            spec = ExpertsSpec(
                m=shape[0] if isinstance(shape[0], int) else 128, k=shape[2],
                n=weights[2 if turned else 1], groups=weights[0], top_k=shape[1],
                dtype=str(graph.dtype(x)).removeprefix("torch."), gate_up_bias=up.bias is not None,
                down_bias=down.bias is not None, weight_layout="col" if turned else "row", **said,
            )  # fmt: skip
        except (NmmError, TypeError) as error:
            return Refusal("no_kernel", str(error), node), None
        dtypes = [graph.dtype(one) for one in (x, up.weight, down.weight, node)]
        if len({*dtypes}) > 1 or dtypes[0] not in DTYPES:
            said_of = "x {}, gate_up {}, down {} and the result {}".format(*dtypes)
            return Refusal(
                "dtype", f"{said_of} are not one dtype that kernels compute in", node
            ), None
        said |= {"weight_layout": "col"} if turned else {}
        biases = (None if one.bias is None else _named(one.bias, ("getitem",)).args[0]
                  for one in (up, down))  # fmt: skip
        operands = (x, up.weight, down.weight, index, gates, *biases)
        writes = [one.last for one in (up, down) if one.last in graph.effects.writers]
        if inverse is not None:
            writes += _writes(inverse)
        return _Call(operands, said, tuple(writes)), spec

    def _linear(self, graph: Canonical, node: Any, grouped: bool) -> _Linear:
        """Return the product that a node is, with the bias that is added to it in place or not."""
        last, bias = node, None
        added = [one for one in node.users if name_of(one) == "add_" and one.args[0] is node]
        if len(added) == 1:
            last, bias = added[0], added[0].args[1]
        elif name_of(node) in ("add", "add_"):
            node, bias = node.args
        if bias is not None and last.kwargs:  # alpha, which multiplies the bias
            raise NotExpertsError
        node = node if grouped else _named(node, ("squeeze",)).args[0]
        names = GROUPED if grouped else ("bmm",)
        left, right = _named(node, names).args[:2]
        if any(_given(node, i, name) is not None for i, name in ((3, "bias"), (4, "out_dtype"))):
            raise NotExpertsError
        if grouped:
            rows, weight = _cast(left), right
            turned = name_of(weight) in ("transpose", "mT")
            if turned and sorted(d % 3 for d in weight.args[1:]) != [1, 2]:
                raise NotExpertsError
            weight = weight.args[0] if turned else weight
        else:
            turned = name_of(left) == "getitem"
            chosen, token = (left, right) if turned else (right, left)
            rows = _named(token, ("unsqueeze",)).args[0]
            weight = _named(chosen, ("getitem",)).args[0]
        return _Linear(_cast(rows), weight, bias, turned, last)

    def _picks(
        self, graph: Canonical, up: _Linear, down: _Linear, gates: Any, inverse: Any, shape: Any
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return x, the index and the gates of tokens; both products choose by the same picks."""
        if inverse is None:
            rows = _named(up.rows, ("repeat_interleave",))
            if rows.args[1] != shape[1] or _given(rows, 2, "dim") != 0:
                raise NotExpertsError
            chosen = [_chosen(one) for one in (up, down)]
            picks = chosen[0]
            x = rows.args[0]
            biases = [one.bias for one in (up, down) if one.bias is not None]
            if any(_named(bias, ("getitem",)).args[1] is not picks for bias in biases):
                raise NotExpertsError
        else:
            rows = _named(up.rows, ("getitem",))
            x, place = rows.args
            divides = isinstance(place, fx.Node) and place.target is operator.floordiv
            divides = divides or name_of(place) == "floor_divide"
            if not divides or place.args[1] != shape[1]:
                raise NotExpertsError
            perm = place.args[0]
            ordered = _named(_named(perm, ("getitem",)).args[0], ("sort",))
            sorted_picks = next(
                (one for one in ordered.users if name_of(one) == "getitem" and one.args[1] == 0),
                None,
            )
            gates = _named(gates, ("getitem",))
            weights = graph.shape(down.weight) or (0,)
            if (
                perm.args[1] != 1
                or gates.args[1] is not perm
                or not _inverts(inverse, perm)
                or len(ordered.args) > 1
                or ordered.kwargs
            ):
                raise NotExpertsError
            chosen = [_counted(one, sorted_picks, weights[0]) for one in (up, down)]
            picks, gates = ordered.args[0], gates.args[0]
        if chosen[0] is not chosen[1] or chosen[0] is None:
            raise NotExpertsError
        own = _named(picks, RESHAPES).args[0], _named(gates, RESHAPES).args[0]
        if any(tuple(graph.shape(one) or ()) != tuple(shape[:2]) for one in own):
            raise NotExpertsError
        return x, *own

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        call: _Call = match.data
        x, _, _, index, *_ = call.operands
        x = editor.c.values[x]
        operands = list(call.operands)
        if not _is_top_k(index):
            operands[3] = counted_from_end(editor, index, match.info["groups"])
        new = editor.call(
            torch.ops.nmm.experts.default,
            *operands,
            meta_value=x.new_empty(x.shape),
            **call.said,
            target=editor.options.target,
            executor=editor.options.executor,
        )
        return editor.like(new, match.node)


def counted_from_end(editor: Editor, index: Any, groups: int) -> fx.Node:
    """Return an index of groups whose negative numbers count from the end, as indexing does."""
    below = editor.call(torch.ops.aten.lt.Scalar, index, 0)
    other = editor.call(torch.ops.aten.add.Scalar, index, groups)
    return editor.call(torch.ops.aten.where.self, below, other, index)


def _is_top_k(index: Any) -> bool:
    """Return whether an index is that of `topk`, which is never negative."""
    return name_of(index) == "getitem" and name_of(index.args[0]) == "topk"


def _chosen(linear: _Linear) -> fx.Node | None:
    """Return the picks by which a batched product gathers its weights, and its biases."""
    found: set[Any] = {one.args[1] for one in _gathers(linear)}
    return found.pop() if len(found) == 1 else None


def _gathers(linear: _Linear) -> Iterator[fx.Node]:
    product = linear.last
    for node in _between([product], {linear.rows, linear.weight}):
        held = name_of(node) == "getitem" and isinstance(node.args[1], fx.Node)
        if held and node is not linear.rows:
            yield node


def _counted(linear: _Linear, picks: Any, groups: Any) -> fx.Node | None:
    """Return the offsets of a grouped product if they count the sorted picks."""
    product = next(n for n in _between([linear.last], {linear.rows, linear.weight})
                   if name_of(n) in GROUPED)  # fmt: skip
    offsets = _given(product, 2, "offs")
    total = _named(offsets, ("cumsum",))
    counts = _named(total.args[0], ("histc",))
    source = counts.args[0]
    while isinstance(source, fx.Node) and name_of(source) in ("float", "int", "to", "_to_copy"):
        source = source.args[0]
    bounds = tuple(_given(counts, i + 1, name) for i, name in enumerate(("bins", "min", "max")))
    right = source is picks and bounds == (groups, 0, groups - 1)
    right = right and _given(total, 1, "dim") == 0
    if linear.bias is not None:
        right = right and _named(linear.bias, ("getitem",)).args[1] is picks
    return offsets if right else None


def _inverts(inverse: Any, perm: Any) -> bool:
    """Return whether `inverse` is filled as inverse[perm] = arange."""
    if name_of(inverse) not in ("empty_like", "new_empty") or inverse.args[0] is not perm:
        return False
    writes = _writes(inverse)
    if len(writes) != 1 or len(writes[0].args) < 3:
        return False
    _, place, value = writes[0].args[:3]
    place = place[0] if isinstance(place, (list, tuple)) else place
    counts = name_of(value) == "arange" and len(value.args) == 1
    return place is perm and counts


def _writes(inverse: fx.Node) -> list[fx.Node]:
    return [one for one in inverse.users if name_of(one) in ("setitem_", "index_put_")]


def _given(node: Any, place: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _named(node: Any, names: Any) -> Any:
    if not isinstance(node, fx.Node) or name_of(node) not in names:
        raise NotExpertsError
    return node


def _other(pair: list[fx.Node], one: fx.Node) -> fx.Node:
    return pair[0] if pair[1] is one else pair[1]


def _cast(node: Any) -> Any:
    """Return what a cast is of: x and weights have one dtype, which is checked."""
    return node.args[0] if name_of(node) in ("to", "_to_copy") else node


def _same_tokens(graph: Canonical, x: Any, shape: Any) -> bool:
    return tuple(graph.shape(x) or ()) == (shape[0], shape[2])


def _between(ends: list[fx.Node], stops: set[Any]) -> list[fx.Node]:
    """Return the nodes from `stops` to these, with them."""
    found = list(ends)
    for current in found:
        before = [n for n in current.all_input_nodes if n not in stops]
        found += [n for n in before if n not in found and n.op not in ("placeholder", "get_attr")]
    return found


def _region(last: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """Return the nodes of the function that ends at `last`, and the one value that it reads."""
    found = [last]
    ends: set[fx.Node] = set()
    for current in found:
        for n in current.all_input_nodes:
            if name_of(n) in (*GROUPED, "squeeze", "add_") or _has_bias(n):
                ends.add(n)
            elif n not in found:
                found.append(n)
    if len(ends) != 1 or len(found) > 40:
        raise NotExpertsError
    return found, ends.pop()


def _has_bias(node: Any) -> bool:
    """Return whether a node adds gathered biases to a product."""
    if name_of(node) != "add" or len(node.all_input_nodes) != 2:
        return False
    return any(name_of(n) in (*GROUPED, "squeeze") for n in node.all_input_nodes)


def _function(
    graph: Canonical, nodes: list[Any], start: fx.Node, last: fx.Node
) -> dict[str, Any] | None:
    """Return how ExpertsSpec says what some nodes compute of `start`, found by its values.

    The nodes are operations of elements that write nothing and that nothing writes to; values are
    in float64, on both sides of every number in the nodes. A cast that keeps the dtype of `start`,
    or widens it, is none.
    """
    width = (graph.shape(start) or (0,))[-1]
    if not isinstance(width, int) or width < 2:
        return None
    kept = (graph.dtype(start), torch.float32)
    for node in nodes:
        name = name_of(node)
        if name not in _OF_ELEMENTS and not (name in _CASTS and graph.dtype(node) in kept):
            return None
        if any(one in graph.effects.writers for one in (node, *node.users)):
            return None
    if any(one in graph.effects.writers and one.args[0] is start for one in nodes):
        return None
    sample = _samples(nodes, width)
    values: dict[fx.Node, Any] = {start: sample}
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    try:
        for node in sorted(nodes, key=order.__getitem__):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if name_of(node) in _CASTS:
                values[node] = args[0]
            elif node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            else:
                module = graph.module.get_submodule(str(node.target))
                values[node] = module(*args, **kwargs)
    except (TypeError, RuntimeError, KeyError, AttributeError):
        return None
    for said in _functions(nodes):
        wanted = gated(sample, **said)
        got = values[last]
        if got.shape == wanted.shape and torch.allclose(got, wanted, 1e-6, 1e-9):
            return {name: value for name, value in said.items() if value != _PLAIN[name]}
    return None


def _samples(nodes: list[Any], width: int) -> torch.Tensor:
    """Return rows whose elements are any of some numbers: small, large, beside those of nodes."""
    points = {0.0, *torch.linspace(-12, 12, 49).tolist(), 50.0, -50.0, 1000.0, -1000.0}
    for node in nodes:
        for number in (*node.args, *node.kwargs.values()):
            if isinstance(number, (int, float)) and abs(number) < 1e6:
                points |= {side * factor * number for side in (-1, 1) for factor in (0.9, 1.1, 3)}
    made = torch.tensor(sorted(points), dtype=torch.float64)
    rows = max(1, 8192 // width)
    drawn = torch.randint(len(made), (rows, width), generator=torch.Generator().manual_seed(0))
    return made[drawn]


def _functions(nodes: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield what the function may be, with the numbers that its nodes hold."""
    plain = {"limit": 0.0, "slope": 1.0, "plus": 0.0}
    for halves, activation in itertools.product(HALVES, ACTIVATIONS):
        yield {"halves": halves, "activation": activation, **plain}
    numbers = {
        name: {
            float(value)
            for node in nodes
            if name_of(node) in names
            for value in (*node.args, *node.kwargs.values())
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        }
        for name, names in (
            ("limit", ("clamp", "clamp_max", "clip")), ("slope", ("mul",)), ("plus", ("add",))
        )
    }  # fmt: skip
    each = (numbers["limit"], {1.0} | numbers["slope"], {0.0} | numbers["plus"])
    for halves, (limit, slope, plus) in itertools.product(HALVES, itertools.product(*each)):
        yield {"halves": halves, "activation": "silu", "limit": limit, "slope": slope, "plus": plus}
