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
tp_axis "rows" has it inside. Such a call has one row, its own (ON_RANKS). Cuts are dimensions of
each operand as it is stored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nmm_compiler.ops.definition import Placements

Part = tuple[str, Any, str]
"""Role (definition.py), tensor or None, and the name of the layout of an operand, x first.

The scales of a weight's outputs have the weight's role and "_scale" behind it."""

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
ON_RANKS: tuple[Way, ...] = (("whole", "features", PRODUCTS[1][2] | {"bias": "whole"}),)
"""Of calls whose kernels sum x u over the ranks themselves."""
GATED_UP: tuple[Way, ...] = (COLUMN,)
GATED_MLP: tuple[Way, ...] = (
    ("features", "whole",
     {"down_last": "out", "down_dense": "out", "down_bias": "out"}),
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


def _ways(given: Mapping[str, Any], gated: Sequence[str]) -> tuple[Way, ...]:
    """Return the rows of a call besides "replicate" and "token"."""
    if gated:
        return GATED_MLP if "down" in gated else GATED_UP
    if given.get("tp_axis"):
        return ON_RANKS
    if given.get("inner_gain") is not None:
        return NORMED
    inner = given.get("inner_activation", "identity") != "identity"
    return SHAPED if inner or given.get("inner_bias") is not None else PRODUCTS


def placements(given: Mapping[str, Any], parts: Sequence[Part], gated: Sequence[str]) -> Placements:
    """Return what a call accepts: the rows of the table above; given: its arguments by name.

    gated: the linears that a gate joins. A norm takes all features of x, so x is not cut along
    them. A residual lies as the result: what is Partial in the result is Partial in the residual.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, x_layout = given["x"], given["x_layout"]
    results = len(given["vs"]) if "vs" in given and not gated else 1
    out_layouts = given.get("out_layouts") or [given["out_layout"]] * results
    linear = {given.get("activation", "identity"), *(given.get("activations") or ())} == {
        "identity"
    }
    dense = any(role == "dense" and tensor is not None for role, tensor, _ in parts)
    summed, normed = bool(given.get("tp_axis")), given.get("norm", "none") != "none"

    def placed(part: Part, sides: dict[str, str], of_x: Any, out: Any) -> Any:
        role, tensor, layout = part
        side = sides.get(role.removesuffix("_scale"), "whole")
        if tensor is None:
            return None
        if role.endswith("_scale") and (side == "in" or tensor.shape[0] == 1):
            side = "whole"
        if role in ("x", "residual"):
            return of_x if role == "x" else out
        if side in ("partial", "whole"):
            return Partial() if side == "partial" else Replicate()
        return Shard(cut(given[layout], side) if layout else 0)

    def row(outs: list[Any], of_x: Any, sides: dict[str, str]) -> tuple[list[Any], list[Any]]:
        return outs, [placed(part, sides, of_x, outs[0]) for part in parts]

    whole = [Replicate()] * results
    rows = [] if summed else [row(whole, Replicate(), {})]
    if not summed and set(out_layouts) == {x_layout}:
        rows += [row([Shard(at)] * results, Shard(at), {}) for at in token_dims(x.ndim, x_layout)]
    flat = "col" in (x_layout, *out_layouts)
    out_features = [Shard(features_dim(2 if flat else x.ndim, layout)) for layout in out_layouts]
    made: dict[str, list[Any]] = {
        "features": out_features,
        "whole": whole,
        "partial": [Partial()] * results,
    }
    for out, of_x, sides in _ways(given, gated):
        features = of_x == "features"
        bad = out == "partial" and (
            (dense and "dense" not in sides) or not (linear or gated)
        )  # a gate is before what is summed
        if not bad and not (features and normed):
            along = Shard(features_dim(x.ndim, x_layout)) if features else Replicate()
            rows.append(row(made[out], along, sides))
    if "token_axis" in given and x.ndim == 2 and x_layout != out_layouts[0]:
        axis = {"row": 0, "col": 1}  # along m, where x and the result differ in layout
        rows.append(row([Shard(axis[out_layouts[0]])], Shard(axis[x_layout]), {}))
    return rows


_registered = False
_NO_NUMBERS = 100  # the place of the first positional argument that is a number: behind all


def register(rules: dict[Any, Callable]) -> None:
    """Register the rules, op -> function, with DTensor, once.

    torch's own `register_sharding` knows no op that returns a list.
    """
    global _registered
    if _registered:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for op, rule in rules.items():
        keywords = [one.name for one in op._schema.arguments if one.kwarg_only] or None
        info = RuntimeSchemaInfo(_NO_NUMBERS, keywords, needs_pytree=True)
        propagator.register_op_strategy(op, functools.partial(_strategy, rule), info)
    _registered = True


def _strategy(rule: Callable, op_schema: Any) -> Any:
    """Return the strategies of a call, over all dimensions of its mesh."""
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    args = tuple(map(_spec, op_schema.args_schema))
    keywords = {name: _spec(value) for name, value in op_schema.kwargs_schema.items()}
    found = rule(*args, **keywords)
    combined = [[*outs, *(p for p in ins if p is not None)] for outs, ins in found]
    mesh, results = op_schema.get_mesh_from_args(), len(found[0][0])
    return expand_to_full_mesh_op_strategy(mesh, op_schema, combined, input_index=results)


def _spec(strategy: Any) -> Any:
    """Return the placements that an argument has: a list of them for a list of tensors."""
    from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy

    if isinstance(strategy, OpStrategy):
        return strategy.strategies[0].output_spec
    if isinstance(strategy, (TupleStrategy, tuple, list)):
        children: Any = getattr(strategy, "children", strategy)
        return tuple(map(_spec, children))
    return strategy


def register_when_used(rules: dict[Any, Callable]) -> None:
    """Register now if the program has DTensor loaded; importing it costs most of a second."""
    if not _registered and "torch.distributed.tensor" in sys.modules:
        register(rules)
