"""Result shapes of the `torch.ops.nmm.*` ops, with the checks of their operands.

These are the ops' fake (meta) implementations: they run while a graph is traced, on tensors without
data, and say in the words of the operand what does not chain. Sizes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError

LAYOUTS = ("row", "col")


def _check_layouts(**layouts: str) -> None:
    for name, layout in layouts.items():
        if layout not in LAYOUTS:
            raise UnknownNameError(name, layout, LAYOUTS)


def _weight_shape(name: str, w: Tensor, layout: str) -> tuple[int, int]:
    """Return (inputs, outputs) of a weight, whichever way it is stored."""
    if w.dim() != 2:
        raise ShapeError(f"{name} has shape {tuple(w.shape)}; pass a 2-D weight")
    rows, columns = w.shape
    return (rows, columns) if layout == "row" else (columns, rows)


def _tokens(x: Tensor, layout: str) -> tuple[tuple[Any, ...], int]:
    """Return the token dimensions of x and its feature count k."""
    if layout == "col":
        if x.dim() != 2:
            raise ShapeError(f"x has layout 'col' and shape {tuple(x.shape)}; pass a 2-D [k, m]")
        return (x.shape[1],), x.shape[0]
    if x.dim() < 1:
        raise ShapeError("x has no dimensions; pass [..., k]")
    return tuple(x.shape[:-1]), x.shape[-1]


def _same(what: str, left: Any, right: Any) -> None:
    if left != right:
        raise ShapeError(f"{what}: {left} and {right} do not chain")


def _chain_outputs(name: str, k: Any, weights: Sequence[Tensor], layout: str) -> int:
    """Return the output features of x times the weights, checking that each follows the last."""
    if not 1 <= len(weights) <= 2:
        raise ShapeError(f"{name} has {len(weights)} weights; pass [u, v] or a dense [w]")
    features = k
    for index, w in enumerate(weights):
        inputs, outputs = _weight_shape(f"{name}[{index}]", w, layout)
        _same(f"features into {name}[{index}]", features, inputs)
        features = outputs
    return features


def _check_vector(name: str, vector: Tensor | None, n: Any) -> None:
    if vector is not None and (vector.dim() != 1 or vector.shape[0] != n):
        raise ShapeError(f"{name} has shape {tuple(vector.shape)}; pass [{n}]")


def _check_dtypes(x: Tensor, *operands: Tensor | None) -> None:
    for operand in operands:
        if operand is not None and operand.dtype != x.dtype:
            raise SpecError(
                f"operands have dtypes {x.dtype} and {operand.dtype}; cast them to one dtype"
            )


def _result(x: Tensor, tokens: tuple[Any, ...], n: Any, layout: str) -> Tensor:
    if layout == "row":
        return x.new_empty((*tokens, n))
    m: Any = 1
    for size in tokens:
        m = m * size
    return x.new_empty((n, m))


def lowrank_matmul(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    *,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    w_layout: str = "row",
    **others: Any,
) -> Tensor:
    """Return an empty result of `lowrank_matmul`."""
    _check_layouts(
        x_layout=x_layout,
        out_layout=out_layout,
        u_layout=u_layout,
        v_layout=v_layout,
        w_layout=w_layout,
    )
    _check_dtypes(x, u, v, bias, w)
    tokens, k = _tokens(x, x_layout)
    inputs, rank = _weight_shape("u", u, u_layout)
    _same("features of x and u", k, inputs)
    rows, n = _weight_shape("v", v, v_layout)
    _same("rank of u and v", rank, rows)
    if w is not None:
        shape = _weight_shape("w", w, w_layout)
        _same("shapes of the dense w and of u v", shape, (k, n))
    _check_vector("bias", bias, n)
    return _result(x, tokens, n, out_layout)


def lowrank_matmul_shared_x(
    x: Tensor,
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    activations: Sequence[str] | None = None,
    out_layouts: Sequence[str] | None = None,
    **layouts: Any,
) -> list[Tensor]:
    """Return the empty results of `lowrank_matmul_shared_x`."""
    _same("numbers of us and vs", len(us), len(vs))
    _same("numbers of vs and biases", len(vs), len(biases))
    if activations is not None:
        _same("numbers of vs and activations", len(vs), len(activations))
    each = zip(us, vs, biases, _each_layout(layouts, out_layouts, len(vs)), strict=True)
    return [lowrank_matmul(x, u, v, b, **one) for u, v, b, one in each]


def lowrank_matmul_shared_u(
    x: Tensor,
    u: Tensor,
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    out_layouts: Sequence[str] | None = None,
    **layouts: Any,
) -> list[Tensor]:
    """Return the empty results of `lowrank_matmul_shared_u`."""
    _same("numbers of vs and biases", len(vs), len(biases))
    each = zip(vs, biases, _each_layout(layouts, out_layouts, len(vs)), strict=True)
    return [lowrank_matmul(x, u, v, b, **one) for v, b, one in each]


def _each_layout(
    layouts: dict[str, Any], out_layouts: Sequence[str] | None, count: int
) -> list[dict[str, Any]]:
    """Return the layouts of each of `count` results."""
    if out_layouts is None:
        return [layouts] * count
    _same("numbers of vs and out_layouts", count, len(out_layouts))
    return [{**layouts, "out_layout": layout} for layout in out_layouts]


def gated_mlp_up(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    x_layout: str = "row",
    out_layout: str = "row",
    weight_layout: str = "row",
    **others: Any,
) -> Tensor:
    """Return an empty result of `gated_mlp_up`."""
    _check_layouts(x_layout=x_layout, out_layout=out_layout, weight_layout=weight_layout)
    _check_dtypes(x, *gate, *up, gate_bias, up_bias)
    tokens, k = _tokens(x, x_layout)
    n = _chain_outputs("gate", k, gate, weight_layout)
    _same("output features of gate and up", n, _chain_outputs("up", k, up, weight_layout))
    _check_vector("gate_bias", gate_bias, n)
    _check_vector("up_bias", up_bias, n)
    return _result(x, tokens, n, out_layout)


def gated_mlp(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    x_layout: str = "row",
    out_layout: str = "row",
    weight_layout: str = "row",
    **others: Any,
) -> Tensor:
    """Return an empty result of `gated_mlp`."""
    _check_layouts(out_layout=out_layout)
    _check_dtypes(x, *down, down_bias)
    h = gated_mlp_up(
        x, gate, up, gate_bias, up_bias, x_layout=x_layout, weight_layout=weight_layout
    )
    n = _chain_outputs("down", h.shape[-1], down, weight_layout)
    _check_vector("down_bias", down_bias, n)
    return _result(x, tuple(h.shape[:-1]), n, out_layout)


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    x_layout: str = "row",
    out_layout: str = "row",
    w_layout: str = "row",
    **others: Any,
) -> Tensor:
    """Return an empty result of `matmul`."""
    _check_layouts(x_layout=x_layout, out_layout=out_layout, w_layout=w_layout)
    _check_dtypes(x, w, bias)
    tokens, k = _tokens(x, x_layout)
    inputs, n = _weight_shape("w", w, w_layout)
    _same("features of x and w", k, inputs)
    _check_vector("bias", bias, n)
    return _result(x, tokens, n, out_layout)


FAKES: dict[str, Callable] = {
    f.__name__: f
    for f in (
        lowrank_matmul,
        lowrank_matmul_shared_x,
        lowrank_matmul_shared_u,
        gated_mlp_up,
        gated_mlp,
        matmul,
    )
}
