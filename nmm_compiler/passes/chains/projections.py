"""A value as a projection of some x: a chain or one dense product, with its biases.

The rules for groups (LoRA, gated MLP, pairs that share x) ask two questions: is this value a
projection, and do two projections read the same x with their tokens in the same order?
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, read_chain
from nmm_compiler.passes.chains.linear_map import (
    Stage,
    Weight,
    is_whole_feature,
    path_nodes,
    read_stage,
)
from nmm_compiler.passes.chains.prices import too_wide
from nmm_compiler.passes.chains.refusal import Refusal, part_of_one
from nmm_compiler.passes.chains.steps import Step, trace_back
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key
from nmm_compiler.passes.graph.views import FEATURE, Dim, Dims


@dataclass(frozen=True)
class Projection:
    """x times one or two weights, then affine steps; out_dims over the tokens of `first`."""

    first: Stage
    weights: tuple[Weight, ...]
    middle: tuple[Step, ...]
    after: tuple[Step, ...]
    out: Key
    out_dims: Dims
    nodes: frozenset[fx.Node]
    chain: Chain | None = None

    @property
    def k(self) -> int:
        """Return the input features."""
        return self.weights[0].k

    @property
    def n(self) -> int:
        """Return the output features."""
        return self.weights[-1].n

    @property
    def low_rank(self) -> bool:
        """Return whether there are two factors."""
        return len(self.weights) == 2

    def only_bias(self) -> bool:
        """Return whether nothing but biases surrounds the products."""
        steps = (*self.middle, *self.after)
        return all(s.kind == "bias" or (s.key is None and s.number == 1.0) for s in steps)

    def keys(self) -> list[Key]:
        """Return the values that the projection reads."""
        steps = (*self.middle, *self.after)
        keys: list[Key] = [self.first.x, *(w.key for w in self.weights)]
        return keys + [s.key for s in steps if s.key is not None]


def read_projection(c: Canonical, key: Key, inputs: bool = False) -> Projection | None:
    """Read a value as a projection; None when it is none.

    inputs: the factors of a low-rank one may be inputs of the graph.
    """
    walk, form = trace_back(c, key)
    if isinstance(form, Refusal):
        return None
    chain = read_chain(c, walk.key, form, inputs)
    if isinstance(chain, Chain) and chain.per_token:
        return None
    if isinstance(chain, Chain) and not too_wide(c, chain.first, chain.u.n, chain.v.n, walk.key):
        stage, middle = chain.first, chain.middle
        weights: tuple[Weight, ...] = (chain.u, chain.v)
        inner_dims, nodes = chain.out_dims, chain.nodes
    else:
        chain = None
        constant = (c.is_constant(form.lhs), c.is_constant(form.rhs))
        if not any(constant):
            constant = (c.is_weight(form.lhs), c.is_weight(form.rhs))
        if not any(constant):
            return None
        weight_is_rhs = constant[1]  # when both are inputs of the graph, x stands on the left
        read = read_stage(c, walk.key, form, weight_is_rhs)
        if isinstance(read, Refusal) or part_of_one(read.x) is not None:
            return None
        stage, weights, middle = read, (read.weight,), ()
        inner_dims, nodes = read.out_dims, read.nodes
    out_dims = views.compose(walk.dims, inner_dims)
    if out_dims is None:
        return None
    after: list[Step] = []
    for step in reversed(walk.steps):
        moved = views.compose(step.dims, inner_dims)
        if moved is None:
            return None
        if step.kind != "scale" and not is_whole_feature(
            tuple(a for d in moved for a in d), weights[-1].n
        ):
            return None
        if step.kind in ("vector", "token"):
            return None
        after.append(step)
    covered = nodes | frozenset(walk.nodes) | path_nodes(c, key)
    return Projection(stage, weights, middle, tuple(after), key, out_dims, covered, chain)


def over_base(c: Canonical, stage: Stage, dims: Dims) -> Dims | None:
    """Express dims over a stage's tokens by the axes of the value that x is a view of."""
    _, view = c.base(stage.x)
    tokens: dict[int, Dim] = {}
    for own, over in zip(stage.x_dims, view, strict=True):
        if own and own[0].axis != FEATURE:
            tokens[own[0].axis] = over
    out: list[Dim] = []
    for dim in dims:
        atoms: list[views.Atom] = []
        for atom in dim:
            if atom.axis == FEATURE:
                atoms.append(atom)
                continue
            part = views.compose(((views.Atom(0, atom.size, atom.inner),),), (tokens[atom.axis],))
            if part is None:
                return None
            atoms.extend(part[0])
        out.append(views.coalesce(atoms))
    return tuple(out)


def features_over_base(c: Canonical, stage: Stage) -> Dim:
    """Return the features that a stage contracts, by the axes of the value that x is a view of."""
    _, view = c.base(stage.x)
    pieces = [
        (int(own[0].inner), over)
        for own, over in zip(stage.x_dims, view, strict=True)
        if own and own[0].axis == FEATURE
    ]
    return views.coalesce([a for _, over in sorted(pieces, key=lambda p: -p[0]) for a in over])


def same_x(c: Canonical, one: Stage, two: Stage) -> bool:
    """Return whether two stages read the same features of the same value."""
    if c.base(one.x)[0] is not c.base(two.x)[0]:
        return False
    return features_over_base(c, one) == features_over_base(c, two)


def same_tokens(c: Canonical, one: Stage, one_dims: Dims, two: Stage, two_dims: Dims) -> bool:
    """Return whether two results lie over the tokens of the same x in the same way."""
    if not same_x(c, one, two):
        return False
    left, right = over_base(c, one, one_dims), over_base(c, two, two_dims)
    return left is not None and left == right
