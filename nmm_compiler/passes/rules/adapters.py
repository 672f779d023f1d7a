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
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.ops.chosen import ADAPTERS
from nmm_compiler.passes.chains.chain import (
    Chain,
    axes_over,
    gathered,
    is_whole_feature,
    read_projection,
    read_stage,
    same_tokens,
)
from nmm_compiler.passes.chains.safety import Refusal, covered, tokens_to_judge, unsafe
from nmm_compiler.passes.emit.calls import Lowering, times
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Add,
    Canonical,
    Key,
    Opaque,
    Product,
    Scale,
    dtype_name,
)
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.experts import counted_from_end
from nmm_compiler.passes.rules.lowrank import products_at


@dataclass(frozen=True)
class _Call:
    """A linear and the branches that are added to it, all [out, in].

    linear: x, the weight and the bias, None where there is none. factors: all of them. others: the
    index and the gains, where the graph has them. nodes: those that write rows, and what they
    write; none of gathered factors. operands: emits index, u, v and gains for an x.
    """

    linear: list[Any]
    factors: list[Any]
    others: list[Any]
    nodes: set[fx.Node]
    operands: Callable[[Editor, Any], dict[str, Any]]

    def named(self, editor: Editor) -> dict[str, Any]:
        """Emit what the op reads; return its arguments by name."""
        x, w, bias = (None if one is None else editor.node(one) for one in self.linear)
        given = {"x": x, "w": w, "bias": bias, "u_layout": "col", "w_layout": "col"}
        return given | self.operands(editor, x)


class Adapters(KernelRule):
    """A linear layer of a batch, and branches of the adapters that rows of the batch name."""

    name = "adapters"
    ends_at = (Product, Add, Opaque)

    def pattern(self, graph: Canonical, node: Any) -> Iterator[Any]:
        """Propose linears whose rows are written, and sums of a linear and another value."""
        if target_name(node) == "linear" and any(map(_writes_rows, node.users)):
            yield node, node, None
        form = graph.forms.get(node)
        for base, more in form.orders if isinstance(form, Add) else ():
            if target_name(graph.base(base)[0]) == "linear" and graph.is_whole(base):
                yield node, graph.base(base)[0], more

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the branches and check that one call may take the place of the linear."""
        node, linear, more = candidate
        plain = [*linear.args, *linear.kwargs.values(), None][:3]
        call = (
            _by_rows(graph, node, plain) if more is None else _gathered(graph, linear, more, plain)
        )
        if not isinstance(call, _Call):
            return call
        read = [one for one in plain if one is not None]
        dtypes = {dtype_name(graph.dtype(one)) for one in (node, *read, *call.factors)}
        if len(dtypes) > 1:
            text = f"x, weights, factors and the result are {', '.join(sorted(dtypes))}"
            return Refusal("dtype", text, node)
        reads = [*read, graph.base(plain[0])[0], *call.factors, *call.others]
        nodes = call.nodes or covered(graph, node, reads)
        last = max(nodes, key=graph.effects.position.__getitem__)
        writes = nodes & graph.effects.writers.keys() if call.nodes else ()
        why = unsafe(graph, nodes, last, reads, allowed=writes, also_final=(node,))
        if why is not None:
            return why
        tokens = tokens_to_judge(views.product(graph.sizes(plain[0])[:-1]))
        lowering = Lowering(graph, node, tokens)
        match = Match(self.name, node, frozenset(nodes), data=call)
        return self.priced(
            graph, match, lambda: lowering.kernel(ADAPTERS.name, call.named(lowering))
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the stacked factors, the index and the call."""
        return editor.kernel(ADAPTERS.name, match.data.named(editor))


def _constant(editor: Editor, numbers: list[Any], dtype: torch.dtype, x: torch.Tensor) -> fx.Node:
    """Return numbers as a tensor."""
    value = x.new_empty(len(numbers), dtype=dtype)
    return editor.call(torch.tensor, numbers, meta_value=value, dtype=dtype, device=x.device)


def _of_tokens(editor: Editor, rows: Any, x: Any) -> fx.Node:
    """Return a number of each row of a batch for each of its tokens."""
    sizes = editor.shape(x)[:-1]
    if len(sizes) == 1:
        return rows
    node = editor.reshape(rows, (sizes[0], *[1] * (len(sizes) - 1)))
    zeros = editor.call(aten.select.int, x, -1, 0)
    return editor.call(aten.expand_as.default, node, zeros)


def _stacked(branches: dict[tuple[int, ...], Chain], editor: Editor, x: Any) -> dict[str, Any]:
    """Emit the adapter of each token, the gains, and the factors one after the other, of equal
    ranks."""
    value, chains = editor.value(x), branches.values()
    numbers = {row: i for i, rows in enumerate(branches) for row in rows}
    rows = [numbers.get(row, -1) for row in range(int(value.shape[0]))]
    index = _of_tokens(editor, _constant(editor, rows, torch.int32, value), x)
    gains = _constant(editor, [*map(_number, chains)], torch.float32, value)
    firsts, seconds, rank = [], [], max(chain.r for chain in chains)
    for chain in chains:
        first, second = (editor.node(factor.key) for factor in chain.factors)
        if chain.r < rank:
            more = rank - chain.r
            first = editor.call(aten.constant_pad_nd.default, first, [0, 0, 0, more])
            second = editor.call(aten.constant_pad_nd.default, second, [0, more])
        firsts.append(first)
        seconds.append(second)
    u, v = editor.call(aten.cat.default, firsts, 0), editor.call(aten.cat.default, seconds, 1)
    return {"index": index, "u": u, "v": v, "gains": gains, "v_layout": "col"}


def _flat(
    chain: Chain, stacks: Sequence[Any], index: Any, editor: Editor, x: Any
) -> dict[str, Any]:
    """Emit the adapter of each token, the factors of all adapters, [r, k] and [r, n] of each, and
    their gains."""
    flat = []
    groups = editor.shape(editor.node(stacks[0]))[0]
    for weight, stack, layout in zip((chain.u, chain.v), stacks, ("col", "row"), strict=False):
        one = editor.reshape(editor.node(stack), (groups, *weight.stored))
        if weight.layout != layout:
            one = editor.permute(one, (0, 2, 1))
        flat.append(editor.reshape(one, (groups * chain.u.n, editor.shape(one)[2])))
    index = counted_from_end(editor, editor.node(index), groups)
    if len(stacks) > 2:
        gains = times(editor, editor.node(stacks[2]), _number(chain))
    else:
        gains = _constant(editor, [_number(chain)] * groups, torch.float32, editor.value(x))
    return {"index": _of_tokens(editor, index, x), "u": flat[0], "v": flat[1], "gains": gains}


def _writes_rows(user: Any) -> bool:
    """Return whether a user writes chosen rows of what it uses."""
    return target_name(user) == "setitem_" and isinstance(user.args[1], (list, tuple))


def _by_rows(graph: Canonical, linear: Any, plain: list[Any]) -> _Call | Refusal | None:
    """Read base[rows] += linear(linear(x[rows], a), b) * scale for the rows of each adapter, which
    together are each row once at most."""
    nodes, branches = {linear}, dict[tuple[int, ...], Chain]()
    writes, x = [user for user in linear.users if _writes_rows(user)], plain[0]
    for write in writes:
        chain = _branch(graph, linear, x, write, nodes)
        if chain is None:
            return None
        branches[tuple(write.args[1])] = chain
    rows = [row for write in writes for row in write.args[1]]
    size = graph.sizes(x)[0]
    whole = isinstance(size, int) and all(0 <= row < size for row in rows)
    if len(rows) != len(set(rows)) or not whole:
        return Refusal(
            "shape", f"rows {rows} of a batch of {size} are not written once each", linear
        )
    position = graph.effects.position
    end = max(map(position.__getitem__, nodes))
    for user in linear.users:
        if user not in nodes and position[user] < end:
            return Refusal("other_user", f"{user.name} reads it before all branches", linear)
    factors = [factor.key for chain in branches.values() for factor in chain.factors]
    return _Call(plain, factors, [], nodes, functools.partial(_stacked, branches))


def _branch(graph: Canonical, base: Any, x: Any, write: Any, nodes: set[fx.Node]) -> Chain | None:
    """Return the chain of one adapter, as one write ends it; add the nodes that compute it."""
    target, rows, total = write.args[:3]
    if target_name(total) not in ("add", "add_") or total.kwargs or target is not base:
        return None
    before, added = total.args
    read = target_name(before) == "getitem" and tuple(before.args) == (base, rows)
    if not read or not all(isinstance(row, int) for row in rows):
        return None
    chain = read_projection(graph, graph.uncast(added)) if isinstance(added, fx.Node) else None
    if chain is None or chain.second is None or chain.u.layout != "col" or chain.v.layout != "col":
        return None
    part: Any = graph.uncast(chain.first.x)
    of_x, of_y = chain.first.x_dims, chain.out_dims
    straight = of_x[:-1] == of_y[:-1] and is_whole_feature(of_x[-1], chain.u.k)
    straight = straight and is_whole_feature(of_y[-1], chain.n) and target_name(part) == "getitem"
    if not straight or not _number(chain) or tuple(part.args) != (x, rows):
        return None
    nodes |= {write, total, before, part, *covered(graph, added, [part, *chain.weights])}
    return chain


def _number(chain: Chain) -> float:
    """Return the number that multiplies a chain, 0 where something else stands around it."""
    plain = all(s.kind == "gain" or (s.kind == "scale" and s.key is None) for s in chain.steps)
    return math.prod(step.number for step in chain.steps) if plain else 0.0


def _gathered(graph: Canonical, base: Any, more: Key, plain: list[Any]) -> _Call | None:
    """Read a value as a branch of gathered factors of what a linear reads, beside that linear."""
    x, (product, form) = plain[0], next(products_at(graph, base))
    key, gains = _without_gains(graph, more)
    chain = read_projection(graph, key, "gathered")
    own = read_stage(graph, product, form, True, True)
    if chain is None or chain.second is None or isinstance(own, Refusal):
        return None
    between = [graph.base(s.key)[0] for s in chain.middle if s.kind == "gain" and s.key]
    picked: list[Any] = [chain.u.key, chain.v.key, *([] if gains is None else [gains]), *between]
    if len(picked) > 3:
        return None
    stacks, (index, *others) = zip(*map(gathered, picked), strict=True)
    whole = graph.sizes(index) == graph.sizes(x)[:1] and len(graph.sizes(x)) in (2, 3)
    of_tokens = axes_over(chain.first, graph.base(chain.first.x)[1])[1]
    if not whole or of_tokens.get(chain.first.chosen, ()) != graph.base(x)[1][0]:  # type: ignore[arg-type]
        return None
    counts = graph.dtype(index) in (torch.int32, torch.int64)
    one_index = counts and all(other is index for other in others)
    alike = same_tokens(graph, own, own.out_dims, chain.first, chain.out_dims)
    if not one_index or not alike or not _number(chain):
        return None
    given, factors = [index, *stacks[2:]], [*stacks[:2]]
    return _Call(plain, factors, given, set(), functools.partial(_flat, chain, stacks, index))


def _without_gains(graph: Canonical, key: Key) -> tuple[Key, Key | None]:
    """Return what is multiplied by the gain of each token's adapter, and what gathers the gains."""
    form = graph.forms.get(key)
    for value, factor in form.orders if isinstance(form, Scale) else ():
        base, dims = graph.base(factor)
        spread = (*graph.whole(base), ())
        if gathered(base) and dims == spread and len(graph.sizes(value)) == 2:
            return value, base
    return key, None
