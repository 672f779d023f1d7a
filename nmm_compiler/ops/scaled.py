"""Ops of fp8 weights: `nmm.<op>_scaled`, made of the op of plain weights.

Arguments are those of the plain op with `scales` behind x: one tensor for each weight, in their
order, [outputs] or [1]; a weight w of dtype float8_e4m3fn stands for w times its scale. It holds
numbers up to 240, the largest of NKI's float8_e4m3: up to there both formats have the same bits.

x is of 16 bits (or more, on the reference), or float8_e4m3fn with the number `x_scale`; then
`out_dtype` is the dtype of biases and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ModelError, ShapeError, SpecError
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.ops.definition import NORM, Op, Operand, Placements
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, inputs_of
from nmm_compiler.ops.linear import LinearOp
from nmm_compiler.ops.operands import check_same
from nmm_compiler.ops.sharding import placements

FP8_DTYPE = torch.float8_e4m3fn
SUFFIX = "_scaled"
OF_X = {"x_scale": None, "out_dtype": "bfloat16"}
"""The keywords that the plain op does not have."""
_PLAIN_ONLY = {*NORM, "inner_activation", "inner_eps", "tp", "tp_axis", "group"}


def result_dtype(x: Tensor, out_dtype: str) -> torch.dtype:
    """Return the dtype of results and biases: that of x, or of the name beside an fp8 x."""
    if x.dtype != FP8_DTYPE:
        return x.dtype
    made = getattr(torch, out_dtype, None)
    if not isinstance(made, torch.dtype):
        raise SpecError(f"out_dtype is {out_dtype!r}; pass bfloat16, float16 or float32")
    return made


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledOp(Op):
    """The op of fp8 weights that belongs to a plain op; `corrected_matmul` has a base, too."""

    plain: LinearOp

    def _places(self, given: Mapping[str, Any]) -> list[tuple[str, int, Tensor, str]]:
        """Return (argument, place in it, tensor, layout) of the weights, in order."""
        return [
            (one.name, i, tensor, given[one.layout])
            for one in self.operands if one.layout
            for i, (_, tensor, _) in enumerate(one.parts(given[one.name]))
        ]  # fmt: skip

    def _plain(
        self, given: Mapping[str, Any], weights: Sequence[Tensor], x: Tensor
    ) -> dict[str, Any]:
        """Return the arguments of the plain op, with other weights and another x."""
        made: dict[str, Any] = {one.name: given.get(one.name) for one in self.plain.operands} | {
            "x": x
        }
        for (name, i, _, _), w in zip(self._places(given), weights, strict=True):
            if isinstance(given[name], (list, tuple)):
                made[name] = [*made[name][:i], w, *made[name][i + 1 :]]
            else:
                made[name] = w
        keywords = {name: given[name] for name in self.keywords if name not in OF_X}
        return made | keywords

    def _widened(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain op's arguments: x and the weights as the numbers they stand for.

        Raises ModelError where autograd asks for a gradient of fp8 numbers.
        """
        x, scales, places = given["x"], given["scales"], self._places(given)
        dtype = result_dtype(x, given["out_dtype"])
        weights = [w for _, _, w, _ in places]
        check_formats(x, given["x_scale"], weights)
        refuse_gradients(x, weights, scales)
        if x.dtype == FP8_DTYPE:
            x = x.to(dtype) * given["x_scale"]
        wide = [
            w.to(dtype) * (scale.unsqueeze(1) if layout == "col" else scale).to(dtype)
            for (_, _, w, layout), scale in zip(places, scales, strict=True)
        ]
        return self._plain(given, wide, x)

    def reference(self, *args: Any, **kw: Any) -> Any:
        """Return what the op computes, in plain PyTorch."""
        return self.plain.reference(**self._widened(self.bound(args, kw)))

    def by_kernels(self, args: tuple, kw: dict[str, Any]) -> Any:
        """Return the results again, differentiable by calls of this package's ops."""
        return self.plain.by_kernels((), self._widened(self.bound(args, kw)))

    def fake(self, *args: Any, **kw: Any) -> Any:
        """Return empty results; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        x, scales, places = given["x"], given["scales"], self._places(given)
        dtype = result_dtype(x, given["out_dtype"])
        check_formats(x, given["x_scale"], [w for _, _, w, _ in places])
        check_same("numbers of weights and scales", len(places), len(scales))
        for (_, _, w, layout), scale in zip(places, scales, strict=True):
            outputs = w.shape[0 if layout == "col" else -1]
            if scale.dim() != 1 or scale.shape[0] not in (1, outputs):
                raise ShapeError(f"a scale has shape {tuple(scale.shape)}; pass [1] or [{outputs}]")
        wide = [w.new_empty(w.shape, dtype=dtype) for _, _, w, _ in places]
        like = x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)
        return self.plain.fake(**self._plain(given, wide, like))

    def lower(
        self, rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int,
        transpose: Transpose | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launch of a call whose x, as a matrix of m tokens, is `rows`."""
        given = self.plain.bound((), self.bound(args, kw))
        x, scales = given["x"], [scale.float() for scale in given["scales"]]
        fields: dict[str, Any] = {
            "dtype": FP8, "scales": "channel" if any(s.shape[0] > 1 for s in scales) else "tensor",
        }  # fmt: skip
        numbers = []
        if x.dtype == FP8_DTYPE:
            fields["out_dtype"] = given["out_dtype"]
            numbers = [x.new_full((1,), given["x_scale"], dtype=torch.float32)]
        else:
            fields["x_dtype"] = dtype_name(x)
        launch = self.plain.launch(rows, given, m, transpose, fields)
        shapes = [t.shape for t in inputs_of(launch.spec) if t.name.endswith("_scale")]
        own = [
            *numbers,
            *(s.expand(of) for s, of in zip(scales, shapes[len(numbers) :], strict=False)),
        ]
        return [Launch(launch.spec, (*launch.operands, *own))]

    def sharding(self, *args: Any, **kw: Any) -> Placements:
        """Return the placements that DTensor may use: scales lie as the outputs of their weight."""
        given = self.bound(args, kw)
        parts = [(role, tensor, one.layout) for one, _, tensor, role in self.parts(given)]
        weights = [role for role, _, layout in parts if layout]
        for place, (role, scale) in enumerate(zip(weights, given["scales"], strict=True), 1):
            if scale.shape[0] > 1:
                parts[place] = (f"{role}_scale", scale, "")
        return placements(given, parts)


def scaled_ops(ops: Sequence[LinearOp]) -> Iterator[ScaledOp]:
    """Yield the ops of fp8 weights of those ops that have a norm, which they lack themselves."""
    left_out = {"inner_bias", "inner_gain", "norm_gain", "norm_bias", "residual"}
    for plain in ops:
        if plain.own:
            x, *others = (one for one in plain.operands if one.name not in left_out)
            others = [one for one in others if one.kind != "Tensor?" or not one.layout]
            layouts = {one.layout for one in plain.operands if one.layout}
            unused = layouts - {one.layout for one in others} | _PLAIN_ONLY
            own = {name: v for name, v in plain.keywords.items() if name not in unused}
            yield ScaledOp(
                name=plain.name + SUFFIX, plain=plain, keywords={**OF_X, **own},
                operands=(x, Operand("scales", "Tensor[]"), *others),
            )  # fmt: skip
