"""The ops of family `matmul`: `nmm.matmul`, and `nmm.matmul_as_stored` for backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.kernels.linear.specs import MatmulSpec
from nmm_compiler.ops.backward_products import Products
from nmm_compiler.ops.definition import LAYOUTS, WHERE, Op
from nmm_compiler.ops.gradients import Chain, Grads, activation_grad, back_to, rows_of
from nmm_compiler.ops.launches import (
    TOKEN_AXES,
    Launch,
    Transpose,
    dtype_name,
    features,
    weight,
)
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
from nmm_compiler.ops.products import activate, product
from nmm_compiler.ops.scaled import OF_X, SAID, SCALED, scaled_op, widened
from nmm_compiler.ops.sharding import Placements, placements


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
    x_layout: str = "row",
    out_layout: str = "row",
    w_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return activation(x w + bias)."""
    if x_layout == "col":
        x = x.t()
    y = product(x, w, w_layout, bias, out_layout)
    return y if activation == "identity" else activate(y, activation)


def matmul_as_stored(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    token_axis: str = "m",
    x_layout: str = "row",
    out_layout: str = "row",
    w_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return x w + bias, for a w that is no weight: no transposed copy of it is kept.

    token_axis: the size that counts tokens: "m" of x [m, k], or "k", which the product sums over.
    """
    return matmul(x, w, bias, x_layout=x_layout, out_layout=out_layout, w_layout=w_layout)


def _fake_as_stored(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, token_axis: str = "m", **keywords: Any
) -> Tensor:
    """Return an empty result of `matmul_as_stored`."""
    if token_axis not in TOKEN_AXES:
        raise UnknownNameError("token_axis", token_axis, TOKEN_AXES)
    return _fake(x, w, bias, **keywords)


def _fake(x: Tensor, w: Tensor, bias: Tensor | None = None, **keywords: Any) -> Tensor:
    """Return an empty result of `matmul`."""
    said = read_layouts(keywords)
    check_dtypes(x, w, bias)
    tokens, k = tokens_of(x, said["x_layout"])
    inputs, n = weight_shape("w", w, said["w_layout"])
    check_same("features of x and w", k, inputs)
    check_vector("bias", bias, n)
    return empty_result(x, tokens, n, said["out_layout"])


def _gradient(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, w, bias = (*args, None)[:3]
    need = (*need, False)[:3]
    chain = Chain(rows_of(x, kw["x_layout"]), (w,), (kw["w_layout"],), products=Products.of(kw))
    activation = kw.get("activation", "identity")
    grad = rows_of(grads[0], kw["out_layout"])
    if activation != "identity":
        grad = activation_grad(grad, chain.output(bias), activation)
    grad_x, (grad_w,) = chain.backward(grad, need[0], (need[1],))
    grad_bias = grad.sum(0) if need[2] else None
    return [back_to(x, grad_x, kw["x_layout"]), grad_w, grad_bias][: len(args)]


def _lower(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, w, bias = (*args, None)[:3]
    w, w_layout = weight(w, kw.get("w_layout", "row"), transpose)
    k, n = features(w, w_layout)
    spec = MatmulSpec(
        m=m,
        k=k,
        n=n,
        dtype=dtype_name(rows),
        x_layout=kw.get("x_layout", "row"),
        out_layout=kw.get("out_layout", "row"),
        w_layout=w_layout,
        bias=bias is not None,
        activation=kw.get("activation", "identity"),
    )
    return [Launch(spec, tuple(t for t in (rows, w, bias) if t is not None))]


def _lower_as_stored(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    launches = _lower(rows, args, kw, m, None)
    return [replace(one, token_axis=kw.get("token_axis", "m")) for one in launches]


def _placements(x: Any, w: Any, bias: Any = None, **kw: Any) -> Placements:
    return placements(x, (("dense", w, "w_layout"), ("bias", bias, "")), kw)


def matmul_scaled(
    x: Tensor,
    scales: Sequence[Tensor],
    w: Tensor,
    bias: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return activation(x w + bias) for fp8 weights."""
    said = SAID | keywords
    x, (w,) = widened(x, scales, [(w, said["w_layout"])], said)
    plain = ("activation", "x_layout", "out_layout", "w_layout")
    return matmul(x, w, bias, **{name: said[name] for name in plain if name in said})


MATMUL = Op(
    schema="(Tensor x, Tensor w, Tensor? bias=None, *, str activation='identity', "
    f"{LAYOUTS}, str w_layout='row', {WHERE}) -> Tensor",
    reference=matmul,
    fake=_fake,
    gradient=_gradient,
    lower=_lower,
    sharding=_placements,
)


def _placements_as_stored(x: Any, w: Any, bias: Any = None, **kw: Any) -> Placements:
    """Return those of `matmul`, and x cut along m where x and the result differ in layout."""
    from torch.distributed.tensor import Replicate, Shard

    rows = _placements(x, w, bias, **kw)
    x_layout, out_layout = kw.get("x_layout", "row"), kw.get("out_layout", "row")
    if x.ndim == 2 and x_layout != out_layout:
        axis = {"row": 0, "col": 1}
        whole = None if bias is None else Replicate()
        operands = [Shard(axis[x_layout]), Replicate(), whole]
        rows.append(([Shard(axis[out_layout])], operands))
    return rows


OPS = (
    ended(MATMUL),
    scaled_op(
        MATMUL,
        f"(Tensor x, {SCALED}, Tensor w, Tensor? bias=None, *, {OF_X}, "
        f"str activation='identity', {LAYOUTS}, str w_layout='row', {WHERE}) -> Tensor",
        matmul_scaled,
        ((1, "w_layout"),),
    ),
    Op(
        schema="(Tensor x, Tensor w, Tensor? bias=None, *, str token_axis='m', "
        f"{LAYOUTS}, str w_layout='row', {WHERE}) -> Tensor",
        reference=matmul_as_stored,
        fake=_fake_as_stored,
        gradient=_gradient,
        lower=_lower_as_stored,
        sharding=_placements_as_stored,
    ),
)
