"""DTensor rules of the `torch.ops.nmm.*` ops: which placements a call accepts without resharding.

Five rows for y = (x u) v, with what moves between devices afterwards:

    replicate   x, u, v whole                              nothing
    token       x and y cut by tokens, u and v whole       nothing
    column      v cut by outputs (column parallel)         nothing; x u is made on every device
    row         x and u cut by inputs (row parallel)       y is Partial: a sum of width n
    rank        u cut by outputs, v by inputs              y is Partial: a sum of width n

A gated MLP has "column" for its gate and up, whose features "row" of its down projection sums. An
activation or a gate is not linear, so a call that has one refuses the Partial rows; a bias of a
Partial result is Partial too, which DTensor makes of a whole one without moving anything.
Row parallelism that sums at width r needs the collective between the two products: a call with
tp_axis "rows" has it inside. A call with a tp_axis has one row, its own (ON_RANKS). Cuts are
dimensions of each operand as it is stored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nmm_compiler.ops.definition import ROW

Placements = list[tuple[list[Any], list[Any]]]
"""Rows of (placements of the results, placements of the operands)."""

Operand = tuple[str, Any, str]
"""Role, tensor or None, and the name of the layout of an operand after x.

A role is "first" and "last" for the factors u and v, "dense" for a weight, or "bias"; those of a
product that follows a gate begin with "down_".
"""

Way = tuple[str, str, dict[str, str]]
"""Name of the result's and of x's placement, and how each role is cut: "in", "out", "partial"."""

COLUMN: Way = ("features", "whole", {"last": "out", "dense": "out", "bias": "out"})
PRODUCTS: tuple[Way, ...] = (
    COLUMN,
    ("partial", "features", {"first": "in", "dense": "in", "bias": "partial"}),
    ("partial", "whole",
     {"first": "out", "last": "in", "bias": "partial", "inner_bias": "out"}),
)  # fmt: skip
"""Of results that are sums of products of x: column, row and rank."""
SHAPED: tuple[Way, ...] = (PRODUCTS[0], PRODUCTS[2])
"""Of products with a function between them, which needs whole sums of x u."""
NORMED: tuple[Way, ...] = PRODUCTS[:1]
"""Of products with a norm over the rank between them."""
ON_RANKS: dict[str, tuple[Way, ...]] = {
    "columns": NORMED,
    "rows": (("whole", "features", PRODUCTS[1][2] | {"bias": "whole"}),),
    "rank": (("whole", "whole", PRODUCTS[2][2]),),
}
"""Of calls whose kernels sum over the ranks themselves, by their tp_axis."""
GATED_UP: tuple[Way, ...] = (COLUMN,)
GATED_MLP: tuple[Way, ...] = (
    ("features", "whole", {"down_last": "out", "down_dense": "out", "down_bias": "out"}),
    ("partial", "whole",
     {**COLUMN[2], "down_first": "in", "down_dense": "in", "down_bias": "partial"}),
)  # fmt: skip


def cut(layout: str, side: str) -> int:
    """Return the dimension of a weight that holds its "in" or "out" features."""
    return (0 if side == "in" else 1) if layout == "row" else (1 if side == "in" else 0)


def features_dim(ndim: int, layout: str) -> int:
    """Return the dimension of activations that holds their features."""
    return 0 if layout == "col" else ndim - 1


def token_dims(ndim: int, layout: str) -> list[int]:
    """Return the dimensions of activations that count tokens."""
    return [1] if layout == "col" else list(range(ndim - 1))


def factors(name: str, weights: Sequence[Any]) -> list[Operand]:
    """Return the operands of a projection [u, v] or [w]; name: what its roles begin with."""
    roles = ("first", "last") if len(weights) == 2 else ("dense",)
    return [(name + role, w, "weight_layout") for role, w in zip(roles, weights, strict=True)]


def placements(
    x: Any,
    operands: Sequence[Operand],
    keywords: dict[str, Any],
    ways: tuple[Way, ...] = PRODUCTS,
    results: int = 1,
    *,
    summed: bool = False,
) -> Placements:
    """Return what a call accepts: the rows of the table above.

    ways: the rows besides "replicate" and "token". summed: these alone, the call sums inside.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    said = ROW | keywords
    x_layout = said["x_layout"]
    out_layouts = said.get("out_layouts") or [said["out_layout"]] * results
    linear = said.get("activation", "identity") == "identity" and set(
        said.get("activations") or ()
    ) <= {"identity"}
    given = {role for role, tensor, _ in operands if tensor is not None}

    def placed(role: str, tensor: Any, layout: str, sides: dict[str, str]) -> Any:
        side = sides.get(role)
        if tensor is None or side is None:
            return None if tensor is None else Replicate()
        if side == "partial":
            return Partial()
        if side == "whole":
            return Replicate()
        return Shard(cut(said[layout], side) if layout else 0)

    def row(outs: list[Any], of_x: Any, sides: dict[str, str]) -> tuple[list[Any], list[Any]]:
        return outs, [of_x, *(placed(*operand, sides) for operand in operands)]

    rows = [] if summed else [row([Replicate()] * results, Replicate(), {})]
    if not summed and set(out_layouts) == {x_layout}:
        for dim in token_dims(x.ndim, x_layout):
            rows.append(row([Shard(dim)] * results, Shard(dim), {}))
    flat = "col" in (x_layout, *out_layouts)
    out_features = [Shard(features_dim(2 if flat else x.ndim, layout)) for layout in out_layouts]
    x_features = Shard(features_dim(x.ndim, x_layout))
    gated = ways is GATED_MLP  # its activation stands before what is summed
    for out, of_x, sides in ways:
        whole_dense = "dense" in given and "dense" not in sides
        if out == "partial" and (whole_dense or not (linear or gated)):
            continue
        made: dict[str, list[Any]] = {"features": out_features, "whole": [Replicate()] * results}
        outs = made.get(out, [Partial()] * results)
        rows.append(row(outs, x_features if of_x == "features" else Replicate(), sides))
    return rows


_registered = False


def register(rules: dict[Any, Callable]) -> None:
    """Register the rules, op -> function, with DTensor, once."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    for op, rule in rules.items():
        if str(op._schema.returns[0].type).startswith("List"):
            _register_many(op, rule)
        else:
            register_sharding(op)(rule)
    _registered = True


def _register_many(op: Any, rule: Callable) -> None:
    """Register the rule of an op that returns a list, which `register_sharding` does not know."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo, TupleStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def spec(strategy: Any) -> Any:
        if isinstance(strategy, OpStrategy):
            return strategy.strategies[0].output_spec
        if isinstance(strategy, (TupleStrategy, tuple, list)):
            children: Any = getattr(strategy, "children", strategy)
            return tuple(map(spec, children))
        return strategy

    def strategy(op_schema: Any) -> Any:
        args = tuple(map(spec, op_schema.args_schema))
        keywords = {name: spec(value) for name, value in op_schema.kwargs_schema.items()}
        found = rule(*args, **keywords)
        combined = [[*outs, *(p for p in ins if p is not None)] for outs, ins in found]
        expand = functools.partial(expand_to_full_mesh_op_strategy, input_index=len(found[0][0]))
        return expand(op_schema.get_mesh_from_args(), op_schema, combined)

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(op, strategy, RuntimeSchemaInfo(100, None, needs_pytree=True))


def register_when_used(rules: dict[Any, Callable]) -> None:
    """Register now if the program has DTensor loaded; importing it costs most of a second."""
    if not _registered and "torch.distributed.tensor" in sys.modules:
        register(rules)
