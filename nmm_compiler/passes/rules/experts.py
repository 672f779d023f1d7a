"""Rule `experts`: the experts of a mixture, as transformers spells them, become one call.

    rows = x.repeat_interleave(k, 0)              or   x[perm // k], perm = sort(index.reshape(-1))
    h    = bmm(rows, gate_up[index.reshape(-1)])  or   grouped_mm(rows, gate_up, cumsum(histc))
    y    = bmm(act(h), down[index.reshape(-1)])   or   grouped_mm(act(h), down, offs)
    (y * gates.reshape(-1)[.., None])[inverse].view(tokens, k, -1).sum(1)
      ->   nmm.experts(x, gate_up, down, index, gates)

Both have masks where experts are shared by devices: an index of the number of experts or more is
an expert of another device, and becomes -1. A product of all tokens with all experts, in which the
scores of experts that a token did not choose are 0, becomes a call for the chosen ones:

    scores = sigmoid(full(-inf).scatter(1, index, top))  or  zeros.scatter(1, index, top)
    bmm(act(bmm(x.repeat(experts, 1) * scores.T, gate_up)), down).sum(0)           Llama 4
    (bmm(act(bmm(x.repeat(experts, 1), gate_up)), down) * scores.T).sum(0)         gpt-oss, 4.56

`batched`, `grouped` and `of_all` are these forms as transformers writes them. Each is traced, and
`_agrees` compares the trace with the graph, node by node. The function between the products is
recognized by its values: an activation of the gate times up, or gpt-oss's clamped product. A Python
loop over the experts breaks the graph; its beginning is recognized and refused. One call is taken
unless the experts one by one are predicted to be faster. A call of `nmm.experts` that the model
makes itself, as compressed experts do, becomes a call for the target.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.ops.chosen import EXPERTS, said_of
from nmm_compiler.passes.chains.safety import (
    Refusal,
    real_users,
    tokens_to_judge,
    unsafe,
)
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.graph.canonical import Canonical, Opaque, Product, dtype_name
from nmm_compiler.passes.graph.effects import upstream
from nmm_compiler.passes.graph.torch_names import applied, target_name
from nmm_compiler.passes.rules.base import KernelRule, Match

GROUPED = frozenset({"grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback"})
RESHAPES = frozenset({"view", "reshape", "flatten"})
_ONE_NAME = {
    **dict.fromkeys(GROUPED, "grouped_mm"), **dict.fromkeys(RESHAPES, "reshape"),
    **{f"{name}_": name for name in ("add", "clamp", "masked_fill")},
    "mT": "transpose", "floor_divide": "floordiv",
}  # fmt: skip
"""The names of operations that a form has in one spelling; what reads a value behind a write in
place reads its result."""
_OWN = "nmm::experts"
_OF_DIMS = ("unsqueeze", "squeeze", "transpose")

# What may stand between the products of an expert, beside casts.
_OF_ELEMENTS = frozenset({
    "chunk", "split", "unbind", "getitem", "mul", "add", "sub", "div", "neg", "pow", "square",
    "exp", "silu", "gelu", "relu", "sigmoid", "tanh", "erf", "clamp", "clamp_max", "clamp_min",
    "clip",
})  # fmt: skip
_CASTS = frozenset({"to", "float", "int", "type_as", "contiguous"})


class NotExpertsError(Exception):
    """The pattern ends here: nothing to refuse."""


# -- the forms ----------------------------------------------------------------------------------
# Numbers have names: each stands for one number. `function` is what stands between the products.

_GIVEN = ("x", "index", "gates", "gate_up", "down", "gate_up_bias", "down_bias")


def batched(of: Any, biased: bool, turned: bool, absent: bool) -> Any:
    """Return y times its gates: weights are gathered for each pick."""
    picks, each = of.index.reshape(-1), of.gates.reshape(-1)
    if absent:
        each = each.masked_fill(picks >= "groups", 0.0)
        picks = picks.clamp(0, "last")

    def linear(rows: Any, weight: Any, own: Any) -> Any:
        if turned:
            y = torch.bmm(weight[picks], rows.unsqueeze(-1)).squeeze(-1)
        else:
            y = torch.bmm(rows.unsqueeze(-2), weight[picks]).squeeze(-2)
        return y + own[picks] if biased else y

    h = linear(of.x.repeat_interleave("top_k", dim=0), of.gate_up, of.gate_up_bias)
    return linear(h.function(), of.down, of.down_bias) * each.unsqueeze(-1)


def grouped(of: Any, biased: bool, turned: bool, absent: bool) -> Any:
    """Return y times its gates: rows are sorted by expert."""
    ordered: Any = torch.sort(of.index.reshape(-1))
    picks, perm = ordered[0], ordered[1]
    rows, each = of.x[perm // "top_k"], of.gates.reshape(-1)[perm]
    counts = picks.histc(bins="groups", min=0, max="last")
    offsets = counts.cumsum(dim=0, dtype="dtype")
    mask = (picks >= "groups").unsqueeze(-1)
    if absent:  # rows of absent experts are 0, their picks in bounds for gathers of biases
        picks, rows = picks.clamp(max="last"), rows.masked_fill(mask, 0.0)

    def linear(rows: Any, weight: Any, own: Any) -> Any:
        weight = weight.transpose(-2, -1) if turned else weight
        y = torch._grouped_mm(rows, weight, offs=offsets)
        y = y + own[picks] if biased else y
        return y.masked_fill(mask, 0.0) if absent else y

    h = linear(rows, of.gate_up, of.gate_up_bias)
    y = linear(h.function(), of.down, of.down_bias) * each.unsqueeze(-1)
    inverse: Any = torch.empty_like(perm)
    return y[inverse.written(perm, "arange")]


def of_all(of: Any, biased: bool, scaled: bool) -> Any:
    """Return y of all tokens and all experts; scaled: gates multiply x, and not y."""
    rows = of.x.repeat("groups", 1)
    h: Any = torch.bmm((rows * of.gates if scaled else rows).reshape(), of.gate_up)
    y = torch.bmm((h + of.gate_up_bias if biased else h).function(), of.down)
    y = y + of.down_bias if biased else y
    return y if scaled else y.reshape() * of.gates


@functools.cache
def _traced(form: Callable[..., Any], *said: Any) -> fx.Node:
    """Return the last node of a form."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    given = {name: fx.Proxy(graph.placeholder(name), tracer) for name in _GIVEN}
    return form(SimpleNamespace(**given), *said).node


def _said(graph: Canonical | None, node: fx.Node) -> tuple[str, list[Any]]:
    """Return what a node does, with the names of its keywords, and to what; graph: of no form."""
    said = {keyword: value for keyword, value in node.kwargs.items() if value is not None}
    name, args = target_name(node) or "", tree_leaves((node.args, said))
    if name == "mT":
        args += [-2, -1]
    name = _ONE_NAME.get(name, name)
    if name == "reshape":
        return name, args[:1]
    if name in _OF_DIMS and graph is not None:
        rank = len(graph.sizes(args[0])) + (name == "unsqueeze")
        args[1:] = sorted(dim - rank if dim >= 0 else dim for dim in args[1:])
    return " ".join((name, *said)), args


def _agrees(graph: Canonical, own: Any, value: Any, values: dict[str, Any]) -> bool:
    """Return whether a value of a graph is one of a form; note the form's values by their names.

    Casts are passed over, and noted.
    """
    if isinstance(own, str):
        return bool(values.setdefault(own, value) == value)
    if not isinstance(own, fx.Node):
        return bool(own == value)
    while own.op != "placeholder" and target_name(value) in _CASTS:
        values["casts"] = (*values.get("casts", ()), value)
        value = value.args[0]
    if own.name in values:
        return bool(values[own.name] is value)
    if not isinstance(value, fx.Node):
        return False
    values[own.name] = value
    if own.op == "placeholder":
        return True
    if own.target == "written":
        values["writes"] = writes = [one for one in value.users if one in graph.effects.writers]
        _require(len(writes) == 1 and target_name(writes[0]) == "setitem_")
        pairs = zip(own.args, writes[0].args, strict=True)
        return all(_agrees(graph, *pair, values) for pair in pairs)
    if own.target == "function":
        between, ends = [value], set[fx.Node]()
        for one in (n for node in between for n in node.all_input_nodes):
            tried = dict(values)
            if target_name(one) not in _CASTS and _agrees(graph, own.args[0], one, tried):
                ends.add(one)
                values |= tried
            elif one not in between:
                between.append(one)
                _require(len(between) <= 40)
        values["function"] = between, *ends, value
        return len(ends) == 1
    (name, mine), (other, theirs) = _said(None, own), _said(graph, value)
    if name != other or len(mine) != len(theirs):
        return False
    for order in (theirs, theirs[::-1]) if name in ("mul", "add") else (theirs,):
        tried = dict(values)
        if all(_agrees(graph, *pair, tried) for pair in zip(mine, order, strict=True)):
            values.update(tried)
            return True
    return False


def _found(
    graph: Canonical, value: Any, forms: Iterator[tuple[Any, ...]]
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the values of the first form that a value is, by their names in it, and which one it
    is; NotExpertsError where it is none."""
    for form, *said in forms:
        end, values = _traced(form, *said), dict[str, Any](casts=())
        with contextlib.suppress(NotExpertsError):
            if _agrees(graph, end, value, values):
                return values, tuple(said)
    raise NotExpertsError


@dataclass(frozen=True)
class _Mixture:
    """What one mixture computes.

    given: the arguments of nmm.experts by name. scores: [tokens, experts], which have the gates
    where these are None. scaled: they multiply x and not y. absent: an index of the number of
    experts or more is no expert. writes: nodes that write in place to what the mixture makes.
    """

    given: dict[str, Any]
    scores: fx.Node | None = None
    scaled: bool = False
    absent: bool = False
    writes: Sequence[fx.Node] = ()


class Experts(KernelRule):
    """A sum over the picks of each token of gated MLPs that an index chooses."""

    name = "experts"
    ends_at = (Product, Opaque)

    def pattern(self, graph: Canonical, node: Any) -> Iterator[Any]:
        """Propose sums over the picks of tokens or over experts, and beginnings of loops."""
        name = target_name(node)
        summed = name == "sum" and not set(node.kwargs) - {"dim"} and len(node.args) <= 2
        summed = summed and _given(node, 1, "dim") in (0, [0], (0,), 1, [1], (1,))
        if summed or _begins_loop(node) or name == _OWN:
            yield node

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the picks, both products and what stands between them."""
        node = candidate
        if _begins_loop(node):
            return Refusal(
                "no_kernel", "a loop over the experts that tokens chose breaks the graph", node,
                remedy='load the model with experts_implementation="grouped_mm", if it has that',
            )  # fmt: skip
        try:
            mixture = self._read(graph, node)
        except NotExpertsError:
            return None
        if isinstance(mixture, Refusal):
            return mixture
        given: Any = EXPERTS.bound((), fx.map_arg(mixture.given, graph.values.__getitem__))
        dtype = given["x"].dtype
        branched = any(given[name] is not None for name in ("gate_up_v", "down_v"))
        if given["format"] == "fp8" and branched and dtype == torch.float16:
            why = "a branch divided by small scales may leave float16; cast the model to bfloat16"
            return Refusal("no_kernel", why, node)
        every, ends = (*mixture.given.values(), mixture.scores), [node, *mixture.writes]
        reads = [one for one in every if isinstance(one, fx.Node)]
        inner = {n for n in upstream(ends, {*reads}) if n.op not in ("placeholder", "get_attr")}
        for write in graph.effects.writers:
            if not write.users and write.all_input_nodes[0] in inner:  # nothing reads it
                inner.add(write)
        why_not = unsafe(graph, inner, node, reads, allowed=mixture.writes)
        if why_not is not None:
            return why_not

        def spec() -> KernelSpec:
            tokens = tokens_to_judge(math.prod(given["index"].shape[:-1]))
            own = EXPERTS.spec_of(given, tokens, dtype_name(dtype))
            return replace(own, m=own.m * own.top_k, top_k=1) if mixture.scaled else own

        match = Match(self.name, node, frozenset(inner), data=mixture)
        priced = self.priced(graph, match, spec)
        return match if target_name(node) == _OWN and "predicted" in match.info else priced

    def _read(self, graph: Canonical, node: Any) -> _Mixture | Refusal:
        """Return the mixture that ends at a node; NotExpertsError where there is none.

        A call that the model makes itself is one, whatever its weights are stored as.
        """
        if target_name(node) == _OWN:
            return _Mixture(EXPERTS.bound(node.args, node.kwargs))
        by_pick = _given(node, 1, "dim") in (1, [1], (1,))
        mixture, values = _of_picks(graph, node) if by_pick else _of_all(graph, node)
        _require(len(graph.sizes(mixture.given["down"])) == 3)
        said = _function(graph, *values["function"])
        if said is None:
            why = "the function between the products of the experts is no gated product"
            return Refusal("no_kernel", why, values["function"][-1])
        dtypes = [graph.dtype(mixture.given[name]) for name in ("x", "gate_up", "down")]
        casts = {target_name(one) == "to" and graph.dtype(one) for one in real_users(node)}
        rounds = graph.dtype(node) == dtypes[0] or casts == {dtypes[0]}
        if len({*dtypes}) > 1 or not rounds:
            why = (
                "x {}, gate_up {}, down {} and the result {} are not one dtype that kernels "
                "compute in"
            )
            return Refusal("dtype", why.format(*dtypes, graph.dtype(node)), node)
        for one in values["casts"]:
            held: Any = graph.dtype(one.args[0])
            _require(not held.is_floating_point or graph.dtype(one) in (dtypes[0], torch.float32))
        return replace(mixture, given=mixture.given | said)

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        values, mixture, old = graph.values, match.data, match.node
        x, index, gates = (mixture.given[name] for name in ("x", "index", "gates"))
        groups = editor.shape(mixture.given["down"])[0]
        if mixture.scores is not None:
            gates = editor.call(aten.gather.default, mixture.scores, 1, index)
        if mixture.scaled:  # a row for each pick, since each has its own x
            row = editor.call(aten.unsqueeze.default, x, 1)
            row = editor.call(aten.mul.Tensor, row, editor.call(aten.unsqueeze.default, gates, -1))
            x = editor.call(aten.flatten.using_ints, row, 0, 1)
            index = editor.call(aten.view.default, index, [-1, 1])
            gates = editor.call(aten.ones_like.default, index, dtype=values[x].dtype)
        elif mixture.absent:
            index = editor.call(aten.clamp.default, index, 0)
            elsewhere = editor.call(aten.ge.Scalar, index, groups)
            index = editor.call(aten.masked_fill.Scalar, index, elsewhere, -1)
        elif not (target_name(old) == _OWN or _is_top_k(index)):
            index = counted_from_end(editor, index, groups)
        given = mixture.given | {"x": x, "index": index, "gates": gates}
        new = editor.kernel(EXPERTS.name, given)
        if mixture.scaled:
            new = editor.call(aten.sum.dim_IntList, editor.reshape(new, editor.shape(row)), [1])
        return editor.operand(editor.reshape(new, editor.shape(old)))


def counted_from_end(editor: Editor, index: Any, groups: Any) -> fx.Node:
    """Return an index of groups whose negative numbers count from the end, as indexing does."""
    below = editor.call(aten.lt.Scalar, index, 0)
    other = editor.call(aten.add.Scalar, index, groups)
    return editor.call(aten.where.self, below, other, index)


def _is_top_k(index: Any) -> bool:
    """Return whether an index is that of `topk`, which is never negative."""
    return target_name(index) == "getitem" and target_name(index.args[0]) == "topk"


def _begins_loop(node: Any) -> bool:
    """Return whether a node asks which experts some token chose, as loops over experts do."""
    if target_name(node) not in ("gt", "greater") or node.args[1] != 0:
        return False
    counts = node.args[0]
    mask: Any = counts.args[0] if target_name(counts) == "sum" else None
    return target_name(mask) == "permute" and target_name(mask.args[0]) == "one_hot"


def _of_picks(graph: Canonical, node: Any) -> tuple[_Mixture, dict[str, Any]]:
    """Read a sum over the picks of each token; return the values of its form, too."""
    shape = graph.sizes(node.args[0])
    ways = (True, False)
    forms = itertools.product((batched, grouped), ways, ways, ways)
    values, (_, turned, absent) = _found(graph, _behind(node.args[0], RESHAPES), forms)
    sizes = [graph.sizes(values[name]) for name in ("index", "gates", "x")]
    _require(len(shape) == 3 and sizes == [tuple(shape[:2])] * 2 + [(shape[0], shape[2])])
    groups = (graph.shape(values["down"]) or (0,))[0]
    _require(values["top_k"] == shape[1] and values.get("groups", groups) == groups)
    _require(values.get("last", groups - 1) == groups - 1)
    places = values.get("arange")  # where the rows of a sort were
    _require(places is None or len(_named(places, ("arange",)).args) == 1)
    given = {name: values.get(name) for name in _GIVEN}
    given["weight_layout"] = "col" if turned else "row"
    return _Mixture(given, absent=absent, writes=values.get("writes", ())), values


def _of_all(graph: Canonical, node: Any) -> tuple[_Mixture, dict[str, Any]]:
    """Read a sum over experts of a product of all tokens with all of them; return the values of its
    form, too."""
    # with scaled x, an expert that no token chose would add its bias
    forms = ((of_all, True, False), (of_all, False, False), (of_all, False, True))
    values, (_, scaled) = _found(graph, _behind(node.args[0], RESHAPES), iter(forms))
    size, groups = graph.sizes(values["x"]), (graph.shape(values["down"]) or (0,))[0]
    _require(len(size) == 2 and graph.sizes(values["reshape"]) == (groups, *size))
    _require(values["groups"] == groups and math.prod(graph.sizes(node)) == math.prod(size))
    for name in _GIVEN[-2:] if "gate_up_bias" in values else ():
        held, dims = graph.base(values[name])
        _require([*dims] == [*graph.whole(held)[:1], (), *graph.whole(held)[1:]])
        values[name] = held
    scores: Any
    scores, dims = graph.base(values["gates"])  # each for one row of features
    _require(graph.sizes(values["mul"])[:-1] == graph.sizes(values["gates"])[:-1])
    turned = tuple(itertools.chain(*reversed(graph.whole(scores))))
    _require(dims[-1:] == ((),) and tuple(itertools.chain(*dims)) == turned)
    index = _sparse(scores)
    _require(graph.sizes(scores) == (size[0], groups))
    given = {name: values.get(name) for name in _GIVEN} | {"index": index, "gates": None}
    return _Mixture(given, scores=scores, scaled=scaled), values


def _sparse(scores: Any) -> fx.Node:
    """Return the index of the experts whose scores are not 0; those are the largest of a row."""
    node, wanted = _behind(scores, _CASTS), 0.0
    if target_name(node) == "sigmoid":
        node, wanted = _behind(node.args[0], _CASTS), -math.inf
    given = _named(node, ("scatter", "scatter_"))
    into, index = given.args[0], _given(given, 2, "index")
    # else it sums where an expert is there twice
    _require(not set(given.kwargs) - {"dim", "index", "src"} and len(given.args) <= 4)
    fill = (
        0.0
        if target_name(into) in ("zeros", "zeros_like")
        else _named(into, ("full", "full_like")).args[1]
    )
    _require(fill == wanted and _given(given, 1, "dim") in (1, -1))
    _require(_is_top_k(index) and index.args[1] == 1)  # no expert twice
    return index


def _given(node: Any, place: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _require(condition: bool) -> None:
    """Raise NotExpertsError unless a condition of the pattern holds."""
    if not condition:
        raise NotExpertsError


def _named(node: Any, names: Any) -> Any:
    """Return a node that calls one of these operations; NotExpertsError for any other value."""
    _require(target_name(node) in names)
    return node


def _behind(node: Any, names: Any) -> Any:
    """Return the value behind calls of these operations."""
    while target_name(node) in names:
        node = node.args[0]
    return node


def _function(
    graph: Canonical, nodes: list[Any], start: fx.Node, last: fx.Node
) -> dict[str, Any] | None:
    """Return how ExpertsSpec says what some nodes compute of `start`, found by its values.

    The nodes are operations of elements that write nothing; values are in float64, on both sides of
    every number in the nodes. A cast that keeps the dtype of `start`, or widens it, is none.
    """
    kept = (graph.dtype(start), torch.float32)
    for node in nodes:
        name = target_name(node)
        known = name in _OF_ELEMENTS or (name in _CASTS and graph.dtype(node) in kept)
        if not known or node in graph.effects.writers:
            return None
    sample = _samples(nodes, graph.sizes(start)[-1])
    values: dict[Any, Any] = {start: sample}
    try:
        for node in sorted(nodes, key=graph.effects.position.__getitem__):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = args[0] if target_name(node) in _CASTS else applied(node, args, kwargs)
    except (TypeError, RuntimeError, KeyError, AttributeError):
        return None
    kinds = ("clamp", "clamp_max", "clip"), ("mul",), ("add",)
    numbers = (_numbers([n for n in nodes if target_name(n) in names]) for names in kinds)
    return said_of(sample, values[last], *numbers)


def _numbers(nodes: list[Any]) -> set[float]:
    """Return the magnitudes of the numbers that nodes have as arguments, but for 0."""
    given = (value for node in nodes for value in (*node.args, *node.kwargs.values()))
    numbers = (value for value in given if isinstance(value, (int, float)))
    return {abs(float(value)) for value in numbers if value and not isinstance(value, bool)}


def _samples(nodes: list[Any], width: Any) -> torch.Tensor:
    """Return rows whose elements are any of some numbers: small, large, beside those of nodes."""
    points = {0.0, *torch.linspace(-12, 12, 49).tolist(), 50.0, -50.0, 1000.0, -1000.0}
    for number in _numbers(nodes):
        if number < 1e6:
            points |= {side * factor * number for side in (-1, 1) for factor in (0.9, 1.1, 3)}
    values = torch.tensor(sorted(points), dtype=torch.float64)
    rows = max(1, 8192 // width)
    drawn = torch.randint(len(values), (rows, width), generator=torch.Generator().manual_seed(0))
    return values[drawn]
