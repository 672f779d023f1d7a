"""The op of family `lowrank`: `nmm.lowrank_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.ops.backward_products import Products
from nmm_compiler.ops.between_ranks import check_group, spread, summed
from nmm_compiler.ops.definition import UV, WHERE, Op
from nmm_compiler.ops.gradients import Chain, Grads, Inner, activation_grad, add, back_to, rows_of
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, features, weight
from nmm_compiler.ops.norm_and_residual import ended
from nmm_compiler.ops.operands import (
    check_dtypes,
    check_same,
    check_vector,
    empty_result,
    read_layouts,
    tokens_of,
    weight_shape,
)
from nmm_compiler.ops.products import activate, linear, product, rms_norm
from nmm_compiler.ops.scaled import OF_X, OWN, SAID, SCALED, scaled_op, widened
from nmm_compiler.ops.sharding import NORMED, ON_RANKS, PRODUCTS, SHAPED, Placements, placements


def lowrank_matmul(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    inner_bias: Tensor | None = None,
    inner_gain: Tensor | None = None,
    *,
    scale: float = 1.0,
    activation: str = "identity",
    inner_activation: str = "identity",
    inner_eps: float = 1e-6,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    w_layout: str = "row",
    tp: int = 1,
    tp_axis: str = "",
    group: str = "",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return activation(x w + scale * p v + bias), p = inner_activation(x u + inner_bias).

    inner_gain: p is the RMS norm of that, with inner_eps under the root, times the gain. tp,
    tp_axis: the operands are one rank's, as LowRankSpec says; group: the name of the process group
    that sums.
    """
    if tp > 1:
        check_group(tp, tp_axis, group)
    if x_layout == "col":
        x = x.t()
    if tp_axis == "rank":
        x = spread(x, group)
    in_linear = u_layout == "col" and tp_axis != "rows"
    h = linear(x, u, inner_bias if in_linear else None) if u_layout == "col" else torch.matmul(x, u)
    if tp_axis == "rows":
        h = summed(h, group)
    if inner_bias is not None and not in_linear:
        h = h + inner_bias
    if inner_activation != "identity":
        h = activate(h, inner_activation)
    if inner_gain is not None:
        h = rms_norm(h, inner_gain, inner_eps)
    if tp_axis == "columns":
        h, x = spread(h, group), x if w is None else spread(x, group)
    if w is None and scale == 1.0:
        y = product(h, v, v_layout, bias, out_layout)
    elif w is None:
        y = product(h, v, v_layout, None, out_layout) * scale
        if bias is not None:
            y = y + (bias if out_layout == "row" else bias.unsqueeze(1))
    else:
        y = torch.add(
            product(x, w, w_layout, bias, out_layout),
            product(h, v, v_layout, None, out_layout),
            alpha=scale,
        )
    if tp_axis == "rank":
        y = summed(y, group)
    return y if activation == "identity" else activate(y, activation)


def fake_lowrank_matmul(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    inner_bias: Tensor | None = None,
    inner_gain: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return an empty result of `lowrank_matmul`."""
    said = read_layouts(keywords)
    check_dtypes(x, u, v, bias, w, inner_bias, inner_gain)
    tokens, k = tokens_of(x, said["x_layout"])
    inputs, rank = weight_shape("u", u, said["u_layout"])
    check_same("features of x and u", k, inputs)
    rows, n = weight_shape("v", v, said["v_layout"])
    check_same("rank of u and v", rank, rows)
    if w is not None:
        shape = weight_shape("w", w, said["w_layout"])
        check_same("shapes of the dense w and of u v", shape, (k, n))
    check_vector("bias", bias, n)
    check_vector("inner_bias", inner_bias, rank)
    check_vector("inner_gain", inner_gain, rank)
    return empty_result(x, tokens, n, said["out_layout"])


def lowrank_gradient(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    """Return the gradients of x, u, v, bias, w, inner_bias and inner_gain."""
    if kw.get("tp", 1) > 1:
        raise SpecError(
            "lowrank_matmul with tp > 1 has gradients with executor 'reference' only; pass that"
        )
    x, u, v, bias, w, inner_bias, gain = (*args, None, None, None, None)[:7]
    need = (*need, False, False, False, False)[:7]
    rows = rows_of(x, kw["x_layout"])
    shape = kw.get("inner_activation", "identity")
    inner = Inner(inner_bias, shape, gain, kw.get("inner_eps", 1e-6), need[5], need[6])
    products = Products.of(kw)
    low = Chain(rows, (u, v), (kw["u_layout"], kw["v_layout"]), inner, products)
    scale, activation = kw.get("scale", 1.0), kw.get("activation", "identity")
    grad = rows_of(grads[0], kw["out_layout"])
    dense = None if w is None else Chain(rows, (w,), (kw["w_layout"],), products=products)
    if activation != "identity":
        plain = dense is None and scale == 1.0
        y = low.output(bias if plain else None, need[1:3])
        if not plain:
            y = y * scale if dense is None else y * scale + dense.output(None)
            y = y if bias is None else y + bias
        grad = activation_grad(grad, y, activation)
    grad_x, grad_w, needs_x = None, None, need[0]
    if dense is not None and needs_x and inner.is_identity:
        factors, base = (low.weights, low.layouts), (w, kw["w_layout"])
        grad_x, needs_x = products.chain_transposed(grad, *factors, base, scale), False
    scaled = grad if scale == 1.0 else grad * scale
    more, (grad_u, grad_v) = low.backward(scaled, needs_x, need[1:3])
    grad_x = add(grad_x, more)
    if dense is not None:
        more, (grad_w,) = dense.backward(grad, needs_x, need[4:5])
        grad_x = add(grad_x, more)
    grad_bias = grad.sum(0) if need[3] else None
    grad_x = back_to(x, grad_x, kw["x_layout"])
    own = inner.grad_bias, inner.grad_gain
    return [grad_x, grad_u, grad_v, grad_bias, grad_w, *own][: len(args)]


def _lower(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, u, v, bias, w, inner_bias, gain = (*args, None, None, None, None)[:7]
    u, u_layout = weight(u, kw.get("u_layout", "row"), transpose)
    v, v_layout = weight(v, kw.get("v_layout", "row"), transpose)
    w_layout = "row"
    if w is not None:
        w, w_layout = weight(w, kw.get("w_layout", "row"), transpose)
    k, r = features(u, u_layout)
    spec = LowRankSpec(
        m=m,
        k=k,
        r=r,
        n=features(v, v_layout)[1],
        dtype=dtype_name(rows),
        x_layout=kw.get("x_layout", "row"),
        out_layout=kw.get("out_layout", "row"),
        u_layout=u_layout,
        v_layout=v_layout,
        w_layout=w_layout,
        bias=bias is not None,
        base=w is not None,
        activation=kw.get("activation", "identity"),
        scale=float(kw.get("scale", 1.0)),
        inner_activation=kw.get("inner_activation", "identity"),
        inner_bias=inner_bias is not None,
        inner_norm=gain is not None,
        inner_eps=float(kw.get("inner_eps", 1e-6)),
        tp=int(kw.get("tp", 1)),
        tp_axis=kw.get("tp_axis", ""),
    )
    given = (rows, u, v, w, bias, inner_bias, gain)
    return [Launch(spec, tuple(t for t in given if t is not None))]


def _placements(
    x: Any, u: Any, v: Any, bias: Any = None, w: Any = None, *inner: Any, **kw: Any
) -> Placements:
    inner_bias, gain = (*inner, None, None)[:2]
    factors = ("first", u, "u_layout"), ("last", v, "v_layout")
    others = [("bias", bias, ""), ("dense", w, "w_layout"), ("inner_bias", inner_bias, "")]
    others += [("inner_gain", gain, "")] * (len(inner) > 1)
    if kw.get("tp_axis"):
        return placements(x, (*factors, *others), kw, ON_RANKS[kw["tp_axis"]], summed=True)
    shaped = inner_bias is not None or kw.get("inner_activation", "identity") != "identity"
    ways = NORMED if gain is not None else SHAPED if shaped else PRODUCTS
    return placements(x, (*factors, *others), kw, ways)


def lowrank_matmul_scaled(
    x: Tensor,
    scales: Sequence[Tensor],
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return activation((x u) v + bias) for fp8 factors; with w, lowrank_matmul of an fp8 w alone,
    whose only scale is given, beside plain factors."""
    said = SAID | keywords
    if w is not None:
        x, (w,) = widened(x, scales, [(w, said.get("w_layout", "row"))], said)
        own = {name: value for name, value in keywords.items() if name not in OWN}
        return lowrank_matmul(x, u, v, bias, w, **own)
    x, (u, v) = widened(x, scales, [(u, said["u_layout"]), (v, said["v_layout"])], said)
    x = x.t() if said["x_layout"] == "col" else x
    h = product(x, u, said["u_layout"], None, "row")
    y = product(h, v, said["v_layout"], bias, said["out_layout"])
    return activate(y, said.get("activation", "identity"))


FACTORS, BASE = ((1, "u_layout"), (2, "v_layout")), ((4, "w_layout"),)
"""The fp8 weights of a scaled op: both factors, or the w beside them."""

LOWRANK = Op(
    schema="(Tensor x, Tensor u, Tensor v, Tensor? bias=None, Tensor? w=None, "
    "Tensor? inner_bias=None, Tensor? inner_gain=None, *, float scale=1.0, "
    "str activation='identity', str inner_activation='identity', float inner_eps=1e-06, "
    f"{UV}, str w_layout='row', int tp=1, str tp_axis='', str group='', {WHERE}) -> Tensor",
    reference=lowrank_matmul,
    fake=fake_lowrank_matmul,
    gradient=lowrank_gradient,
    lower=_lower,
    sharding=_placements,
)
OPS = (
    ended(LOWRANK),
    scaled_op(
        LOWRANK,
        f"(Tensor x, {SCALED}, Tensor u, Tensor v, Tensor? bias=None, Tensor? w=None, *, {OF_X}, "
        f"float scale=1.0, str activation='identity', {UV}, str w_layout='row', {WHERE}) -> Tensor",
        lowrank_matmul_scaled,
        lambda rest: BASE if len(rest) > 3 and rest[3] is not None else FACTORS,
    ),
)
