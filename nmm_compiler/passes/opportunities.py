"""The dense products with constant weights in a graph, and what factorizing would save."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.linear_map import read_stage
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import owner_of
from nmm_compiler.passes.result import Opportunity
from nmm_compiler.passes.rules.base import module_path
from nmm_compiler.passes.rules.lowrank import products_at


def _looked_up(weight: fx.Node) -> bool:
    """Return whether an embedding reads the weight too; `compress` leaves such tied weights
    dense."""
    seen, left = set[fx.Node](), [weight]
    while left:
        node = left.pop()
        if node not in seen and (node is weight or node.op in ("placeholder", "get_attr")):
            seen.add(node)
            left += node.all_input_nodes
    readers = [user for node in seen for user in node.users]
    return any("embedding" in getattr(user.target, "__name__", "") for user in readers)


def _count(sizes: Iterable[Any]) -> int | None:
    """Return the tokens of a product; None where a size is symbolic."""
    known = list(sizes)
    return math.prod(known) if all(isinstance(size, int) for size in known) else None


def opportunities(c: Canonical, covered: set[fx.Node]) -> list[Opportunity]:
    """Return the dense products with a constant 2-D weight that factors would make smaller."""
    found: list[Opportunity] = []
    for node in c.graph.nodes:
        if node in covered:
            continue
        for key, form in products_at(c, node):
            rhs = c.is_constant(form.rhs)
            data = form.lhs if rhs else form.rhs
            if c.is_constant(data) or not c.is_constant(form.rhs if rhs else form.lhs):
                continue
            if _looked_up(owner_of(form.rhs if rhs else form.lhs)):
                continue
            stage = read_stage(c, key, form, rhs)
            if isinstance(stage, Refusal):
                continue
            k, n = stage.weight.k, stage.weight.n
            r = int(0.8 * k * n / (k + n))
            if r < 1 or min(k, n) < 2:
                continue
            saved = k * n - r * (k + n)
            dtype = c.dtype(key)
            size = dtype.itemsize if dtype is not None else 2
            break_even = -(-k * n // (k + n))
            found.append(
                Opportunity(
                    node=owner_of(key).name,
                    module=module_path(node),
                    k=k,
                    n=n,
                    r=r,
                    break_even=break_even,
                    saved_bytes=saved * size,
                    saved_flops_per_token=2 * saved,
                    m=_count(stage.tokens.values()),
                    dtype=str(dtype).removeprefix("torch."),
                )
            )
    return found
