"""Family `lowrank`: y = activation(x w + scale p v + bias), p = inner_activation(x u + inner_bias).

The spec, its float64 reference and its error bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels import over_ranks
from nmm_compiler.kernels.base import OUTPUTS, WEIGHTS, Array, Products
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    Estimate,
    activated,
    combine,
    inverse_roots,
    scaled,
)
from nmm_compiler.kernels.matmul.spec import products_of
from nmm_compiler.kernels.product_spec import ProductSpec
from nmm_compiler.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSpec(ProductSpec):
    """y[m, n] = activation(x w + scale p v + bias), p = inner_activation(x u + inner_bias).

    x is [m, k], u [k, r], v [r, n]; inner_activation and inner_bias [r] are those of a bottleneck
    adapter, and x w is optional. inner_norm, for latent attention: p is the RMS norm of x u over
    the rank, with inner_eps under the root, times inner_gain [r].

    A "col" layout means that the operand is passed, or the result comes back, transposed: x as
    [k, m], u as [r, k], v as [n, r], w as [n, k], y as [n, m]. base adds the dense product x w.

    intermediate: the format of x u, rounded once: "operand", "float32", or with fp8 operands
    "float8_e4m3" by p_scale. With dtype float8_e4m3 the sums are
    p = scale x_scale u_scale (x u) and v_scale (p v): scales "tensor" gives u_scale, v_scale
    [1], "channel" [r] and [n]; y and bias are bfloat16 or `out_dtype`.

    tp: ranks that compute the product together, each from its shard, whose sizes these are.
    tp_axis: "columns" (v cut by outputs, nothing summed), "rows" (x and u cut by inputs, x u summed
    before v) or "rank" (u and v cut by the rank, y summed). `whole` and `sharded` go between the
    product and its shards; reference and error bounds take the operands of the whole.
    """

    r: int
    n: int
    dtype: str = "bfloat16"
    x_layout: str = "row"
    out_layout: str = "row"
    u_layout: str = "row"
    v_layout: str = "row"
    bias: bool = False
    activation: str = "identity"
    base: bool = False
    scale: float = 1.0
    w_layout: str = "row"
    intermediate: str = "operand"
    scales: str | None = None
    out_dtype: str | None = None
    inner_activation: str = "identity"
    inner_bias: bool = False
    inner_norm: bool = False
    inner_eps: float = 1e-6
    tp: int = 1
    tp_axis: str = ""

    family: ClassVar[str] = "lowrank"

    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "r", "n")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not np.isfinite(self.scale):
            raise SpecError(f"lowrank: scale is {self.scale!r}; pass a finite number")
        if self.fp8 and self.base:
            raise SpecError(
                "lowrank: base adds x w to the sums of p v, and fp8 sums of different scales do "
                "not add; make x w a kernel of family matmul, or use dtype bfloat16"
            )
        if self.inner and (self.fp8 or self.scale != 1.0):
            raise SpecError(
                f"lowrank: inner_activation {self.inner_activation!r}, inner_bias "
                f"{self.inner_bias} and inner_norm {self.inner_norm} go with scale 1 and plain "
                f"dtypes, not with scale {self.scale:g} and {self.dtype}; fold the scale into v, "
                "or use bfloat16"
            )
        self._check_norm()
        over_ranks.check_ranks(self)
        object.__setattr__(self, "scale", float(self.scale))  # equal specs have equal JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; tp and tp_axis only where there are ranks."""
        made = super().to_dict()
        return made if self.tp > 1 else {k: v for k, v in made.items() if k[:2] != "tp"}

    @property
    def world_size(self) -> int:
        """Ranks that run the kernel together."""
        return self.tp

    def whole(self) -> LowRankSpec:
        """Return the spec of the product that all ranks compute together."""
        if self.tp == 1:
            return self
        return dataclasses.replace(self, **over_ranks.sizes_of_whole(self))

    def sharded(self, tp: int, axis: str) -> LowRankSpec:
        """Return the spec of one of `tp` ranks; raises ShapeError where sizes do not divide."""
        return dataclasses.replace(self, **over_ranks.sizes_of_shard(self, tp, axis))

    def shards(self, *arrays: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the operands of each rank, from those of the whole."""
        return over_ranks.shards(self, arrays) if self.tp > 1 else (arrays,)

    def joined(self, *arrays: Any) -> tuple[Any, ...]:
        """Return the operands of the whole, of which every rank has `arrays`."""
        return over_ranks.joined(self, arrays) if self.tp > 1 else arrays

    def result_of(self, rank: int, result: Any) -> Any:
        """Return what a rank has of an array as large as the whole result."""
        return over_ranks.result_of(self, rank, result)

    def exchanged_bytes(self) -> int:
        """Return the bytes of each rank that the kernel sums over the ranks."""
        return over_ranks.exchanged_bytes(self)

    def check(self, target: Target) -> None:
        """Raise SpecError if the target cannot compute the spec with any schedule."""
        super().check(target)
        over_ranks.check_target(self, target)

    def _check_norm(self) -> None:
        """Raise SpecError unless the norm between the products is one that the kernel computes."""
        if not (np.isfinite(self.inner_eps) and self.inner_eps >= 0):
            raise SpecError(f"lowrank: inner_eps is {self.inner_eps!r}; pass a number of 0 or more")
        object.__setattr__(self, "inner_eps", float(self.inner_eps) if self.inner_norm else 1e-6)
        clash = self.inner_bias or self.inner_activation != "identity" or self.base or self.wide
        if self.inner_norm and clash:
            raise SpecError(
                "lowrank: inner_norm goes without inner_bias, inner_activation, base, and with "
                "intermediate 'operand'; drop them, or make the products kernels of their own"
            )

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return u, v, and w with a base product."""
        made = {"u": (self.k, self.r), "v": (self.r, self.n)}
        return made | {"w": (self.k, self.n)} if self.base else made

    @property
    def inner(self) -> bool:
        """Whether a function stands between the products."""
        return self.inner_bias or self.inner_norm or self.inner_activation != "identity"

    def biases(self) -> dict[str, int]:
        """Return the bias of the result, and the vectors between the products."""
        inner = {"inner_bias": self.r} if self.inner_bias else {}
        gain = {"inner_gain": self.r} if self.inner_norm else {}
        return super().biases() | inner | gain

    def intermediates(self) -> tuple[str, ...]:
        """Return p, which is x u."""
        return ("p",)

    def weight_splits(self) -> tuple[str, ...]:
        """Return that v's outputs can be halved, and rows of u too where u alone multiplies x."""
        if self.n % self.lnc:
            return ()
        rows = self.k % (128 * self.lnc) == 0 and not self.base
        return (OUTPUTS, WEIGHTS) if rows else (OUTPUTS,)

    def half_of(self, split: str) -> dict[str, Any]:
        """Return the sizes of a core's share of the weights."""
        return {"n": self.n // 2} | ({"k": self.k // 2} if split == WEIGHTS else {})

    def notes(self) -> tuple[str, ...]:
        """Return when the dense product would be cheaper, and the cost of an fp32 intermediate."""
        return (*self._format_notes("the product with v"), *self._shape_notes())

    def _shape_notes(self) -> tuple[str, ...]:
        if self.tp > 1:
            return self.whole()._shape_notes()
        if self.base or self.inner or self.r * (self.k + self.n) < self.k * self.n:
            return ()
        what = "r >= min(k, n)" if self.r >= min(self.k, self.n) else "r (k + n) >= k n"
        return (
            f"{what}: the dense product x (u v) needs {self.k * self.n:,} weights, the factors "
            f"have {self.r * (self.k + self.n):,}; multiply them once and use family matmul",
        )

    def as_products(self) -> Products:
        """Return (two products and the base product, one dense product) of a low-rank chain.

        A function between the products leaves no dense one: the two stand for it.
        """
        ends = {
            "x_layout": self.x_layout, "out_layout": self.out_layout,
            "bias": self.bias, "activation": self.activation,
        }  # fmt: skip
        factors = (self.u_layout, self.v_layout)
        low = products_of(self, (self.k, self.r, self.n), factors, **ends)
        dense = products_of(self, (self.k, self.n), factors[:1], **ends)
        if self.inner:
            first = dataclasses.replace(
                low[0], bias=self.inner_bias, activation=self.inner_activation
            )
            apart = (first, *low[1:], *(dense if self.base else ()))
            return apart, apart
        return (*low, *(dense if self.base else ())), dense

    def _estimates(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        x = self._x(operands, typical)
        p, p_error = self._times(x, "u", operands, typical)
        p_error = combine(p_error, self._crossing("x", "u", x, operands, typical), typical)
        p, p_error = self.scale * p, abs(self.scale) * p_error
        if self.scale != 1.0:
            p_error = combine(p_error, 2 * FP32_ROUNDOFF * (np.abs(p) + p_error), typical)
        shaped = self._biased((p, p_error), "inner_bias", operands, typical)
        roots: Estimate | None = None
        if self.inner_norm:  # the gain is multiplied in before p is rounded, the root after p v
            roots = inverse_roots(shaped, self.inner_eps, typical)
            shaped = scaled(shaped, (operands["inner_gain"], 0.0), typical)
        kept = self._kept(activated(shaped, self.inner_activation), "p", operands, typical)
        terms = len(operands["v"]) + (len(operands["u"]) if self.base else 0)
        total, error = self._times(kept, "v", operands, typical, terms)
        error = combine(error, self._crossing("", "v", kept, operands, typical), typical)
        if self.base:
            more, own = self._times(x, "w", operands, typical, terms)
            total, error = total + more, combine(error, own, typical)
        if roots is not None:
            total, error = scaled((total, error), roots, typical)
        biased = self._biased((total, error), "bias", operands, typical)
        return (activated(biased, self.activation),)

    def _crossing(
        self, name: str, weight: str, left: Estimate, operands: dict[str, Array], typical: bool
    ) -> Array | float:
        """Return the error of rounding what each rank adds to a sum over the ranks.

        name: the operand that is the left factor, if it is one.
        """
        if self.tp == 1 or {"rows": "u", "rank": "v"}.get(self.tp_axis) != weight:
            return 0.0
        value, error = left
        value = value * operands.get(f"{name}_scale", 1.0)
        right = operands[weight] * operands.get(f"{weight}_scale", 1.0)
        shaped = weight == "u" and (self.fp8 or self.inner or self.scale != 1.0)
        bias = np.abs(operands["bias"]) if weight == "v" and "bias" in operands else 0.0
        more = np.abs(error) @ np.abs(right) if name == "" else 0.0
        made = over_ranks.part_error(self, value, right, more + bias, typical, again=shaped)
        return abs(self.scale) * made if weight == "u" else made

    def _operands(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        """Return the operands of the whole product by their names."""
        return super(LowRankSpec, self.whole())._operands(arrays)

    def short(self) -> str:
        """Return family, sizes and dtype."""
        base = " base" if self.base else ""
        inner = f" inner {'rms' if self.inner_norm else self.inner_activation}" * self.inner
        ranks = f" {self.tp_axis}" if self.tp > 1 else ""
        return (
            f"lowrank m{self.m} k{self.k} r{self.r} n{self.n} {self.formats()}{base}{inner}{ranks}"
        )
