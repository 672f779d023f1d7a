"""The ops of family `lowrank_shared`: several products of one x, with a u each or with one u."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.kernels.linear.specs import LowRankSharedSpec
from nmm_compiler.ops.backward_products import Products
from nmm_compiler.ops.definition import UV, WHERE, Op
from nmm_compiler.ops.gradients import Chain, Grads, add, back_to, rows_of
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, features, weight
from nmm_compiler.ops.lowrank import (
    fake_lowrank_matmul,
    lowrank_gradient,
    lowrank_matmul_scaled,
)
from nmm_compiler.ops.norm_and_residual import ended
from nmm_compiler.ops.operands import check_same
from nmm_compiler.ops.products import activate, layouts_of, linear, product
from nmm_compiler.ops.scaled import OF_X, SAID, SCALED, scaled_op
from nmm_compiler.ops.sharding import Operand, Placements, placements


def lowrank_matmul_shared_x(
    x: Tensor,
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    activations: Sequence[str] | None = None,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    out_layouts: Sequence[str] | None = None,
    target: str = "trn2",
    executor: str = "reference",
) -> list[Tensor]:
    """Return activation_i((x u_i) v_i + bias_i) for every i: factorized layers with one input."""
    if x_layout == "col":
        x = x.t()
    outs = []
    layouts = layouts_of(out_layout, out_layouts, len(us))
    for index, (u, v, bias) in enumerate(zip(us, vs, biases, strict=True)):
        h = linear(x, u) if u_layout == "col" else torch.matmul(x, u)
        y = product(h, v, v_layout, bias, layouts[index])
        outs.append(y if activations is None else activate(y, activations[index]))
    return outs


def lowrank_matmul_shared_u(
    x: Tensor,
    u: Tensor,
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    out_layouts: Sequence[str] | None = None,
    target: str = "trn2",
    executor: str = "reference",
) -> list[Tensor]:
    """Return (x u) v_i + bias_i for every i: layers that share a basis."""
    if x_layout == "col":
        x = x.t()
    h = linear(x, u) if u_layout == "col" else torch.matmul(x, u)
    layouts = layouts_of(out_layout, out_layouts, len(vs))
    return [
        product(h, v, v_layout, bias, layout)
        for v, bias, layout in zip(vs, biases, layouts, strict=True)
    ]


def _fake_shared_x(
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
    check_same("numbers of us and vs", len(us), len(vs))
    check_same("numbers of vs and biases", len(vs), len(biases))
    if activations is not None:
        check_same("numbers of vs and activations", len(vs), len(activations))
    each = zip(us, vs, biases, _each_layout(layouts, out_layouts, len(vs)), strict=True)
    return [fake_lowrank_matmul(x, u, v, b, **one) for u, v, b, one in each]


def _fake_shared_u(
    x: Tensor,
    u: Tensor,
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    out_layouts: Sequence[str] | None = None,
    **layouts: Any,
) -> list[Tensor]:
    """Return the empty results of `lowrank_matmul_shared_u`."""
    check_same("numbers of vs and biases", len(vs), len(biases))
    each = zip(vs, biases, _each_layout(layouts, out_layouts, len(vs)), strict=True)
    return [fake_lowrank_matmul(x, u, v, b, **one) for v, b, one in each]


def _each_layout(
    layouts: dict[str, Any], out_layouts: Sequence[str] | None, count: int
) -> list[dict[str, Any]]:
    """Return the layouts of each of `count` results."""
    if out_layouts is None:
        return [layouts] * count
    check_same("numbers of vs and out_layouts", count, len(out_layouts))
    return [{**layouts, "out_layout": layout} for layout in out_layouts]


def _gradient_shared_x(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, us, vs, biases = args
    activations = kw.get("activations") or ["identity"] * len(us)
    layouts = layouts_of(kw["out_layout"], kw.get("out_layouts"), len(us))
    total: Tensor | None = None
    grad_us, grad_vs, grad_biases = [], [], []
    for i, grad in enumerate(grads):
        one = {**kw, "activation": activations[i], "out_layout": layouts[i]}
        parts = (x, us[i], vs[i], biases[i])
        needs = (need[0], need[1][i], need[2][i], need[3][i])
        gx, gu, gv, gb = (
            [None] * 4 if grad is None else lowrank_gradient(parts, one, (grad,), needs)
        )
        total = add(total, gx)
        grad_us.append(gu)
        grad_vs.append(gv)
        grad_biases.append(gb)
    return [total, grad_us, grad_vs, grad_biases]


def _gradient_shared_u(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, u, vs, _biases = args
    products = Products.of(kw)
    rows = rows_of(x, kw["x_layout"])
    middle = products.times(rows, u, kw["u_layout"], out="col") if any(need[2]) else None
    layouts = layouts_of(kw["out_layout"], kw.get("out_layouts"), len(vs))
    total: Tensor | None = None
    grad_vs: Grads = [None] * len(vs)
    grad_biases: Grads = [None] * len(vs)
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        grad = rows_of(grad, layouts[i])
        if need[0] or need[1]:
            more = products.times_transposed(grad, vs[i], kw["v_layout"], out="col")
            total = add(total, more)
        if need[2][i]:
            assert middle is not None
            grad_vs[i] = products.summed_over_tokens(middle, grad, kw["v_layout"])
        if need[3][i]:
            grad_biases[i] = grad.sum(0)
    grad_x, grad_u = None, None
    if total is not None:
        down = Chain(rows, (u,), (kw["u_layout"],), products=products)
        grad_x, (grad_u,) = down.backward(total, need[0], (need[1],))
    return [back_to(x, grad_x, kw["x_layout"]), grad_u, grad_vs, grad_biases]


def _lower_shared_x(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, us, vs, biases = args
    return [_launch(rows, us, [[v] for v in vs], biases, kw, m, transpose)]


def _lower_shared_u(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, u, vs, biases = args
    return [_launch(rows, [u], [vs], biases, kw, m, transpose)]


def _launch(
    rows: Tensor,
    us: Sequence[Tensor],
    vs_of: Sequence[Sequence[Tensor]],
    biases: Sequence[Tensor | None],
    kw: dict[str, Any],
    m: int,
    transpose: Transpose | None,
) -> Launch:
    """Return the one launch that gives every (x u) v, for each u and each v of it."""
    u_layout, v_layout = kw.get("u_layout", "row"), kw.get("v_layout", "row")
    laid_us = [weight(u, u_layout, transpose) for u in us]
    laid_vs = [[weight(v, v_layout, transpose) for v in vs] for vs in vs_of]
    flat = [v for vs in laid_vs for v in vs]
    spec = LowRankSharedSpec(
        m=m,
        k=features(*laid_us[0])[0],
        pairs=tuple(
            (features(*u)[1], tuple(features(*v)[1] for v in vs))
            for u, vs in zip(laid_us, laid_vs, strict=True)
        ),
        dtype=dtype_name(rows),
        x_layout=kw.get("x_layout", "row"),
        out_layout=tuple(kw.get("out_layouts") or [kw.get("out_layout", "row")] * len(flat)),
        u_layout=laid_us[0][1],
        v_layout=flat[0][1],
        bias=tuple(bias is not None for bias in biases),
        activation=tuple(kw.get("activations") or ["identity"] * len(flat)),
    )
    given = [bias for bias in biases if bias is not None]
    return Launch(spec, (rows, *(u for u, _ in laid_us), *(v for v, _ in flat), *given))


def _placements_shared_x(x: Any, us: Any, vs: Any, biases: Any, **kw: Any) -> Placements:
    firsts = [("first", u, "u_layout") for u in us]
    return placements(x, [*firsts, *_lasts(vs, biases)], kw, results=len(vs))


def _placements_shared_u(x: Any, u: Any, vs: Any, biases: Any, **kw: Any) -> Placements:
    return placements(x, [("first", u, "u_layout"), *_lasts(vs, biases)], kw, results=len(vs))


def _lasts(vs: Any, biases: Any) -> list[Operand]:
    return [*(("last", v, "v_layout") for v in vs), *(("bias", b, "") for b in biases)]


def lowrank_matmul_shared_x_scaled(
    x: Tensor,
    scales: Sequence[Tensor],
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    **keywords: Any,
) -> list[Tensor]:
    """Return activation_i((x u_i) v_i + bias_i) for every i, for fp8 factors."""
    outs = []
    said = SAID | keywords
    layouts = layouts_of(said["out_layout"], said.get("out_layouts"), len(us))
    activations = said.get("activations")
    for i, (u, v, bias) in enumerate(zip(us, vs, biases, strict=True)):
        one = {**said, "out_layout": layouts[i]}
        one["activation"] = "identity" if activations is None else activations[i]
        own = (scales[i], scales[len(us) + i])
        outs.append(lowrank_matmul_scaled(x, own, u, v, bias, **one))
    return outs


def lowrank_matmul_shared_u_scaled(
    x: Tensor,
    scales: Sequence[Tensor],
    u: Tensor,
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    **keywords: Any,
) -> list[Tensor]:
    """Return (x u) v_i + bias_i for every i, for fp8 factors."""
    said = SAID | keywords
    layouts = layouts_of(said["out_layout"], said.get("out_layouts"), len(vs))
    each = zip(vs, biases, scales[1:], layouts, strict=True)
    return [
        lowrank_matmul_scaled(x, (scales[0], own), u, v, bias, **said | {"out_layout": layout})
        for v, bias, own, layout in each
    ]


SHARED_X, SHARED_U = (
    Op(
        schema="(Tensor x, Tensor[] us, Tensor[] vs, Tensor?[] biases, *, "
        f"str[]? activations=None, {UV}, str[]? out_layouts=None, {WHERE}) -> Tensor[]",
        reference=lowrank_matmul_shared_x,
        fake=_fake_shared_x,
        gradient=_gradient_shared_x,
        lower=_lower_shared_x,
        sharding=_placements_shared_x,
    ),
    Op(
        schema="(Tensor x, Tensor u, Tensor[] vs, Tensor?[] biases, *, "
        f"{UV}, str[]? out_layouts=None, {WHERE}) -> Tensor[]",
        reference=lowrank_matmul_shared_u,
        fake=_fake_shared_u,
        gradient=_gradient_shared_u,
        lower=_lower_shared_u,
        sharding=_placements_shared_u,
    ),
)
_SCALED_END = f"{UV}, str[]? out_layouts=None, {WHERE}) -> Tensor[]"
OPS = (
    ended(SHARED_X, residual=False),
    ended(SHARED_U, residual=False),
    scaled_op(
        SHARED_X,
        f"(Tensor x, {SCALED}, Tensor[] us, Tensor[] vs, Tensor?[] biases, *, {OF_X}, "
        f"str[]? activations=None, {_SCALED_END}",
        lowrank_matmul_shared_x_scaled,
        ((1, "u_layout"), (2, "v_layout")),
    ),
    scaled_op(
        SHARED_U,
        f"(Tensor x, {SCALED}, Tensor u, Tensor[] vs, Tensor?[] biases, *, {OF_X}, {_SCALED_END}",
        lowrank_matmul_shared_u_scaled,
        ((1, "u_layout"), (2, "v_layout")),
    ),
)
