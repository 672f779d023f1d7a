"""Ops of fp8 weights: `nmm.<op>_scaled`, made of the op of plain weights.

Arguments are those of the plain op with `scales` behind x: one tensor for each weight, in their
order, [outputs] or [1]; a weight w of dtype float8_e4m3fn stands for w times its scale. It holds
numbers up to 240, the largest of NKI's float8_e4m3: up to there both formats have the same bits.

x is of 16 bits (or more, on the reference), or float8_e4m3fn with the number `x_scale`; then
`out_dtype` is the dtype of biases and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ModelError, ShapeError, SpecError
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.ops.definition import ROW, Op
from nmm_compiler.ops.gradients import Grads
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name
from nmm_compiler.ops.operands import check_same
from nmm_compiler.ops.sharding import Placements, cut

FP8_DTYPE = torch.float8_e4m3fn
SUFFIX = "_scaled"
SCALED = "Tensor[] scales"
OF_X = "float? x_scale=None, str out_dtype='bfloat16'"
"""Arguments of the schemas: behind x, and among the keywords."""

SAID: dict[str, Any] = {**ROW, "x_scale": None, "out_dtype": "bfloat16"}
"""The keywords of a call that gives none."""

OWN = ("x_scale", "out_dtype")
"""The keywords that the plain op does not have."""

Place = tuple[int, str]
"""Position of a weight, or a list of weights, in the plain op, and the name of its layout."""

Places = Callable[[Sequence[Any]], Sequence[Place]]
"""Returns the places of the fp8 weights among the arguments behind the scales."""


def result_dtype(x: Tensor, out_dtype: str) -> torch.dtype:
    """Return the dtype of results and biases: that of x, or of the name beside an fp8 x."""
    if x.dtype != FP8_DTYPE:
        return x.dtype
    made = getattr(torch, out_dtype, None)
    if not isinstance(made, torch.dtype):
        raise SpecError(f"out_dtype is {out_dtype!r}; pass bfloat16, float16 or float32")
    return made


def widened(
    x: Tensor, scales: Sequence[Tensor], weights: Sequence[tuple[Tensor, str]], keywords: Any
) -> tuple[Tensor, list[Tensor]]:
    """Return x and the weights, each with its layout, as the numbers they stand for.

    keywords: x_scale and out_dtype of the call. Raises ModelError where autograd asks for
    a gradient of fp8 numbers.
    """
    dtype = result_dtype(x, keywords["out_dtype"])
    check_formats(x, keywords.get("x_scale"), [w for w, _ in weights])
    refuse_gradients(x, [w for w, _ in weights], scales)
    if x.dtype == FP8_DTYPE:
        x = x.to(dtype) * keywords["x_scale"]
    return x, [
        w.to(dtype) * (scale.unsqueeze(1) if layout == "col" else scale).to(dtype)
        for (w, layout), scale in zip(weights, scales, strict=True)
    ]


def check_formats(x: Tensor, x_scale: float | None, weights: Sequence[Tensor]) -> None:
    """Raise SpecError unless the weights are fp8 and x has a scale if it is, too."""
    for w in weights:
        if w.dtype != FP8_DTYPE:
            raise SpecError(f"a scaled weight is {w.dtype}; pass {FP8_DTYPE}, or call the plain op")
    if (x.dtype == FP8_DTYPE) == (x_scale is None):
        raise SpecError(
            f"x is {x.dtype} and x_scale is {x_scale}; an x of {FP8_DTYPE} takes a scale, any "
            "other takes none"
        )


def refuse_gradients(x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """Raise ModelError if autograd watches fp8 numbers or their scales."""
    if not torch.is_grad_enabled():
        return
    for name, tensors in (("x", [x] * (x.dtype == FP8_DTYPE)), ("a weight", weights),
                          ("a scale", scales)):  # fmt: skip
        if any(t.requires_grad for t in tensors):
            raise ModelError(
                f"{name} of a product of fp8 weights requires a gradient, which rounded numbers do "
                "not have; train the factors first (nmm.recover), then quantize them, or call "
                "requires_grad_(False)"
            )


def scaled_op(
    plain: Op,
    schema: str,
    reference: Callable,
    weights: Sequence[Place] | Places,
) -> Op:
    """Return the op of fp8 weights that belongs to a plain op.

    weights: the places of those that are fp8, in the order of the kernel's operands.
    """

    def places_of(rest: Sequence[Any]) -> Sequence[Place]:
        return weights(rest) if callable(weights) else weights

    def gradient(args: tuple, keywords: dict, grads: tuple, need: tuple) -> Grads:
        x, scales, *rest = args
        places = places_of(rest)
        flat = [*_weights(rest, keywords, places)]
        asked = [x, *scales, *(w for w, _ in flat)]
        watched = [need[0] and x.dtype == FP8_DTYPE, *need[1]]
        watched += [n for i, _ in places for n in _several(need[i + 1])]
        if any(watched):
            named = [str(t.dtype) for t, n in zip(asked, watched, strict=True) if n]
            raise ModelError(
                f"{reference.__name__}: no gradient of fp8 operands or their scales "
                f"({', '.join(named)}); train the factors first, then quantize them"
            )
        with torch.no_grad():
            wide = widened(x, scales, flat, {**SAID, **keywords})[1]
        own, *others = plain.gradient(
            (x, *_put(rest, places, wide)), keywords, grads, (need[0], *need[2:])
        )
        return [own, [None] * len(scales), *others]

    def fake(x: Tensor, scales: Sequence[Tensor], *rest: Any, **keywords: Any) -> Any:
        dtype = result_dtype(x, keywords.get("out_dtype", "bfloat16"))
        places = places_of(rest)
        flat = [*_weights(rest, {**ROW, **keywords}, places)]
        check_formats(x, keywords.get("x_scale"), [w for w, _ in flat])
        check_same("numbers of weights and scales", len(flat), len(scales))
        for (w, layout), scale in zip(flat, scales, strict=True):
            outputs = w.shape[0 if layout == "col" else -1]
            if scale.dim() != 1 or scale.shape[0] not in (1, outputs):
                raise ShapeError(f"a scale has shape {tuple(scale.shape)}; pass [1] or [{outputs}]")
        wide = [w.new_empty(w.shape, dtype=dtype) for w, _ in flat]
        like = x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)
        return plain.fake(like, *_put(rest, places, wide), **keywords)

    def lower(
        rows: Tensor, args: Sequence[Any], keywords: dict, m: int, transpose: Transpose | None
    ) -> list[Launch]:
        x, scales, *rest = args
        (made,) = plain.lower(rows, (x, *rest), keywords, m, transpose)
        beside = getattr(made.spec, "base", False)
        return [_with_scales(made, x, scales, keywords, beside)]

    def sharding(x: Any, scales: Any, *rest: Any, **keywords: Any) -> Placements:
        assert plain.sharding is not None
        places = places_of(rest)
        flat = [*_weights(rest, {**ROW, **keywords}, places)]
        starts = [1 + sum(len(_several(one)) for one in rest[: i - 1]) for i, _ in places]
        at = [
            start + j
            for start, (i, _) in zip(starts, places, strict=True)
            for j in range(len(_several(rest[i - 1])))
        ]
        rows = []
        for outs, ins in plain.sharding(x, *rest, **keywords):
            of_scales = [
                _of_scale(ins[place], layout, scale)
                for place, (_, layout), scale in zip(at, flat, scales, strict=True)
            ]
            rows.append((outs, [ins[0], *of_scales, *ins[1:]]))
        return rows

    return dataclasses.replace(
        plain, schema=schema, reference=reference, fake=fake, gradient=gradient, lower=lower,
        sharding=sharding,
    )  # fmt: skip


def _of_scale(placement: Any, layout: str, scale: Any) -> Any:
    """Return where the scales of a weight are, given how the weight is cut."""
    from torch.distributed.tensor import Replicate, Shard

    outputs = placement == Shard(cut(layout, "out")) and scale.shape[0] > 1
    return Shard(0) if outputs else Replicate()


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _weights(
    rest: Sequence[Any], keywords: dict[str, Any], places: Sequence[Place]
) -> Iterator[tuple[Tensor, str]]:
    """Yield every weight among the arguments behind the scales, with its layout."""
    for place, layout in places:
        for w in _several(rest[place - 1]):
            yield w, keywords[layout]


def _put(rest: Sequence[Any], places: Sequence[Place], weights: Sequence[Tensor]) -> list[Any]:
    """Return the arguments behind x of the plain op, with other weights."""
    made, left = list(rest), iter(weights)
    for place, _ in places:
        old = rest[place - 1]
        new = [next(left) for _ in _several(old)]
        made[place - 1] = new if isinstance(old, (list, tuple)) else new[0]
    return made


def _with_scales(
    launch: Launch, x: Tensor, scales: Sequence[Tensor], keywords: dict[str, Any], beside: bool
) -> Launch:
    """Return the launch of a kernel of fp8 weights; beside: of one, beside plain factors."""
    fields: dict[str, Any] = {"dtype": FP8}
    operands = launch.operands
    if beside:
        operands = _plain_factors(launch, scales[0])
        fields |= {"u_layout": "row", "v_layout": "row"}
    if x.dtype == FP8_DTYPE:
        fields["out_dtype"] = keywords.get("out_dtype", "bfloat16")
    else:
        fields["x_dtype"] = dtype_name(x)
    several = any(scale.shape[0] > 1 for scale in scales)
    fields["scales"] = "channel" if several else "tensor"
    spec = dataclasses.replace(launch.spec, **fields)
    shapes = [t.shape for t in spec.inputs() if t.name.endswith("_scale")]
    numbers = [] if x.dtype != FP8_DTYPE else [keywords["x_scale"]]
    own = [x.new_full((1,), number, dtype=torch.float32) for number in numbers]
    own += [
        scale.float().expand(shape)
        for scale, shape in zip(scales, shapes[len(own) :], strict=False)
    ]
    return Launch(spec, (*operands, *own))


def _plain_factors(launch: Launch, scale: Tensor) -> tuple[Tensor, ...]:
    """Return the operands with u and v as they multiply, and v divided by the scales of w, which
    multiply the sums of both products."""
    named = dict(zip((t.name for t in launch.spec.inputs()), launch.operands, strict=True))
    for name in ("u", "v"):
        if getattr(launch.spec, f"{name}_layout") == "col":
            named[name] = named[name].t().contiguous()
    v = named["v"]
    named["v"] = (v.float() / scale.float()).to(v.dtype)
    return tuple(named.values())
