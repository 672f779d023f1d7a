"""DTensor rules of the `torch.ops.nmm.*` ops: which placements a call accepts without resharding.

Five rows for y = (x u) v, with what moves between devices afterwards:

    replicate   x, u, v whole                              nothing
    token       x and y cut by tokens, u and v whole       nothing
    column      v cut by outputs (column parallel)         nothing; x u is made on every device
    row         x and u cut by inputs (row parallel)       y is Partial: a sum of width n
    rank        u cut by outputs, v by inputs              y is Partial: a sum of width n

A bias, an activation or a gate is not linear, so a call that has one refuses the Partial rows.
Row parallelism that sums at width r wants the collective between the two products: leave those
unfused. Cuts are given in the stored layout of each operand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _cut(layout: str, side: str) -> int:
    """Return the dimension of a weight that holds its "in" or "out" features."""
    return (0 if side == "in" else 1) if layout == "row" else (1 if side == "in" else 0)


def _features_dim(ndim: int, layout: str) -> int:
    return 0 if layout == "col" else ndim - 1


def _token_dims(ndim: int, layout: str) -> list[int]:
    return [1] if layout == "col" else list(range(ndim - 1))


def _lowrank_rows(
    x: Any, u: Any, v: Any, bias: Any = None, w: Any = None, **kw: Any
) -> list[tuple[list, list]]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x_layout, out_layout = kw.get("x_layout", "row"), kw.get("out_layout", "row")
    u_layout, v_layout = kw.get("u_layout", "row"), kw.get("v_layout", "row")
    w_layout = kw.get("w_layout", "row")
    whole = Replicate()
    out_ndim = 2 if out_layout == "col" else (x.ndim if x_layout == "row" else 2)
    out_features = Shard(_features_dim(out_ndim, out_layout))

    def row(out: Any, px: Any, pu: Any, pv: Any, pbias: Any, pw: Any) -> tuple[list, list]:
        optional = [None if bias is None else pbias, None if w is None else pw]
        return [out], [px, pu, pv, *optional]

    rows = [row(whole, whole, whole, whole, whole, whole)]
    if x_layout == out_layout:
        rows += [
            row(Shard(dim), Shard(dim), whole, whole, whole, whole)
            for dim in _token_dims(x.ndim, x_layout)
        ]
    column = Shard(_cut(v_layout, "out"))
    rows.append(row(out_features, whole, whole, column, Shard(0), Shard(_cut(w_layout, "out"))))
    linear = bias is None and kw.get("activation", "identity") == "identity"
    if linear:
        x_features = Shard(_features_dim(x.ndim, x_layout))
        rows.append(
            row(
                Partial(),
                x_features,
                Shard(_cut(u_layout, "in")),
                whole,
                whole,
                Shard(_cut(w_layout, "in")),
            )
        )
        if w is None:
            rows.append(
                row(
                    Partial(),
                    whole,
                    Shard(_cut(u_layout, "out")),
                    Shard(_cut(v_layout, "in")),
                    whole,
                    whole,
                )
            )
    return rows


def _matmul_rows(x: Any, w: Any, bias: Any = None, **kw: Any) -> list[tuple[list, list]]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x_layout, out_layout = kw.get("x_layout", "row"), kw.get("out_layout", "row")
    w_layout = kw.get("w_layout", "row")
    whole = Replicate()
    out_ndim = 2 if out_layout == "col" else (x.ndim if x_layout == "row" else 2)

    def row(out: Any, px: Any, pw: Any, pbias: Any) -> tuple[list, list]:
        return [out], [px, pw, None if bias is None else pbias]

    rows = [row(whole, whole, whole, whole)]
    if x_layout == out_layout:
        rows += [row(Shard(dim), Shard(dim), whole, whole) for dim in _token_dims(x.ndim, x_layout)]
    out_features = Shard(_features_dim(out_ndim, out_layout))
    rows.append(row(out_features, whole, Shard(_cut(w_layout, "out")), Shard(0)))
    if bias is None and kw.get("activation", "identity") == "identity":
        x_features = Shard(_features_dim(x.ndim, x_layout))
        rows.append(row(Partial(), x_features, Shard(_cut(w_layout, "in")), whole))
    return rows


RULES: dict[str, Callable] = {"lowrank_matmul": _lowrank_rows, "matmul": _matmul_rows}
_registered = False


def register(ops: dict[str, Callable]) -> None:
    """Register the rules with DTensor, once."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    for name, rule in RULES.items():
        register_sharding(ops[name])(rule)  # type: ignore[arg-type]
    _registered = True


def register_when_used(ops: dict[str, Callable]) -> None:
    """Register now if the program has DTensor loaded; importing it costs most of a second."""
    if not _registered and "torch.distributed.tensor" in sys.modules:
        register(ops)
