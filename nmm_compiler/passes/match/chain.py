"""Rule `chain`: products of constants that a graph computes, taken as chains (by permission).

    x @ (u @ v)   ->   nmm.lowrank_matmul(x, u, v)

Runs only under Options(reassociate=True): the product u v is no longer rounded, x u is. Longer
chains x @ (u1 @ v1 @ ...) are taken when the weight is one product of two constants; three and more
factors in a row need no rule of their own, since pairs that save work never overlap:
r1 (k + r2) < k r2 asks for r1 < r2, and the next pair for r2 < r1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes import views
from nmm_compiler.passes.calls import LowRankCall
from nmm_compiler.passes.canonicalize import Canonical
from nmm_compiler.passes.forms import Key, Product, owner_of
from nmm_compiler.passes.match.base import Match, Rule
from nmm_compiler.passes.match.chains import Chain
from nmm_compiler.passes.match.epilogue import extend
from nmm_compiler.passes.match.lowrank import chain_operands, products_at
from nmm_compiler.passes.match.obstacles import refuse, too_wide
from nmm_compiler.passes.match.stages import Refusal, Stage, Weight, path_nodes, read_stage
from nmm_compiler.passes.rewrite import Editor
from nmm_compiler.passes.views import FEATURE, Atom


class RightAssociated(Rule):
    """x times a product of two constants."""

    name = "chain"
    needs = "reassociate"

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products whose right operand, as a matrix or transposed, is such a product."""
        for key, form in products_at(graph, node):
            inner = graph.form(form.rhs)
            plain = isinstance(inner, Product) and not graph.is_constant(form.lhs)
            if plain and graph.is_constant(inner.lhs) and graph.is_constant(inner.rhs):  # type: ignore[union-attr]
                yield key, form

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal:
        """Read x, u and v, and see whether the chain is cheaper and may be formed."""
        key, form = candidate
        quiet = Refusal("", "", key, "")
        chain = _read(graph, key, form)
        if chain is None:
            return quiet
        wide = too_wide(chain.u.k, chain.u.n, chain.v.n, key)
        if wide is not None:
            return wide
        found = extend(graph, chain)
        why = refuse(graph, found.nodes, owner_of(found.out), chain_operands(found))
        if why is not None:
            return why
        call = LowRankCall.of(graph, found)
        notes = (*call.notes(), "reassociated: x u is rounded where u v was")
        return Match(
            rule=self.name,
            kind="lowrank",
            node=owner_of(found.out),
            nodes=found.nodes,
            data=call,
            info=call.info(),
            notes=notes,
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the fused call."""
        return match.data.emit(graph, editor)


def _read(c: Canonical, key: Key, form: Product) -> Chain | None:
    base, over = c.base(form.rhs)
    inner = c.forms[base]
    if not isinstance(inner, Product) or len(over) != 2:
        return None
    # Read the weight's product as u (the data) times v (the weight), both plain matrices.
    made = read_stage(c, base, inner, True)
    if isinstance(made, Refusal) or len(made.x_dims) != 2 or len(made.out_dims) != 2:
        return None
    shape = c.shape(base) or ()
    if over == views.identity(shape):
        swapped = False
    elif over == views.permute(views.identity(shape), (1, 0)):
        swapped = True
    else:
        return None
    contracted = [x for x in form.rhs_labels if x not in form.out_labels]
    if len(contracted) != 1 or contracted[0] not in form.lhs_labels:
        return None
    k_position = form.rhs_labels.index(contracted[0])
    # (u v)[k, n] when the contracted dimension is the rows of u, else its transpose.
    rows_are_k = (k_position == 0) != swapped
    left = _matrix(c, made)
    if left is None:
        return None
    first, second = (left, made.weight) if rows_are_k else (made.weight, left)
    if not rows_are_k:
        first, second = _transposed(first), _transposed(second)
    x_shape = c.shape(form.lhs)
    if x_shape is None or first.n != second.k:
        return None
    x_dims: list[tuple[Atom, ...]] = []
    tokens: dict[int, views.Size] = {}
    for label, size in zip(form.lhs_labels, x_shape, strict=True):
        if size == 1:
            x_dims.append(())
        elif label == contracted[0]:
            x_dims.append((Atom(FEATURE, size, 1),))
        else:
            tokens[label] = size
            x_dims.append((Atom(label, size, 1),))
    out_dims: list[tuple[Atom, ...]] = []
    for label in form.out_labels:
        if label in tokens:
            out_dims.append((Atom(label, tokens[label], 1),))
        elif label in form.rhs_labels:
            out_dims.append((Atom(FEATURE, second.n, 1),) if second.n != 1 else ())
        else:
            out_dims.append(())
    nodes = made.nodes | {owner_of(key), owner_of(base)} | path_nodes(c, form.rhs)
    nodes |= path_nodes(c, made.x)
    stage = Stage(key, form.lhs, tuple(x_dims), first, tuple(out_dims), tokens, nodes)
    last = Stage(key, form.lhs, tuple(x_dims), second, tuple(out_dims), tokens, nodes)
    return Chain(stage, last, (), key, tuple(out_dims), frozenset(nodes))


def _matrix(c: Canonical, made: Stage) -> Weight | None:
    """Return the data operand of a product of constants as a [rows, contracted] matrix."""
    base, over = c.base(made.x)
    shape = c.shape(base)
    if shape is None or len(shape) != 2 or not all(isinstance(s, int) for s in shape):
        return None
    features = [i for i, d in enumerate(made.x_dims) if d and d[0].axis == FEATURE]
    if len(features) != 1 or any(len(d) != 1 for d in over):
        return None
    axis = over[features[0]][0].axis
    rows, columns = int(shape[1 - axis]), int(shape[axis])
    if made.out_dims[0] and made.out_dims[0][0].axis == FEATURE:
        return None  # the result has its features first: another spelling, left alone
    return Weight(base, rows, columns, "row" if axis == 1 else "col")


def _transposed(weight: Weight) -> Weight:
    """Return the same storage read as [n, k]."""
    return Weight(weight.key, weight.n, weight.k, "col" if weight.layout == "row" else "row")
