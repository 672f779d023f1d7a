"""Families `gated_mlp_up` and `gated_mlp`: the MLP of Llama and Qwen models, factored.

    gated_mlp_up   h = activation(x gate + gate_bias) * (x up + up_bias)
    gated_mlp      y = h down + down_bias, with h kept in SBUF

gate, up and down are each two factors, or one dense weight where their rank is 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    LAYOUTS,
    Array,
    KernelSpec,
    Products,
    TensorSpec,
    check_arrays,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    activation_error,
    activation_value,
    combine,
    product_error,
    rounding_error,
)
from nmm_compiler.kernels.matmul.spec import MatmulSpec
from nmm_compiler.kernels.number_formats import Estimate, FormattedSpec
from nmm_compiler.kernels.tiling import lay


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPUpSpec(FormattedSpec):
    """h[m, n] = activation(x gate + gate_bias) * (x up + up_bias) with x [m, k].

    gate_r, up_r: ranks; 0 for a dense weight; None takes r, and 0 where r is None too. Operands: x,
    then gate_u, gate_v (or gate_w), up_u, up_v (or up_w), then the biases. A weight is passed as
    it multiplies from the right, or turned with weight_layout "col", as nn.Linear stores it.

    intermediate: what is kept between products is rounded to, once. With dtype float8_e4m3 every
    sum is multiplied by its weight's scale, and x_scale where x is a factor: scales "tensor" or
    "channel", one per output feature; results and biases are bfloat16 or `out_dtype`.
    """

    m: int
    k: int
    n: int
    r: int | None = None
    gate_r: int | None = None
    up_r: int | None = None
    dtype: str = "bfloat16"
    activation: str = "silu"
    x_layout: str = "row"
    out_layout: str = "row"
    weight_layout: str = "row"
    gate_bias: bool = False
    up_bias: bool = False
    intermediate: str = "operand"
    scales: str | None = None
    out_dtype: str | None = None

    family: ClassVar[str] = "gated_mlp_up"
    branches: ClassVar[tuple[str, ...]] = ("gate", "up")
    down: ClassVar[bool] = False
    down_r: ClassVar[int | None] = 0
    down_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_sizes(self.family, {name: getattr(self, name) for name in ("m", "k", "n")})
        self._settle_formats()
        check_name("activation", self.activation, ACTIVATIONS)
        for name in ("x_layout", "out_layout", "weight_layout"):
            check_name(name, getattr(self, name), LAYOUTS)
        for branch in self.branches:
            rank = getattr(self, f"{branch}_r")
            rank = (self.r or 0) if rank is None else rank
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise ShapeError(f"{self.family}: {branch}_r is {rank!r}; pass a rank, 0 if dense")
            object.__setattr__(self, f"{branch}_r", rank)
        object.__setattr__(self, "r", None)  # said by the ranks: equal specs compare equal

    def rank(self, branch: str) -> int:
        """Return the rank of a projection, 0 when it is dense."""
        return int(getattr(self, f"{branch}_r"))

    def ends(self, branch: str) -> tuple[int, int]:
        """Return (input features, output features) of a projection."""
        return (self.n, self.k) if branch == "down" else (self.k, self.n)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, the weights of each projection, then biases, then scales of fp8 operands."""
        made = [TensorSpec(name="x", shape=lay((self.m, self.k), self.x_layout), dtype=self.dtype)]
        weights = self._weights()
        for name, shape in weights.items():
            shape = lay(shape, self.weight_layout)
            made.append(TensorSpec(name=name, shape=shape, dtype=self.dtype))
        for branch in self.branches:
            if getattr(self, f"{branch}_bias"):
                size = self.ends(branch)[1]
                made.append(
                    TensorSpec(name=f"{branch}_bias", shape=(size,), dtype=self.result_dtype)
                )
        columns = {name: shape[1] for name, shape in weights.items()}
        return (*made, *self._scale_tensors(columns, self.intermediates()))

    def intermediates(self) -> tuple[str, ...]:
        """Return what is kept between products: "gate_p" for x gate_u, and so on."""
        return tuple(f"{branch}_p" for branch in self.branches if self.rank(branch))

    def _weights(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each weight as it multiplies, in the order of the operands."""
        made: dict[str, tuple[int, int]] = {}
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            shapes = {"u": (first, rank), "v": (rank, last)} if rank else {"w": (first, last)}
            made |= {f"{branch}_{name}": shape for name, shape in shapes.items()}
        return made

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the result."""
        features = self.ends(self.branches[-1])[1]
        shape = lay((self.m, features), self.out_layout)
        return (TensorSpec(name="y", shape=shape, dtype=self.result_dtype),)

    def flops(self) -> int:
        """Return those of all products."""
        total = 0
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            total += 2 * self.m * (rank * (first + last) if rank else first * last)
        return total

    def flops_by_dtype(self) -> dict[str, int]:
        """Return the flops of products of x, and of products of intermediates, by their dtypes."""
        made = {self.dtype: 0}
        for name, (first, last) in self._weights().items():
            kept = name.startswith("down") or name.endswith("_v")
            dtype = self.intermediate_dtype if kept else self.dtype
            made[dtype] = made.get(dtype, 0) + 2 * self.m * first * last
        return made

    def notes(self) -> tuple[str, ...]:
        """Say where a dense product would be cheaper, and what an fp32 intermediate costs."""
        dense = tuple(
            f"{branch}: r (k + n) >= k n, a dense weight is cheaper"
            for branch in self.branches
            if self.rank(branch) and self.rank(branch) * sum(self.ends(branch)) >= self.k * self.n
        )
        return (*self._format_notes("every product but those of x"), *dense)

    def as_products(self) -> Products:
        """Return (every product, every projection dense) of a gated MLP.

        The elementwise product between up and down is left out of both, which favours them.
        """
        separate: list[KernelSpec] = []
        dense: list[KernelSpec] = []
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            down = branch == "down"
            ends: dict[str, Any] = {
                "x_layout": "col" if down else self.x_layout,
                "out_layout": self.out_layout if down or len(self.branches) == 2 else "col",
                "activation": self.activation if branch == "gate" else "identity",
                "bias": getattr(self, f"{branch}_bias"),
            }
            common: dict[str, Any] = {
                "m": self.m,
                "dtype": self.dtype,
                "w_layout": self.weight_layout,
            }
            whole = MatmulSpec(k=first, n=last, **common, **ends)
            dense.append(whole)
            if rank:
                separate.append(
                    MatmulSpec(
                        k=first, n=rank, x_layout=ends["x_layout"], out_layout="col", **common
                    )
                )
                turned = {**ends, "x_layout": "col"}
                separate.append(MatmulSpec(k=rank, n=last, **common, **turned))
            else:
                separate.append(whole)
        return tuple(separate), tuple(dense)

    def reference(self, *arrays: Array) -> Array:
        """Return the result in float64, laid out as `out_layout` says."""
        return self._laid(self._estimate(arrays)[0])

    def error_bound(self, *arrays: Array) -> Array:
        """Return the elementwise bound; h, p and y are rounded once each, sums are in fp32."""
        return self._error(arrays)

    def typical_error(self, *arrays: Array) -> Array:
        """Return the error per element if roundings are independent."""
        return self._error(arrays, typical=True)

    def _error(self, arrays: tuple[Array, ...], typical: bool = False) -> Array:
        value, error = self._estimate(arrays, typical)
        rounding = rounding_error(np.abs(value) + error, self.result_dtype)
        return self._laid(combine(error, rounding, typical))

    def _laid(self, y: Array) -> Array:
        return y if self.out_layout == "row" else np.ascontiguousarray(y.T)

    def _estimate(self, arrays: tuple[Array, ...], typical: bool = False) -> Estimate:
        """Return the result before its last rounding, and its error."""
        operands = self._operands(arrays)
        x = operands["x"] if self.x_layout == "row" else operands["x"].T
        return self._gated((x, np.zeros_like(x)), operands, typical)

    def _operands(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        check_arrays(self, arrays)
        named = zip(self.inputs(), arrays, strict=True)
        return {t.name: np.asarray(a, dtype=np.float64) for t, a in named}

    def _gated(self, x: Estimate, operands: dict[str, Array], typical: bool) -> Estimate:
        gate, gate_error = self._branch("gate", x, operands, typical)
        gate_error = activation_error(gate, gate_error, self.activation)
        gate = activation_value(gate, self.activation)
        up, up_error = self._branch("up", x, operands, typical)
        error = combine(np.abs(gate) * up_error, np.abs(up) * gate_error, typical)
        error = combine(error, gate_error * up_error, typical)
        error = combine(error, 2 * FP32_ROUNDOFF * (np.abs(gate * up) + error), typical)
        return gate * up, error

    def _branch(
        self, branch: str, x: Estimate, operands: dict[str, Array], typical: bool
    ) -> Estimate:
        value, error = x
        rank, (first, _) = self.rank(branch), self.ends(branch)
        lengths = {"u": first, "v": rank} if rank else {"w": first}
        for name, length in lengths.items():
            if name == "v":
                value, error = self._kept(value, error, operands.get(f"{branch}_p_scale"), typical)
            weight = operands[f"{branch}_{name}"]
            weight = weight if self.weight_layout == "row" else weight.T
            error = product_error(np.abs(value), np.abs(weight), error, length, typical)
            value = value @ weight
            if self.fp8:
                scales = [operands[f"{branch}_{name}_scale"]]
                if branch != "down" and name != "v":
                    scales.append(operands["x_scale"])
                value, error = self._scaled(value, error, *scales, typical=typical)
        if getattr(self, f"{branch}_bias"):
            value = value + operands[f"{branch}_bias"]
            error = combine(error, FP32_ROUNDOFF * (np.abs(value) + error), typical)
        return value, error

    def short(self) -> str:
        """Return family, sizes, ranks and dtype."""
        ranks = "_".join(str(self.rank(branch)) for branch in self.branches)
        sizes = f"m{self.m} k{self.k} r{ranks} n{self.n}"
        return f"{self.family} {sizes} {self.formats()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPSpec(GatedMLPUpSpec):
    """y[m, k] = (activation(x gate + gate_bias) * (x up + up_bias)) down + down_bias.

    As GatedMLPUpSpec, with down_u, down_v (or down_w) after the up projection.
    """

    down_r: int | None = None  # type: ignore[misc]
    down_bias: bool = False  # type: ignore[misc]

    family: ClassVar[str] = "gated_mlp"
    down: ClassVar[bool] = True
    branches: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    def intermediates(self) -> tuple[str, ...]:
        """Return what is kept between products, h among it."""
        return (*super().intermediates(), "h")

    def _estimate(self, arrays: tuple[Array, ...], typical: bool = False) -> Estimate:
        h, error = super()._estimate(arrays, typical)
        operands = self._operands(arrays)
        h, error = self._kept(h, error, operands.get("h_scale"), typical)
        return self._branch("down", (h, error), operands, typical)
