"""Rule `adapters`: branches of several adapters in one batch become one call with their base.

PEFT's mixed batches, `model(x, adapter_names=[...])`:

    y = linear(x, w, b)
    y[rows_i] += linear(linear(x[rows_i], a_i), b_i) * scale_i       for each adapter i of the batch
      ->   nmm.adapters_matmul(x, index, cat(a), cat(b), scales, bias, w)

and gathered weights, as servers of many adapters spell them:

    linear(x, w, b) + bmm(b[index], bmm(a[index], x[.., None]))[.., 0] * scales[index][.., None]
      ->   nmm.adapters_matmul(x, index, a, b, scales, bias, w)

The index of a mixed batch is a constant of its graph. Ranks that differ are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.chains.safety import DTYPES, Refusal, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.rules.base import Match, Rule
from nmm_compiler.passes.rules.experts import counted_from_end, name_of

aten = torch.ops.aten
_CASTS = ("to", "_to_copy", "contiguous")


@dataclass(frozen=True)
class _Branch:
    """One adapter of a batch: its rows of the batch, both factors [out, in], and what scales it."""

    rows: tuple[int, ...]
    a: fx.Node
    b: fx.Node
    scale: float
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Call:
    x: Any
    w: fx.Node
    bias: fx.Node | None
    branches: tuple[_Branch, ...] = ()
    gathered: tuple[fx.Node, fx.Node, fx.Node, fx.Node | None] | None = None


class Adapters(Rule):
    """A linear layer of a batch, and branches of the adapters that rows of the batch name."""

    name = "adapters"
    ends_at = None

    def pattern(self, graph: Canonical, node: Any) -> Iterator[Any]:
        """Propose linears whose rows are written, and sums of a linear and gathered branches."""
        if (name_of(node) == "linear" and any(map(_writes_rows, node.users))) or (
            name_of(node) == "add" and len(node.all_input_nodes) == 2 and not node.kwargs
        ):
            yield node

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the branches, which together write each row once at most."""
        node = candidate
        if name_of(node) == "add":
            return self._gathered(graph, node)
        x, w, bias = (*node.args, *node.kwargs.values(), None)[:3]
        branches: list[_Branch] = []
        for write in (user for user in node.users if _writes_rows(user)):
            branch = _branch(graph, node, x, write)
            if branch is None:
                return None
            branches.append(branch)
        rows = [row for branch in branches for row in branch.rows]
        shape = graph.shape(x) or ()
        size = shape[0] if shape and isinstance(shape[0], int) else 0
        if len(rows) != len(set(rows)) or not all(0 <= row < size for row in rows):
            why = f"rows {rows} of a batch of {size} are not written once each"
            return Refusal("shape", why, node)
        inner = {node, *(n for branch in branches for n in branch.nodes)}
        last = max(inner, key=graph.effects.position.__getitem__)
        early = [user for user in node.users if user not in inner
                 and graph.effects.position[user] < graph.effects.position[last]]  # fmt: skip
        if early:
            return Refusal("other_user", f"{early[0].name} reads it before all branches", node)
        factors = [one for branch in branches for one in (branch.a, branch.b)]
        call = _Call(x, w, bias, tuple(branches))
        return self._made(graph, node, inner, last, (x, w, bias, *factors), call, len(branches))

    def _gathered(self, graph: Canonical, node: Any) -> Match | Refusal | None:
        """Read linear(x, w, b) + branches of gathered factors."""
        for base, other in (node.args, node.args[::-1]):
            if name_of(base) != "linear":
                continue
            found = _gathered_branch(other)
            if found is None or found[0] is not base.args[0]:
                return None
            x, w, bias = (*base.args, *base.kwargs.values(), None)[:3]
            _, index, a, b, gains, nodes = found
            shapes = [graph.shape(one) or () for one in (x, index, a, b)]
            if [len(shape) for shape in shapes] != [2, 1, 3, 3]:
                return Refusal("shape", f"operands of shapes {shapes}", node)
            inner = {node, base, *nodes}
            reads = (x, w, bias, index, a, b, gains)
            call = _Call(x, w, bias, gathered=(index, a, b, gains))
            return self._made(graph, node, inner, node, reads, call, int(shapes[2][0]))
        return None

    def _made(
        self, graph: Canonical, node: Any, inner: set[fx.Node], last: fx.Node, reads: Any,
        call: _Call, groups: int,
    ) -> Match | Refusal:  # fmt: skip
        held = [one for one in reads if one is not None]
        apart = (None, None) if call.gathered is None else (call.gathered[0], call.gathered[3])
        floats = {graph.dtype(one) for one in held if one not in apart}
        if len(floats) != 1 or not floats <= {*DTYPES} or graph.dtype(node) not in floats:
            names = ", ".join(sorted(str(one).removeprefix("torch.") for one in floats))
            return Refusal("dtype", f"x, weights and factors are {names}", node)
        writes = [one for one in inner if one in graph.effects.writers]
        also = () if last is node else (node,)
        why = unsafe(graph, inner, last, held, allowed=writes, also_final=also)
        shape = graph.shape(call.w) or (0, 0)
        return why or Match(
            rule=self.name,
            node=node,
            nodes=frozenset(inner),
            data=call,
            info={"k": shape[1], "n": shape[0], "groups": groups},
            length=int(shape[1]) if isinstance(shape[1], int) else 0,
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the stacked factors, the index and the call."""
        call: _Call = match.data
        x, w = editor.c.values[call.x], editor.c.values[call.w]
        result = x.new_empty((*x.shape[:-1], w.shape[0]))
        if call.gathered is not None:
            index, a, b, gains = call.gathered
            groups, r, k = editor.c.values[a].shape
            index = counted_from_end(editor, index, groups)
            u = editor.reshape(a, (groups * r, k))
            v = editor.reshape(editor.permute(b, (0, 2, 1)), (groups * r, w.shape[0]))
            gains = gains or editor.call(
                aten.full.default, [groups], 1.0, dtype=torch.float32, device=x.device
            )
            layout = "row"
        else:
            rows = _constant(editor, _rows_index(call, x), torch.int32, x)
            index = _of_tokens(editor, rows, call.x)
            gains = _constant(editor, [one.scale for one in call.branches], torch.float32, x)
            u, v = _stacked(editor, call.branches)
            layout = "col"
        return editor.call(
            torch.ops.nmm.adapters_matmul.default,
            call.x, index, u, v, gains, call.bias, call.w,
            meta_value=result, u_layout="col", v_layout=layout, w_layout="col",
            target=editor.options.target, executor=editor.options.executor,
        )  # fmt: skip


def _rows_index(call: _Call, x: torch.Tensor) -> list[Any]:
    """Return the adapter of each token: of each row of the batch, for all tokens of it."""
    rows = [-1] * int(x.shape[0])
    for number, branch in enumerate(call.branches):
        for row in branch.rows:
            rows[row] = number
    return rows


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
    value = editor.c.values[node].expand(editor.c.values[x].shape[:-1])
    zeros = editor.call(aten.select.int, x, -1, 0)
    return editor.call(aten.expand_as.default, node, zeros, meta_value=value)


def _stacked(editor: Editor, branches: tuple[_Branch, ...]) -> tuple[fx.Node, fx.Node]:
    """Return the factors of all adapters one after the other, of equal ranks."""
    rank = max(int(editor.c.values[one.a].shape[0]) for one in branches)
    firsts, seconds = [], []
    for one in branches:
        more = rank - int(editor.c.values[one.a].shape[0])
        first, second = one.a, one.b
        if more:
            first = editor.call(aten.constant_pad_nd.default, first, [0, 0, 0, more])
            second = editor.call(aten.constant_pad_nd.default, second, [0, more])
        firsts.append(first)
        seconds.append(second)
    return editor.call(aten.cat.default, firsts, 0), editor.call(aten.cat.default, seconds, 1)


def _writes_rows(user: Any) -> bool:
    """Return whether a user writes chosen rows of what it uses."""
    return name_of(user) == "setitem_" and isinstance(user.args[1], (list, tuple))


def _branch(graph: Canonical, base: Any, x: Any, write: Any) -> _Branch | None:
    """Return base[rows] += linear(linear(x[rows], a), b) * scale, as one write ends it."""
    target, rows, total = write.args[:3]
    if target is not base or not all(isinstance(row, int) for row in rows):
        return None
    if name_of(total) not in ("add", "add_") or total.kwargs:
        return None
    before, more = total.args[:2]
    if name_of(before) != "getitem" or tuple(before.args) != (base, rows):
        return None
    nodes, scale = [write, total, before], 1.0
    node = more
    while isinstance(node, fx.Node) and name_of(node) in (*_CASTS, "mul"):
        nodes.append(node)
        if name_of(node) == "mul":
            numbers = [one for one in node.args if isinstance(one, (int, float))]
            if len(numbers) != 1:
                return None
            scale *= float(numbers[0])
        node = node.all_input_nodes[0]
    second = _plain_linear(node)
    first = _plain_linear(second.args[0]) if second is not None else None
    if first is None or second is None:
        return None
    nodes += [second, first]
    node = first.args[0]
    while isinstance(node, fx.Node) and (name_of(node) in _CASTS or _off(node)):
        nodes.append(node)
        node = node.args[0]
    if name_of(node) != "getitem" or tuple(node.args) != (x, rows):
        return None
    nodes.append(node)
    return _Branch(tuple(rows), first.args[1], second.args[1], scale, tuple(nodes))


def _off(node: Any) -> bool:
    """Return whether a node is dropout that does nothing."""
    if name_of(node) != "dropout":
        return False
    p, training = (*node.args[1:], node.kwargs.get("p"), node.kwargs.get("training"))[:2]
    return training is False or node.kwargs.get("training") is False or p == 0.0


def _plain_linear(node: Any) -> Any:
    """Return a linear without bias."""
    if not isinstance(node, fx.Node) or name_of(node) != "linear":
        return None
    bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
    return node if bias is None else None


def _gathered_branch(node: Any) -> tuple[Any, ...] | None:
    """Return (x, index, a, b, gains, nodes) of a branch of gathered factors, or None."""
    nodes, gains, index = [], None, None
    if name_of(node) == "mul":
        spread = [one for one in node.args if name_of(one) == "unsqueeze"]
        if len(spread) != 1 or len(node.all_input_nodes) != 2:
            return None
        held = spread[0].args[0]
        if name_of(held) != "getitem":
            return None
        nodes += [node, spread[0], held]
        gains, index = held.args
        node = next(one for one in node.args if one is not spread[0])
    if not isinstance(node, fx.Node) or name_of(node) != "squeeze":
        return None
    outer: Any = node.args[0]
    nodes += [node, outer]
    factors = []
    for _ in range(2):
        if name_of(outer) not in ("bmm", "matmul"):
            return None
        held, outer = outer.args[:2]
        if name_of(held) != "getitem" or (index is not None and held.args[1] is not index):
            return None
        index = held.args[1]
        factors.append(held.args[0])
        nodes += [held, outer]
    if name_of(outer) != "unsqueeze" or outer.args[1] not in (-1, 2):
        return None
    if not isinstance(index, fx.Node):
        return None
    b, a = factors
    return outer.args[0], index, a, b, gains, nodes
