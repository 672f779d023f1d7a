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
    (bmm(act(bmm(x.repeat(experts, 1), gate_up)), down) * scores.T).sum(0)

The function between the products is recognized by its values: an activation of the gate times up,
or gpt-oss's clamped product. A Python loop over the experts breaks the graph; its beginning is
recognized and refused. One call is taken unless the experts one by one are predicted to be faster.
A call of `nmm.experts` that the model makes itself, as compressed experts do, becomes a call for
the target.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.ops.chosen import EXPERTS, said_of
from nmm_compiler.passes.chains.safety import (
    DTYPES,
    Refusal,
    real_users,
    tokens_to_judge,
    unsafe,
)
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical, Opaque, Product, dtype_name, owner_of
from nmm_compiler.passes.graph.effects import upstream
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.rules.base import KernelRule, Match

aten = torch.ops.aten
GROUPED = frozenset({"grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback"})
RESHAPES = frozenset({"view", "reshape", "contiguous", "flatten", "unsqueeze", "squeeze"})
_PRODUCTS = (*GROUPED, "bmm")
_PLAIN: dict[str, Any] = {
    "halves": "joined", "activation": "silu", "limit": 0.0, "slope": 1.0, "plus": 0.0,
}  # fmt: skip


# What may stand between the products of an expert, beside casts.
_OF_ELEMENTS = frozenset({
    "chunk", "split", "unbind", "getitem", "mul", "add", "sub", "div", "neg", "pow", "square",
    "exp", "silu", "gelu", "relu", "sigmoid", "tanh", "erf", "clamp", "clamp_max", "clamp_min",
    "clip",
})  # fmt: skip
_CASTS = frozenset({"to", "_to_copy", "float", "type_as", "contiguous"})


class NotExpertsError(Exception):
    """The pattern ends here: nothing to refuse."""


def name_of(value: Any) -> str | None:
    """Return the canonical name of what a node calls, None for what is no node."""
    return target_name(value) if isinstance(value, fx.Node) else None


@dataclass(frozen=True)
class _Linear:
    """One product: its rows, the weights and biases of all experts, whether they lie [out, in].

    product: the node of the product alone. adds: where the bias is added in place. mask: of absent
    experts. picks: by which weights or biases are gathered.
    """

    rows: Any
    weight: fx.Node
    bias: fx.Node | None
    turned: bool
    product: fx.Node
    adds: tuple[fx.Node, ...] = ()
    mask: fx.Node | None = None
    picks: Any = None


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
    writes: frozenset[fx.Node] = frozenset()

    @classmethod
    def of(
        cls, x: Any, index: Any, gates: Any, up: _Linear, down: _Linear, **more: Any
    ) -> _Mixture:
        """Return the mixture of x [tokens, k], index and gates [tokens, top_k] and two products."""
        _require(up.turned == down.turned)
        given = {
            "x": x, "gate_up": up.weight, "down": down.weight, "index": index, "gates": gates,
            "gate_up_bias": up.bias, "down_bias": down.bias,
            "weight_layout": "col" if down.turned else "row",
        }  # fmt: skip
        return cls(given, **more)

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes that the call reads."""
        every = (*self.given.values(), self.scores)
        return [one for one in every if isinstance(one, fx.Node)]


class Experts(KernelRule):
    """A sum over the picks of each token of gated MLPs that an index chooses."""

    name = "experts"
    ends_at = (Product, Opaque)

    def pattern(self, graph: Canonical, node: Any) -> Iterator[Any]:
        """Propose sums over the picks of tokens or over experts, and beginnings of loops."""
        summed = name_of(node) == "sum" and not set(node.kwargs) - {"dim"} and len(node.args) <= 2
        summed = summed and _given(node, 1, "dim") in (0, [0], (0,), 1, [1], (1,))
        if summed or _begins_loop(node) or _is_own(node):
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
        if dtype not in DTYPES:
            return Refusal("dtype", f"no kernel computes experts in {dtype}", node)
        branched = any(given[name] is not None for name in ("gate_up_v", "down_v"))
        if given["format"] == "fp8" and branched and dtype == torch.float16:
            why = "a branch divided by small scales may leave float16; cast the model to bfloat16"
            return Refusal("no_kernel", why, node)
        ends, reads = [node, *mixture.writes], mixture.operands
        inner = [n for n in upstream(ends, {*reads}) if n.op not in ("placeholder", "get_attr")]
        why_not = unsafe(graph, inner, node, reads, allowed=mixture.writes)
        if why_not is not None:
            return why_not
        try:
            tokens = tokens_to_judge(math.prod(given["index"].shape[:-1]))
            spec = EXPERTS.spec_of(given, tokens, dtype_name(dtype))
            if mixture.scaled:
                spec = replace(spec, m=spec.m * spec.top_k, top_k=1)
            spec.check(graph.chip)
        except (NmmError, TypeError) as error:
            return Refusal("no_kernel", str(error), node)
        sizes = {name: getattr(spec, name) for name in ("m", "k", "n", "groups", "top_k")}
        info = {**sizes, "chains": 0}  # its products are dense
        match = Match(self.name, node, frozenset(inner), data=mixture, info=info)
        priced = self.priced(graph, match, spec)
        return match if _is_own(node) else priced

    def _read(self, graph: Canonical, node: Any) -> _Mixture | Refusal:
        """Return the mixture that ends at a node; NotExpertsError where there is none.

        A call that the model makes itself is one, whatever its weights are stored as.
        """
        if _is_own(node):
            return _Mixture(EXPERTS.bound(node.args, node.kwargs))
        by_pick = _given(node, 1, "dim") in (1, [1], (1,))
        mixture, rows = _of_picks(graph, node) if by_pick else _of_all(graph, node)
        _require(len(graph.sizes(mixture.given["down"])) == 3)
        between, h = _region(rows)
        said = _function(graph, between, h, rows)
        if said is None:
            why = "the function between the products of the experts is no gated product"
            return Refusal("no_kernel", why, rows)
        dtypes = [graph.dtype(mixture.given[name]) for name in ("x", "gate_up", "down")]
        if len({*dtypes}) > 1 or not _rounds(graph, node, dtypes[0]):
            why = (
                "x {}, gate_up {}, down {} and the result {} are not one dtype that kernels "
                "compute in"
            )
            return Refusal("dtype", why.format(*dtypes, graph.dtype(node)), node)
        return replace(mixture, given=mixture.given | said)

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        values, mixture, old = graph.values, match.data, match.node
        x, index, gates = (mixture.given[name] for name in ("x", "index", "gates"))
        groups = editor.shape(mixture.given["down"])[0]
        if mixture.scores is not None:
            gates = editor.call(aten.gather.default, mixture.scores, 1, index)
        elif mixture.absent:
            index = editor.call(aten.clamp.default, index, 0)
            elsewhere = editor.call(aten.ge.Scalar, index, groups)
            index = editor.call(aten.masked_fill.Scalar, index, elsewhere, -1)
        elif not (_is_own(old) or _is_top_k(index)):
            index = counted_from_end(editor, index, groups)
        if mixture.scaled:  # a row for each pick, since each has its own x
            row = editor.call(aten.unsqueeze.default, x, 1)
            row = editor.call(aten.mul.Tensor, row, editor.call(aten.unsqueeze.default, gates, -1))
            picks = editor.shape(row)
            x = editor.call(aten.flatten.using_ints, row, 0, 1)
            index = editor.call(aten.view.default, index, [-1, 1])
            gates = editor.call(aten.ones_like.default, index, dtype=values[x].dtype)
        given = mixture.given | {"x": x, "index": index, "gates": gates}
        new = editor.kernel(EXPERTS.name, given, values[x].new_empty(values[x].shape))
        if mixture.scaled:
            new = editor.call(aten.sum.dim_IntList, editor.reshape(new, picks), [1])
        new = editor.reshape(new, editor.shape(old))
        wanted = values[old].dtype
        if values[new].dtype != wanted:
            new = editor.call(aten._to_copy.default, new, dtype=wanted)
        return editor.like(new, old)


def counted_from_end(editor: Editor, index: Any, groups: Any) -> fx.Node:
    """Return an index of groups whose negative numbers count from the end, as indexing does."""
    below = editor.call(aten.lt.Scalar, index, 0)
    other = editor.call(aten.add.Scalar, index, groups)
    return editor.call(aten.where.self, below, other, index)


def _is_top_k(index: Any) -> bool:
    """Return whether an index is that of `topk`, which is never negative."""
    return name_of(index) == "getitem" and name_of(index.args[0]) == "topk"


def _is_own(node: Any) -> bool:
    """Return whether a node is a call of `nmm.experts`."""
    return str(getattr(node.target, "overloadpacket", node.target)) == "nmm.experts"


def _begins_loop(node: Any) -> bool:
    """Return whether a node asks which experts some token chose, as loops over experts do."""
    if name_of(node) not in ("gt", "greater") or node.args[1] != 0:
        return False
    counts = node.args[0]
    mask: Any = counts.args[0] if name_of(counts) == "sum" else None
    return name_of(mask) == "permute" and name_of(mask.args[0]) == "one_hot"


def _rounds(graph: Canonical, node: Any, dtype: Any) -> bool:
    """Return whether a result has a dtype, or is cast to it by all that read it."""
    if graph.dtype(node) == dtype:
        return True
    readers = real_users(node)
    casts = [name_of(user) in ("to", "_to_copy") and graph.dtype(user) == dtype for user in readers]
    return bool(readers) and all(casts)


def _of_picks(graph: Canonical, node: Any) -> tuple[_Mixture, Any]:
    """Read a sum over the picks of each token; return the rows of its last product, too."""
    view = _named(node.args[0], RESHAPES)
    shape = graph.sizes(view)
    _require(len(shape) == 3)
    product, inverse = view.args[0], None
    if name_of(product) == "getitem" and isinstance(product.args[1], fx.Node):
        product, inverse = product.args
    made, gates = _times_gates(product)
    kind = "batched" if inverse is None else "grouped"
    down = _linear(graph, made, kind)
    up = _linear(graph, _region(down.rows)[1], kind)
    read = _batched_picks if inverse is None else _grouped_picks
    mixture = read(graph, up, down, gates, inverse, shape)
    sizes = [graph.sizes(mixture.given[name]) for name in ("index", "gates", "x")]
    _require(sizes == [tuple(shape[:2])] * 2 + [(shape[0], shape[2])])
    return mixture, down.rows


def _times_gates(product: Any) -> tuple[Any, Any]:
    """Return y and the gates of y * gates[.., None]."""
    both = _named(product, ("mul",)).args
    sides = [one for one in both if isinstance(one, fx.Node)]
    spread = [one for one in sides if name_of(one) == "unsqueeze"]
    _require(len(sides) == 2 and bool(spread) and spread[-1].args[1] in (-1, 1))
    made = sides[0] if sides[1] is spread[-1] else sides[1]
    return made, spread[-1].args[0]


def _linear(graph: Canonical, node: Any, kind: str) -> _Linear:
    """Return the product that a node is, with bias and mask; kind: "grouped", "batched", "all"."""
    bias, mask, picks = None, None, None
    if name_of(node) == "masked_fill":
        node, mask, value = (*node.args, node.kwargs.get("value"))[:3]
        _require(value == 0 and kind == "grouped")
    added = [one for one in node.users if name_of(one) == "add_" and one.args[0] is node]
    sums = added
    if len(added) == 1:
        bias = added[0].args[1]
    elif name_of(node) in ("add", "add_"):
        sums = [node]
        node, bias = node.args
    _require(not any(one.kwargs for one in sums))  # alpha, which multiplies the bias
    product = _named(node, ("squeeze",)).args[0] if kind == "batched" else node
    left, right = _named(product, GROUPED if kind == "grouped" else ("bmm",)).args[:2]
    _require(_given(product, 3, "bias") is None and _given(product, 4, "out_dtype") is None)
    if kind == "batched":
        turned = name_of(left) == "getitem"
        chosen, token = (left, right) if turned else (right, left)
        rows = _named(token, ("unsqueeze",)).args[0]
        weight, picks = _named(chosen, ("getitem",)).args
    else:
        rows, weight = left, right
        turned = name_of(weight) in ("transpose", "mT")
        if turned:
            _require(sorted(d % 3 for d in weight.args[1:]) in ([], [1, 2]))
            weight = weight.args[0]
    if bias is not None and kind == "all":
        held, dims = graph.base(bias)
        _require([*dims] == [*graph.whole(held)[:1], (), *graph.whole(held)[1:]])
        bias = owner_of(held)
    elif bias is not None:
        bias, of_bias = _named(bias, ("getitem",)).args
        _require(picks in (None, of_bias))
        picks = of_bias
    rows = _behind(rows, ("to", "_to_copy"))  # x and weights have one dtype, which is checked
    return _Linear(rows, weight, bias, turned, product, tuple(added), mask, picks)


def _batched_picks(
    graph: Canonical, up: _Linear, down: _Linear, gates: Any, inverse: Any, shape: Any
) -> _Mixture:
    """Read weights that are gathered for each pick."""
    rows = _named(up.rows, ("repeat_interleave",))
    _require(rows.args[1] == shape[1] and _given(rows, 2, "dim") == 0)
    picks = up.picks
    _require(picks is down.picks)
    groups = (graph.shape(down.weight) or (0,))[0]
    absent = name_of(picks) == "clamp"
    if absent:
        bounds = tuple(_given(picks, i, name) for i, name in ((1, "min"), (2, "max")))
        gates, mask, value = (*_named(gates, ("masked_fill",)).args, None)[:3]
        picks = picks.args[0]
        _require(bounds == (0, groups - 1) and value == 0 and _names_absent(mask, picks, groups))
    return _Mixture.of(
        rows.args[0], _flattened(picks), _flattened(gates), up, down, absent=absent,
        writes=frozenset((*up.adds, *down.adds)),
    )  # fmt: skip


def _grouped_picks(
    graph: Canonical, up: _Linear, down: _Linear, gates: Any, inverse: Any, shape: Any
) -> _Mixture:
    """Read rows that are sorted by expert."""
    rows = _named(up.rows, ("getitem",))
    x, place = rows.args
    divides = isinstance(place, fx.Node) and place.target is operator.floordiv
    divides = divides or name_of(place) == "floor_divide"
    _require(divides and place.args[1] == shape[1])
    perm = place.args[0]
    ordered = _named(_named(perm, ("getitem",)).args[0], ("sort",))
    picks = next(
        (one for one in ordered.users if name_of(one) == "getitem" and one.args[1] == 0), None
    )
    gates = _named(gates, ("getitem",))
    groups = (graph.shape(down.weight) or (0,))[0]
    writes = _inverts(inverse, perm).union(up.adds, down.adds)
    _require(perm.args[1] == 1 and gates.args[1] is perm)
    _require(len(ordered.args) == 1 and not ordered.kwargs)
    offsets = [_counted(one, picks, groups) for one in (up, down)]
    _require(offsets[0] is offsets[1] and {up.picks, down.picks} <= {picks, None})
    masks = {up.mask, down.mask}
    absent = masks != {None}
    if absent:
        mask = _named(up.mask, ("unsqueeze",))
        _require(len(masks) == 1 and _names_absent(mask.args[0], picks, groups))
        # zeros in the rows of absent experts, and absent picks in bounds for gathers of biases
        zeros = _writes_to(rows, ("masked_fill_",))
        _require(all(tuple(one.args[1:]) == (mask, 0.0) for one in zeros))
        bounds = _writes_to(picks, ("clamp_", "clamp_max_"))
        _require(all(_given(one, 2, "max") == groups - 1 for one in bounds))
        writes |= zeros | bounds
    return _Mixture.of(
        x, _flattened(ordered.args[0]), _flattened(gates.args[0]), up, down, absent=absent,
        writes=writes,
    )  # fmt: skip


def _of_all(graph: Canonical, node: Any) -> tuple[_Mixture, Any]:
    """Read a sum over experts of a product of all tokens with all of them; return the rows of its
    last product, too."""
    made: Any = _behind(node.args[0], RESHAPES)
    scores: Any = None
    if name_of(made) == "mul":
        made, scores = _times_scores(graph, made)
    down = _linear(graph, _behind(made, RESHAPES), "all")
    up = _linear(graph, _region(down.rows)[1], "all")
    rows, scaled = _behind(up.rows, RESHAPES), scores is None
    if scaled:
        rows, scores = _times_scores(graph, rows)
    shape, groups = graph.sizes(up.rows), (graph.shape(down.weight) or (0,))[0]
    repeated = _named(rows, ("repeat",))
    x, times = repeated.args[0], tuple(repeated.args[1:])
    size = graph.sizes(x)
    # else an expert that no token chose adds its bias
    _require(not scaled or (up.bias is None and down.bias is None))
    _require(len(shape) == 3 and shape[0] == groups and len(size) == 2)
    _require(times in ((groups, 1), ((groups, 1),)))
    index = _sparse(scores)
    _require(graph.sizes(scores) == (size[0], groups))
    _require(math.prod(graph.sizes(node)) == math.prod(size))
    return _Mixture.of(x, index, None, up, down, scores=scores, scaled=scaled), down.rows


def _times_scores(graph: Canonical, product: Any) -> tuple[Any, Any]:
    """Return rows and scores of rows * scores.T, each score for one row of features."""
    sides = [one for one in _named(product, ("mul",)).args if isinstance(one, fx.Node)]
    for rows, spread in (sides, sides[::-1]) if len(sides) == 2 else ():
        scores, dims = graph.base(spread)
        turned = tuple(itertools.chain(*reversed(graph.whole(scores))))
        fits = graph.sizes(rows)[:-1] == graph.sizes(spread)[:-1]
        if fits and dims[-1:] == ((),) and tuple(itertools.chain(*dims)) == turned:
            return rows, scores
    raise NotExpertsError


def _sparse(scores: Any) -> fx.Node:
    """Return the index of the experts whose scores are not 0; those are the largest of a row."""
    node, wanted = _behind(scores, _CASTS), 0.0
    if name_of(node) == "sigmoid":
        node, wanted = _behind(node.args[0], _CASTS), -math.inf
    given = _named(node, ("scatter", "scatter_"))
    into, index = given.args[0], _given(given, 2, "index")
    # else it sums where an expert is there twice
    _require(not set(given.kwargs) - {"dim", "index", "src"} and len(given.args) <= 4)
    fill = into.args[1] if name_of(into) in ("full_like", "full") else None
    fill = 0.0 if name_of(into) in ("zeros_like", "zeros") else fill
    _require(fill == wanted and _given(given, 1, "dim") in (1, -1))
    _require(_is_top_k(index) and index.args[1] == 1)  # no expert twice
    return index


def _counted(linear: _Linear, picks: Any, groups: Any) -> Any:
    """Return the offsets of a grouped product, which count the sorted picks."""
    offsets = _given(linear.product, 2, "offs")
    total = _named(offsets, ("cumsum",))
    counts = _named(total.args[0], ("histc",))
    bounds = tuple(_given(counts, i + 1, name) for i, name in enumerate(("bins", "min", "max")))
    _require(_behind(counts.args[0], {*_CASTS, "int"}) is picks)
    _require(bounds == (groups, 0, groups - 1) and _given(total, 1, "dim") == 0)
    return offsets


def _inverts(inverse: Any, perm: Any) -> frozenset[fx.Node]:
    """Return the write that fills `inverse` as inverse[perm] = arange."""
    _require(_named(inverse, ("empty_like", "new_empty")).args[0] is perm)
    writes = _writes_to(inverse, ("setitem_", "index_put_"))
    _require([len(one.args) >= 3 for one in writes] == [True])
    _, place, value = next(iter(writes)).args[:3]
    place = place[0] if isinstance(place, (list, tuple)) else place
    _require(place is perm and len(_named(value, ("arange",)).args) == 1)
    return writes


def _names_absent(mask: Any, picks: Any, groups: Any) -> bool:
    """Return whether a mask is of picks that are none of the experts here."""
    return name_of(mask) == "ge" and tuple(mask.args) == (picks, groups)


def _writes_to(value: Any, names: Any) -> frozenset[fx.Node]:
    """Return the users of a value that write to it by one of these operations."""
    return frozenset(one for one in value.users if name_of(one) in names)


def _flattened(picks: Any) -> fx.Node:
    """Return what one row of numbers was before it was flattened."""
    node: fx.Node = _named(picks, RESHAPES).args[0]
    return node


def _given(node: Any, place: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _require(condition: bool) -> None:
    """Raise NotExpertsError unless a condition of the pattern holds."""
    if not condition:
        raise NotExpertsError


def _named(node: Any, names: Any) -> Any:
    """Return a node that calls one of these operations; NotExpertsError for any other value."""
    _require(name_of(node) in names)
    return node


def _behind(node: Any, names: Any) -> Any:
    """Return the value behind calls of these operations."""
    while name_of(node) in names:
        node = node.args[0]
    return node


def _region(last: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """Return the nodes of the function that ends at `last`, and the one value that it reads."""
    found = [last]
    ends: set[fx.Node] = set()
    for current in found:
        for n in current.all_input_nodes:
            if _ends_product(n):
                ends.add(n)
            elif n not in found:
                found.append(n)
    _require(len(ends) == 1 and len(found) <= 40)
    return found, ends.pop()


def _ends_product(node: Any) -> bool:
    """Return whether a node is a product, with its bias and its mask where it has them."""
    name = name_of(node)
    if name in (*_PRODUCTS, "squeeze", "add_"):
        return True
    if name == "masked_fill":
        return _ends_product(node.args[0])
    pair = node.all_input_nodes if name == "add" else []
    return len(pair) == 2 and any(name_of(n) in (*_PRODUCTS, "squeeze") for n in pair)


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
    run = fx.Interpreter(graph.module, garbage_collect_values=False)
    run.env = {start: sample}
    try:
        for node in sorted(nodes, key=graph.effects.position.__getitem__):
            cast = name_of(node) in _CASTS
            run.env[node] = run.env[node.args[0]] if cast else run.run_node(node)
    except (TypeError, RuntimeError, KeyError, AttributeError):
        return None
    numbers = (
        {
            float(value)
            for node in nodes
            if name_of(node) in names
            for value in (*node.args, *node.kwargs.values())
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        }
        for names in (("clamp", "clamp_max", "clip"), ("mul",), ("add",))
    )
    said = said_of(sample, run.env[last], *numbers)
    return said and {name: value for name, value in said.items() if value != _PLAIN[name]}


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
