"""The results of a layer in float64, each with the error that a right kernel may have.

Operands are float64, by their names, as they multiply. Every value is an `Estimate`: the exact
result, and the bound of its error, or with `typical` the error if roundings are independent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nmm_compiler.kernels.base import Array
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    Estimate,
    activated,
    combine,
    gamma,
    inverse_roots,
    plus_bias,
    rounded,
    rounding_error,
    scaled,
    times_weight,
)
from nmm_compiler.kernels.linear.layer import Layer, Linear, LowRank, Weight
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.kernels.packed_formats import rounding_of_x

# fp32 roundings of a scaled value: products of up to four scales, the scaling.
_SCALE_ROUNDINGS = 7


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Computes the results of a layer; spec: of the whole product, for the sums over its ranks."""

    spec: Any
    layer: Layer
    operands: dict[str, Array]
    typical: bool

    def results(self) -> Sequence[Estimate]:
        """Return each result before it is stored, [m, n], the residual included."""
        layer = self.layer
        x: Estimate = self.operands["x"], 0.0
        if layer.norm != "none":
            made = normed(layer, x[0], self.operands, self.typical)
            x = rounded(made, layer.dtype, self.typical)
        middle = {pair.u.name: self._pair(x, pair, True) for pair in layer.factors}
        made_of = [self._linear(x, middle, linear, True) for linear in layer.linears]
        if layer.combine:
            made_of = [self._product(*made_of)]
        if layer.down.n:
            h = rounded(made_of[0], layer.kept_dtype, self.typical)
            middle = {pair.u.name: self._pair(h, pair, False) for pair in layer.down_pairs}
            made_of = [self._linear(h, middle, layer.down, False)]
        if not layer.residual:
            return made_of
        return [
            plus_bias(
                rounded(one, layer.result_dtype, self.typical),
                self.operands["residual"],
                self.typical,
            )
            for one in made_of
        ]

    def _pair(self, left: Estimate, pair: LowRank, of_x: bool) -> tuple[Estimate, Any]:
        """Return p as it is kept, and one over its norm where the norm follows it."""
        p, error = self._times(left, pair.u, of_x)
        error = combine(error, self._crossing(left, pair), self.typical)
        p, error = pair.scale * p, abs(pair.scale) * error
        if pair.scale != 1.0:
            error = combine(error, 2 * FP32_ROUNDOFF * (np.abs(p) + error), self.typical)
        if pair.groups.count:
            p, error = scaled((p, error), (self._of_token(pair), 0.0), self.typical)
        shaped = self._biased((p, error), pair.bias)
        roots = None
        if pair.gain:  # the gain is multiplied in before p is rounded, the root after p v
            roots = inverse_roots(shaped, pair.eps, self.typical)
            shaped = scaled(shaped, (self.operands[pair.gain], 0.0), self.typical)
        kept = activated(shaped, pair.activation)
        return rounded(kept, self.layer.kept_dtype, self.typical), roots

    def _of_token(self, pair: LowRank) -> Array:
        """Return what multiplies p: the gain of a row if its group is the token's, else 0."""
        gains, index = self.operands["row_scale"], self.operands["index"]
        chosen = np.arange(len(gains)) // pair.groups.rank == index[:, None]
        return np.where(chosen, gains, 0.0)

    def _linear(
        self, left: Estimate, middle: dict[str, Any], linear: Linear, of_x: bool
    ) -> Estimate:
        pair, dense = linear.low_rank, linear.weight
        terms = (pair.v.k if pair.r else 0) + dense.k
        total: Estimate = 0.0, 0.0  # type: ignore[assignment]
        roots = None
        if pair.r:
            p, roots = middle[pair.u.name]
            terms = len(self.operands[pair.v.name]) + (len(left[0].T) if dense.k else 0)
            total = self._times(p, pair.v, False, terms)
        if dense.k:
            if dense.mx:
                off = rounding_of_x(np.abs(left[0]) + left[1])
                left = left[0], combine(left[1], off, self.typical)
            more = times_weight(
                left, self.operands[dense.name], self.typical, terms if pair.r else None
            )
            total = total[0] + more[0], combine(total[1], more[1], self.typical)
            total = self._unscaled(total, dense, of_x)
        if roots is not None:
            total = scaled(total, roots, self.typical)
        return activated(self._biased(total, linear.bias), linear.activation)

    def _product(self, gate: Estimate, up: Estimate) -> Estimate:
        """Return the estimate of a product of two results."""
        error = combine(np.abs(gate[0]) * up[1], np.abs(up[0]) * gate[1], self.typical)
        error = combine(error, gate[1] * up[1], self.typical)
        value = gate[0] * up[0]
        return value, combine(error, 2 * FP32_ROUNDOFF * (np.abs(value) + error), self.typical)

    def _times(
        self, left: Estimate, weight: Weight, of_x: bool, terms: int | None = None
    ) -> Estimate:
        """Return the estimate of a product, and with fp8 operands of its scales."""
        made = times_weight(left, self.operands[weight.name], self.typical, terms)
        return self._unscaled(made, weight, of_x)

    def _unscaled(self, made: Estimate, weight: Weight, of_x: bool) -> Estimate:
        """Return sums times the scales of the fp8 numbers that they are of."""
        if self.layer.format_of(weight) != FP8:
            return made
        if weight.format:  # a branch, of which one scale a rank multiplies x u
            pairs = {pair.u.name: (place, pair) for place, pair in enumerate(self.layer.pairs)}
            if weight.name not in pairs:
                return made
            place, pair = pairs[weight.name]
            scales = [self.operands["branch_scale"][place, : pair.r]]
        else:
            scales = [self.operands[weight.scale]]
        scales += [self.operands["x_scale"]] if of_x and self.layer.fp8_x else []
        factor = np.prod(np.broadcast_arrays(*scales), axis=0)
        value, error = made[0] * factor, made[1] * np.abs(factor)
        own = _SCALE_ROUNDINGS * FP32_ROUNDOFF * (np.abs(value) + error)
        return value, combine(error, own, self.typical)

    def _biased(self, left: Estimate, name: str) -> Estimate:
        return plus_bias(left, self.operands[name], self.typical) if name else left

    def _crossing(self, left: Estimate, pair: LowRank) -> Array | float:
        """Return the error of rounding what each rank adds to p, in the format that is kept."""
        if self.spec.world_size == 1:
            return 0.0
        value = left[0] * self.operands.get("x_scale", 1.0)
        right = self.operands[pair.u.name] * self.operands.get(pair.u.scale, 1.0)
        ranks, made = self.spec.world_size, np.zeros(1)
        parts = list(zip(np.split(value, ranks, 1), np.split(right, ranks, 0), strict=True))
        if self.layer.fp8 or pair.shaped or pair.scale != 1.0:
            parts.append((value, right))  # a function follows the sum, which is rounded for it
        for part, other in parts:
            rounding = rounding_error(np.abs(part @ other), self.layer.kept_dtype)
            made = combine(made, rounding, self.typical)
        return abs(pair.scale) * made


def normed(spec: Any, x: Array, operands: dict[str, Array], typical: bool) -> Estimate:
    """Return the estimate of the norm of x [m, k] over its features, in fp32.

    The mean of a layer norm is a sum of k terms, times 1 / k.
    """
    value: Estimate = x, 0.0
    if spec.norm == "layer":
        k = x.shape[1]
        size = np.abs(x).mean(1, keepdims=True)
        off = (np.sqrt(k + 2) * FP32_ROUNDOFF if typical else gamma(k + 2)) * size
        centered = x - x.mean(1, keepdims=True)
        own = FP32_ROUNDOFF * (np.abs(centered) + off)
        value = centered, combine(np.broadcast_to(off, x.shape), own, typical)
    value = scaled(value, inverse_roots(value, spec.norm_eps, typical), typical)
    if spec.norm_gain:
        gain = operands["norm_gain"] + spec.norm_offset
        value = scaled(value, (gain, FP32_ROUNDOFF * np.abs(gain)), typical)
    return plus_bias(value, operands["norm_bias"], typical) if spec.norm_bias else value
