"""Rule `adapters`: branches of several adapters in one batch become one call with their base.

PEFT's mixed batches, `model(x, adapter_names=[...])`:

    y = linear(x, w, b)
    y[rows_i] += linear(linear(x[rows_i], a_i), b_i) * scale_i       for each adapter i of the batch
      ->   nmm.adapters_matmul(x, index, cat(a), cat(b), scales, bias, w)

and gathered weights, as servers of many adapters spell them, with bmm, matmul or einsum:

    linear(x, w, b) + bmm(b[index], bmm(a[index], x[.., None]))[.., 0] * scales[index][.., None]
      ->   nmm.adapters_matmul(x, index, a, b, scales, bias, w)

The branch may be added in place, and its first product may be written to a buffer, as vLLM does.
The index of a mixed batch is a constant of its graph. Ranks that differ are filled with zeros. A
negative index counts from the end, as it does in PyTorch. One call is taken unless base, shrink and
expand apart are predicted to be faster.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.ops.chosen import ADAPTERS
from nmm_compiler.passes.chains.chain import is_whole_feature, path_nodes, read_projection
from nmm_compiler.passes.chains.safety import DTYPES, Refusal, covered, tokens_to_judge, unsafe
from nmm_compiler.passes.emit.calls import Lowering, times
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Add,
    Canonical,
    Key,
    Opaque,
    Product,
    Scale,
    dtype_name,
    owner_of,
)
from nmm_compiler.passes.graph.views import Dim
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.experts import counted_from_end, name_of

aten = torch.ops.aten
_BUFFERS = ("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty")


@dataclass(frozen=True)
class _Branch:
    """One adapter of a batch: its rows of the batch, both factors [out, in], and what scales it."""

    rows: tuple[int, ...]
    a: Any
    b: Any
    scale: float
    nodes: set[fx.Node]


@dataclass
class _Gathered:
    """A branch of gathered factors, as far as it has been read from its end.

    factors: of the last product, then of the first, each with whether it lies [out, in]. gains:
    of each adapter; scale: of all of them.
    """

    nodes: set[fx.Node]
    factors: list[tuple[fx.Node, bool]]
    index: Any = None
    gains: fx.Node | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class _Call:
    """A linear and the branches that are added to it, all [out, in].

    factors: all of them. others: the index and the gains, where the graph has them. operands:
    emits index, u, v and gains for an x.
    """

    linear: Any
    factors: list[Any]
    others: list[Any]
    operands: Callable[[Editor, Any], dict[str, Any]]

    def plain(self) -> list[Any]:
        """Return x, the weight and the bias, None where there is none."""
        return [*self.linear.args, *self.linear.kwargs.values(), None][:3]

    def named(self, editor: Editor) -> dict[str, Any]:
        """Emit what the op reads; return its arguments by name."""
        x, w, bias = (None if one is None else editor.node(one) for one in self.plain())
        given = {"x": x, "w": w, "bias": bias, "u_layout": "col", "w_layout": "col"}
        return given | self.operands(editor, x)


class Adapters(KernelRule):
    """A linear layer of a batch, and branches of the adapters that rows of the batch name."""

    name = "adapters"
    ends_at = (Product, Add, Opaque)

    def pattern(self, graph: Canonical, node: Any) -> Iterator[Any]:
        """Propose linears whose rows are written, and sums of a linear and gathered branches."""
        name = name_of(node)
        writes_rows = name == "linear" and any(map(_writes_rows, node.users))
        adds = name in ("add", "add_") and len(node.all_input_nodes) == 2
        if writes_rows or adds or (name == "setitem_" and name_of(node.args[0]) == "linear"):
            yield node

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the branches, which together write each row once at most."""
        node = candidate
        if name_of(node) != "linear":
            return self._gathered(graph, node)
        x = node.args[0]
        found = [_branch(graph, node, x, user) for user in node.users if _writes_rows(user)]
        branches = [branch for branch in found if branch is not None]
        if len(branches) < len(found):
            return None
        rows = [row for branch in branches for row in branch.rows]
        shape = graph.sizes(x)
        size = shape[0] if shape and isinstance(shape[0], int) else 0
        if len(rows) != len(set(rows)) or not all(0 <= row < size for row in rows):
            text = f"rows {rows} of a batch of {size} are not written once each"
            return Refusal("shape", text, node)
        factors = [factor for one in branches for factor in (one.a, one.b)]
        call = _Call(node, factors, [], functools.partial(_stacked, branches))
        inner = {node, *(n for branch in branches for n in branch.nodes)}
        last = max(inner, key=graph.effects.position.__getitem__)
        why = _read_early(graph, node, inner, last, node, "all branches")
        return why or self._matched(graph, node, inner, last, call)

    def _gathered(self, graph: Canonical, node: Any) -> Match | Refusal | None:
        """Read linear(x, w, b) + branches of gathered factors, which may be added in place."""
        base, more, own = _base_and_branch(graph, node)
        branch = None if base is None else _gathered_branch(graph, more, base.args[0])
        if branch is None:
            return None
        inner = {base, *own, *branch.nodes}
        factors = [factor for factor, _ in branch.factors]
        others = [one for one in (branch.index, branch.gains) if one is not None]
        call = _Call(base, factors, others, functools.partial(_flat, branch))
        if name_of(node) != "setitem_" and inner.issuperset(base.users):
            return self._matched(graph, node, inner, node, call)
        if node.users:  # two names of one sum
            return Refusal("mutation", "the base is read under two names", node)
        position = graph.effects.position
        reads = [one for one in call.plain() if one is not None] + factors + others
        late = [one for one in reads if position[one] > position[base]]
        why = _read_early(graph, base, inner, node, node, "its branch")
        if why is None and late:
            text = f"{late[0].name} is made behind the linear to which its branch is added in place"
            return Refusal("mutation", text, node, remedy="add the branch out of place")
        return why or self._matched(graph, base, inner, node, call)

    def _matched(
        self, graph: Canonical, node: Any, inner: set[fx.Node], last: fx.Node, call: _Call
    ) -> Match | Refusal:
        """Return the match of one call, or why there is none."""
        reads = [one for one in call.plain() if one is not None] + call.factors
        floats = {graph.dtype(one) for one in reads}
        if len(floats) != 1 or not floats <= {*DTYPES} or graph.dtype(node) not in floats:
            names = ", ".join(sorted(dtype_name(one) for one in floats))
            return Refusal("dtype", f"x, weights and factors are {names}", node)
        writes = [one for one in inner if one in graph.effects.writers]
        also = () if last is node else (node,)
        why = unsafe(graph, inner, last, reads + call.others, allowed=writes, also_final=also)
        if why is not None:
            return why
        tokens = tokens_to_judge(views.product(graph.sizes(call.linear.args[0])[:-1]))
        lowering = Lowering(graph, node, tokens)
        try:
            spec = lowering.kernel(ADAPTERS.name, call.named(lowering))
            spec.check(graph.chip)
        except (NmmError, TypeError) as error:
            return Refusal("no_kernel", str(error), node)
        sizes = {name: getattr(spec, name) for name in ("m", "k", "r", "n", "groups")}
        match = Match(self.name, node, frozenset(inner), data=call, info=sizes)
        return self.priced(graph, match, spec)

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the stacked factors, the index and the call."""
        given = match.data.named(editor)
        x, w = (editor.value(given[name]) for name in "xw")
        return editor.kernel(ADAPTERS.name, given, x.new_empty((*x.shape[:-1], w.shape[0])))


def _read_early(
    graph: Canonical, base: Any, inner: set[fx.Node], last: fx.Node, at: fx.Node, what: str
) -> Refusal | None:
    """Refuse a linear that is read by another node before the last one that adds to it."""
    position = graph.effects.position
    early = [u for u in base.users if u not in inner and position[u] < position[last]]
    return Refusal("other_user", f"{early[0].name} reads it before {what}", at) if early else None


def _constant(editor: Editor, numbers: list[Any], dtype: torch.dtype, x: torch.Tensor) -> fx.Node:
    """Return numbers as a tensor."""
    made = x.new_empty(len(numbers), dtype=dtype)
    return editor.call(torch.tensor, numbers, meta_value=made, dtype=dtype, device=x.device)


def _of_tokens(editor: Editor, rows: Any, x: Any) -> fx.Node:
    """Return a number of each row of a batch for each of its tokens."""
    sizes = editor.shape(x)[:-1]
    if len(sizes) == 1:
        return rows
    node = editor.reshape(rows, (sizes[0], *[1] * (len(sizes) - 1)))
    value = editor.value(node).expand(editor.value(x).shape[:-1])
    zeros = editor.call(aten.select.int, x, -1, 0)
    return editor.call(aten.expand_as.default, node, zeros, meta_value=value)


def _stacked(branches: Sequence[_Branch], editor: Editor, x: Any) -> dict[str, Any]:
    """Emit the adapter of each token, the gains, and the factors one after the other, of equal
    ranks."""
    value = editor.value(x)
    numbers = {row: i for i, branch in enumerate(branches) for row in branch.rows}
    rows = [numbers.get(row, -1) for row in range(int(value.shape[0]))]
    index = _of_tokens(editor, _constant(editor, rows, torch.int32, value), x)
    gains = _constant(editor, [one.scale for one in branches], torch.float32, value)
    pairs = [(editor.node(one.a), editor.node(one.b)) for one in branches]
    ranks = [editor.shape(first)[0] for first, _ in pairs]
    firsts, seconds = [], []
    for rank, (first, second) in zip(ranks, pairs, strict=True):
        more = max(ranks) - rank
        if more:
            first = editor.call(aten.constant_pad_nd.default, first, [0, 0, 0, more])
            second = editor.call(aten.constant_pad_nd.default, second, [0, more])
        firsts.append(first)
        seconds.append(second)
    u, v = editor.call(aten.cat.default, firsts, 0), editor.call(aten.cat.default, seconds, 1)
    return {"index": index, "u": u, "v": v, "gains": gains, "v_layout": "col"}


def _flat(branch: _Gathered, editor: Editor, x: Any) -> dict[str, Any]:
    """Emit the adapter of each token, the factors of all adapters, u [out, in], and their gains."""
    flat: list[Any] = []
    for factor, turned in reversed(branch.factors):
        stack = editor.node(factor)
        sizes = editor.shape(stack)
        groups = sizes[0]
        one = editor.reshape(stack, (groups, *sizes[-2:]))
        wants = not flat  # u as [r, k] and v as [r, n]
        if turned != wants:
            one = editor.permute(one, (0, 2, 1))
        sizes = editor.shape(one)
        flat.append(editor.reshape(one, (groups * sizes[1], sizes[2])))
    index = counted_from_end(editor, editor.node(branch.index), groups)
    if branch.gains is not None:
        gains = times(editor, editor.node(branch.gains), branch.scale)
    else:
        gains = editor.call(
            aten.full.default, [groups], branch.scale, dtype=torch.float32,
            device=editor.value(x).device,
        )  # fmt: skip
    u, v = flat
    return {"index": _of_tokens(editor, index, x), "u": u, "v": v, "gains": gains}


def _writes_rows(user: Any) -> bool:
    """Return whether a user writes chosen rows of what it uses."""
    return name_of(user) == "setitem_" and isinstance(user.args[1], (list, tuple))


def _branch(graph: Canonical, base: Any, x: Any, write: Any) -> _Branch | None:
    """Return base[rows] += linear(linear(x[rows], a), b) * scale, as one write ends it."""
    target, rows, added, own = _added_in_place(write)
    if target is not base or not all(isinstance(row, int) for row in rows):
        return None
    chain = read_projection(graph, graph.uncast(added)) if isinstance(added, fx.Node) else None
    if chain is None or chain.second is None or chain.u.layout != "col" or chain.v.layout != "col":
        return None
    part: Any = graph.uncast(chain.first.x)
    of_x, of_y = chain.first.x_dims, chain.out_dims
    straight = of_x[:-1] == of_y[:-1] and is_whole_feature(of_x[-1], chain.u.k)
    straight = straight and is_whole_feature(of_y[-1], chain.n) and not chain.middle
    scaled = all(step.kind == "scale" and step.key is None for step in chain.after)
    if not (straight and scaled and name_of(part) == "getitem") or tuple(part.args) != (x, rows):
        return None
    nodes = {*own, part, *covered(graph, added, [part, *chain.weights])}
    scale = math.prod(step.number for step in chain.after)
    return _Branch(tuple(rows), chain.u.key, chain.v.key, scale, nodes)


def _added_in_place(write: Any) -> tuple[Any, Any, Any, list[fx.Node]]:
    """Return base, place, branch and the nodes of base[place] += branch, as one write ends it;
    None for the base of another write."""
    base, place, total = write.args[:3]
    if name_of(total) in ("add", "add_") and not total.kwargs:
        before, more = total.args[:2]
        if name_of(before) == "getitem" and tuple(before.args) == (base, place):
            return base, place, more, [write, total, before]
    return None, (), None, []


def _base_and_branch(graph: Canonical, node: Any) -> tuple[Any, Any, list[fx.Node]]:
    """Return the linear, the branch and the nodes of a sum of both; None for the linear if none.

    The sum may be in place: base += branch, or base[:, :n] += branch, of all of its columns.
    """
    if name_of(node) == "setitem_":
        base, place, more, own = _added_in_place(node)
        return base if base is not None and _whole(graph, base, place) else None, more, own
    pairs = [node.args[:2]] if name_of(node) == "add_" else [node.args[:2], node.args[1::-1]]
    found = [(base, more) for base, more in pairs if name_of(base) == "linear"]
    return (*found[0], [node]) if len(found) == 1 and not node.kwargs else (None, None, [])


def _whole(graph: Canonical, value: Any, place: Any) -> bool:
    """Return whether a place is all of a value: slices from the start to the end."""
    sizes = graph.sizes(value)
    slices = place if isinstance(place, tuple) else (place,)
    if len(slices) > len(sizes) or not all(isinstance(one, slice) for one in slices):
        return False
    return all(
        one.start in (None, 0) and one.step in (None, 1) and (one.stop is None or one.stop == size)
        for one, size in zip(slices, sizes, strict=False)
    )


def _gathered_branch(graph: Canonical, node: Any, x: Any) -> _Gathered | None:
    """Return a branch of gathered factors of x that ends at a node, or None."""
    branch, key = _Gathered(set(), []), node
    while len(branch.factors) < 2:
        if not isinstance(key, Key):
            return None
        key = _gathered_product(graph, key, branch)
    key = _filled(graph, key, branch)
    sizes = [graph.sizes(one) for one in (x, branch.index)]
    if len(sizes[0]) not in (2, 3) or len(sizes[1]) != 1 or sizes[0][0] != sizes[1][0]:
        return None
    taken = itertools.takewhile(lambda one: one is not x, graph.through(key))
    branch.nodes.update(map(owner_of, taken))
    return branch if _elements(graph, key) == _elements(graph, x) else None


def _elements(graph: Canonical, key: Key) -> tuple[Key, list[Dim]]:
    """Return the base of a value and its dims over it, but for dimensions of one element."""
    base, dims = graph.base(key)
    return base, [dim for dim in dims if dim]


def _read(graph: Canonical, key: Key, branch: _Gathered) -> Any:
    """Return the base that a value is, with more or fewer dimensions of one element, or None."""
    key = _filled(graph, key, branch)
    base = graph.base(key)[0]
    branch.nodes |= path_nodes(graph, key) | {owner_of(base)}
    return base if _elements(graph, key) == _elements(graph, base) else None


def _filled(graph: Canonical, key: Key, branch: _Gathered) -> Key:
    """Return what is written to a buffer, all of it, that a value is; else the value."""
    node: Any = graph.base(key)[0]
    if name_of(node) not in _BUFFERS or not graph.is_whole(key):
        return key
    writes = [one for one in node.users if (name_of(one) or "").endswith("_")]
    if len(writes) != 1 or name_of(writes[0]) != "setitem_":
        return key
    into, place, value = writes[0].args[:3]
    kinds = [(graph.shape(one), graph.dtype(one)) for one in (node, value)]
    first = min(node.users, key=graph.effects.position.__getitem__)  # else it is read before
    if into is not node or not _whole(graph, node, place) or first is not writes[0]:
        return key
    if kinds[0] != kinds[1]:
        return key
    branch.nodes |= {node, *path_nodes(graph, key), writes[0]}
    return _filled(graph, value, branch)


def _gathered_product(graph: Canonical, key: Key, branch: _Gathered) -> Key | None:
    """Return what a product with gathered weights multiplies, None if a value is no such product.

    Numbers and gains that multiply the product are noted.
    """
    base = _read(graph, key, branch)
    form = graph.forms.get(base)
    while isinstance(form, Scale):
        base = _scaled(graph, base, form, branch)
        form = graph.forms.get(base)
    if not isinstance(form, Product):
        return None
    for (token, labels), (held, held_labels) in form.orders:
        made, dims = graph.base(held)
        sizes, index = graph.sizes(made), _gather(made)
        if index is None or not _same_index(graph, index[1], branch):
            continue
        pairs = [(labels, graph.shape(token)), (form.out_labels, graph.shape(base))]
        own, out = ([x for x, s in zip(*one, strict=True) if s != 1] for one in pairs)  # type: ignore[arg-type]
        axes = {x: views.whole_axis(d, sizes) for x, d in zip(held_labels, dims, strict=True) if d}
        head, k = ([x for x in own if (x in out) == kept] for kept in (True, False))
        n = [x for x in out if x not in own]
        which = [x for x in head if x in axes]
        orders = own == head + k and out == head + n and which in ([], head[:1])
        if not orders or set(axes) != {*which, *k, *n} or len(k) > 1 or len(n) > 1:
            continue
        last, inner = len(sizes) - 1, [axes[x] for x in k] + [axes[x] for x in n]
        whole = [axes[x] for x in which] in ([], [0]) and {*inner} <= {last - 1, last}
        if whole and (last == 2 or (last == 3 and sizes[1] == 1)):
            turned = [axes[x] for x in k] == [last] or [axes[x] for x in n] == [last - 1]
            branch.factors.append((index[0], turned))
            branch.nodes |= {owner_of(made), *path_nodes(graph, held)}
            return token
    return None


def _scaled(graph: Canonical, key: Key, form: Scale, branch: _Gathered) -> Any:
    """Return what is multiplied by a number, or by the gain of each token's adapter, or None."""
    if isinstance(form.factor, float):
        branch.scale *= form.factor
        return _read(graph, form.value, branch)
    for value, factor in form.orders if len(graph.sizes(key)) == 2 else ():
        made, dims = graph.base(factor)
        held = _gather(made)
        spread = (*graph.whole(made), ())
        if held is None or branch.gains is not None or dims != spread:
            continue
        if graph.shape(value) == graph.shape(key) and _same_index(graph, held[1], branch):
            branch.nodes |= {owner_of(made), *path_nodes(graph, factor)}
            branch.gains = held[0]
            return _read(graph, value, branch)
    return None


def _gather(node: Any) -> tuple[Any, ...] | None:
    """Return (weights, index) of a node that gathers weights along their first axis."""
    if name_of(node) == "getitem" and isinstance(node.args[1], fx.Node):
        return tuple(node.args)
    chosen = name_of(node) == "index_select" and len(node.args) == 3 and node.args[1] == 0
    return tuple(node.args[::2]) if chosen else None


def _same_index(graph: Canonical, index: Any, branch: _Gathered) -> bool:
    """Return whether an index is a tensor, and that of the branch if it has one."""
    dtype = graph.dtype(index)
    if dtype is None or dtype.is_floating_point or dtype == torch.bool:
        return False
    branch.index = branch.index or index
    return branch.index is index
