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
    combine,
    rounding_error,
    sum_error,
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
        x = Estimate(self.operands["x"], 0.0, self.typical)
        if layer.norm != "none":
            x = normed(layer, x, self.operands).rounded(layer.dtype)
        middle = {pair.u.name: self._pair(x, pair) for pair in layer.factors}
        made = [self._linear(x, middle, linear) for linear in layer.linears]
        if layer.combine:
            made = [self.gated(*made)]
        if layer.down.n:
            h = made[0].rounded(layer.kept_dtype)
            middle = {pair.u.name: self._pair(h, pair) for pair in layer.down_pairs}
            made = [self._linear(h, middle, layer.down)]
        if not layer.residual:
            return made
        residual = self.operands["residual"]
        return [one.rounded(layer.result_dtype).plus(residual) for one in made]

    def gated(self, gate: Estimate, up: Estimate) -> Estimate:
        """Return the product of two results."""
        return gate.scaled(up.value, up.error)

    def _pair(self, left: Estimate, pair: LowRank) -> tuple[Estimate, Any]:
        """Return p as it is kept, and one over its norm where the norm follows it."""
        p = self._times(left, pair.u).off_by(self._crossing(left, pair))
        if pair.scale != 1.0:
            p = p.in_fp32(pair.scale * p.value, abs(pair.scale) * p.error, 2)
        if pair.groups.count:
            p = p.scaled(self._of_token(pair))
        p, roots = self._biased(p, pair.bias), None
        if pair.gain:  # the gain is multiplied in before p is rounded, the root after p v
            roots = p.inverse_roots(pair.eps)
            p = p.scaled(self.operands[pair.gain])
        return p.activated(pair.activation).rounded(self.layer.kept_dtype), roots

    def _of_token(self, pair: LowRank) -> Array:
        """Return what multiplies p: the gain of a row if its group is the token's, else 0."""
        gains, index = self.operands["row_scale"], self.operands["index"]
        chosen = np.arange(len(gains)) // pair.groups.rank == index[:, None]
        return np.where(chosen, gains, 0.0)

    def _linear(self, left: Estimate, middle: dict[str, Any], linear: Linear) -> Estimate:
        pair, dense, roots = linear.low_rank, linear.weight, None
        both = pair.r and dense.k
        total = Estimate(np.zeros(1), 0.0, self.typical)
        terms = len(self.operands[pair.v.name]) + len(left.value.T) if both else None
        if pair.r:
            p, roots = middle[pair.u.name]
            total = self._times(p, pair.v, terms)
        if dense.k:
            if dense.mx:
                left = left.off_by(rounding_of_x(left.most))
            total = total.with_sum(left.times(self.operands[dense.name], terms))
            total = self._unscaled(total, dense)
        if roots is not None:
            total = total.scaled(roots.value, roots.error)
        return self._biased(total, linear.bias).activated(linear.activation)

    def _times(self, left: Estimate, weight: Weight, terms: int | None = None) -> Estimate:
        """Return the estimate of a product, and with fp8 operands of its scales."""
        return self._unscaled(left.times(self.operands[weight.name], terms), weight)

    def _unscaled(self, made: Estimate, weight: Weight) -> Estimate:
        """Return sums times the scales of the fp8 numbers that they are of."""
        if self.layer.format_of(weight) != FP8:
            return made
        scales = [] if weight.format else [self.operands[weight.scale]]
        for pair in self.layer.pairs:
            if weight.format and pair.u.name == weight.name:  # of a branch, one a rank
                scales.append(self.operands["branch_scale"][pair.place, : pair.r])
        if not scales:  # those of v are in the scales of x u
            return made
        factor = np.prod(np.broadcast_arrays(*scales), axis=0)
        return made.in_fp32(made.value * factor, made.error * np.abs(factor), _SCALE_ROUNDINGS)

    def _biased(self, left: Estimate, name: str) -> Estimate:
        return left.plus(self.operands[name]) if name else left

    def _crossing(self, left: Estimate, pair: LowRank) -> Array | float:
        """Return the error of rounding what each rank adds to p, in the format that is kept."""
        if self.spec.tp == 1:
            return 0.0
        right = self.operands[pair.u.name] * self.operands.get(pair.u.scale, 1.0)
        ranks, made = self.spec.tp, np.zeros(1)
        parts = list(zip(np.split(left.value, ranks, 1), np.split(right, ranks, 0), strict=True))
        if self.layer.fp8 or pair.shaped or pair.scale != 1.0:
            parts.append((left.value, right))  # a function follows the sum, which is rounded for it
        for part, other in parts:
            rounding = rounding_error(np.abs(part @ other), self.layer.kept_dtype)
            made = combine(made, rounding, self.typical)
        return abs(pair.scale) * made


def normed(spec: Any, x: Estimate, operands: dict[str, Array]) -> Estimate:
    """Return the estimate of the norm of an exact x [m, k] over its features, in fp32.

    The mean of a layer norm is a sum of k terms, times 1 / k.
    """
    if spec.norm == "layer":
        size = np.abs(x.value).mean(1, keepdims=True)
        off = sum_error(x.value.shape[1] + 2, x.typical) * size
        centered = x.value - x.value.mean(1, keepdims=True)
        x = x.in_fp32(centered, np.broadcast_to(off, centered.shape))
    roots = x.inverse_roots(spec.norm_eps)
    x = x.scaled(roots.value, roots.error)
    if spec.norm_gain:
        gain = operands["norm_gain"] + spec.norm_offset
        x = x.scaled(gain, FP32_ROUNDOFF * np.abs(gain))
    return x.plus(operands["norm_bias"]) if spec.norm_bias else x
