"""Families `gated_mlp_up` and `gated_mlp`: the MLP of Llama and Qwen models, factored.

    gated_mlp_up   h = activation(x gate + gate_bias) * (x up + up_bias)
    gated_mlp      y = h down + down_bias, with h kept in SBUF

gate, up and down are each two factors, or one dense weight where their rank is 0. The kernel is
kernels/nki/gated_mlp.py; how it is scheduled is in gated_mlp_schedule.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    Array,
    KernelSpec,
    TensorSpec,
    check_arrays,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.numerics import (
    FP32_ROUNDOFF,
    activation_error,
    activation_value,
    product_error,
    rounding_error,
)
from nmm_compiler.kernels.tiling import lay

# A value, and how far a kernel's value may be from it, element by element.
Estimate = tuple[Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPUpSpec(KernelSpec):
    """h[m, n] = activation(x gate + gate_bias) * (x up + up_bias) with x [m, k].

    gate_r, up_r: ranks; 0 for a dense weight; None takes r, and 0 where r is None too. Operands: x,
    then gate_u, gate_v (or gate_w), up_u, up_v (or up_w), then the biases. A weight is passed as
    it multiplies from the right, or turned with weight_layout "col", as nn.Linear stores it.
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

    family: ClassVar[str] = "gated_mlp_up"
    branches: ClassVar[tuple[str, ...]] = ("gate", "up")

    def __post_init__(self) -> None:
        check_sizes(self.family, {name: getattr(self, name) for name in ("m", "k", "n")})
        check_name("dtype", self.dtype, DTYPES[:3])
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
        """Return x, the weights of each projection, then the biases."""
        made = [TensorSpec(name="x", shape=lay((self.m, self.k), self.x_layout), dtype=self.dtype)]
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            shapes = {"u": (first, rank), "v": (rank, last)} if rank else {"w": (first, last)}
            for name, shape in shapes.items():
                made.append(
                    TensorSpec(
                        name=f"{branch}_{name}",
                        shape=lay(shape, self.weight_layout),
                        dtype=self.dtype,
                    )
                )
        for branch in self.branches:
            if getattr(self, f"{branch}_bias"):
                size = self.ends(branch)[1]
                made.append(TensorSpec(name=f"{branch}_bias", shape=(size,), dtype=self.dtype))
        return tuple(made)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the result."""
        features = self.ends(self.branches[-1])[1]
        shape = lay((self.m, features), self.out_layout)
        return (TensorSpec(name="y", shape=shape, dtype=self.dtype),)

    def flops(self) -> int:
        """Return those of all products."""
        total = 0
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            total += 2 * self.m * (rank * (first + last) if rank else first * last)
        return total

    def notes(self) -> tuple[str, ...]:
        """Say where a dense product would be cheaper."""
        return tuple(
            f"{branch}: r (k + n) >= k n, a dense weight is cheaper"
            for branch in self.branches
            if self.rank(branch) and self.rank(branch) * sum(self.ends(branch)) >= self.k * self.n
        )

    def reference(self, *arrays: Array) -> Array:
        """Return the result in float64, laid out as `out_layout` says."""
        return self._laid(self._estimate(arrays)[0])

    def error_bound(self, *arrays: Array) -> Array:
        """Return the elementwise bound; h, p and y are rounded once each, sums are in fp32."""
        value, error = self._estimate(arrays)
        return self._laid(error + rounding_error(np.abs(value) + error, self.dtype))

    def _laid(self, y: Array) -> Array:
        return y if self.out_layout == "row" else np.ascontiguousarray(y.T)

    def _estimate(self, arrays: tuple[Array, ...]) -> Estimate:
        """Return the result before its last rounding, and the bound of its error."""
        operands = self._operands(arrays)
        x = operands["x"] if self.x_layout == "row" else operands["x"].T
        return self._gated((x, np.zeros_like(x)), operands)

    def _operands(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        check_arrays(self, arrays)
        named = zip(self.inputs(), arrays, strict=True)
        return {t.name: np.asarray(a, dtype=np.float64) for t, a in named}

    def _gated(self, x: Estimate, operands: dict[str, Array]) -> Estimate:
        gate, gate_error = self._branch("gate", x, operands)
        gate_error = activation_error(gate, gate_error, self.activation)
        gate = activation_value(gate, self.activation)
        up, up_error = self._branch("up", x, operands)
        error = np.abs(gate) * up_error + np.abs(up) * gate_error + gate_error * up_error
        error = error + 2 * FP32_ROUNDOFF * (np.abs(gate * up) + error)
        return gate * up, error

    def _branch(self, branch: str, x: Estimate, operands: dict[str, Array]) -> Estimate:
        value, error = x
        rank, (first, _) = self.rank(branch), self.ends(branch)
        lengths = {"u": first, "v": rank} if rank else {"w": first}
        for name, length in lengths.items():
            if name == "v":  # the intermediate is rounded to the operands' dtype
                error = error + rounding_error(np.abs(value) + error, self.dtype)
            weight = operands[f"{branch}_{name}"]
            weight = weight if self.weight_layout == "row" else weight.T
            error = product_error(np.abs(value), np.abs(weight), error, length)
            value = value @ weight
        if getattr(self, f"{branch}_bias"):
            value = value + operands[f"{branch}_bias"]
            error = error + FP32_ROUNDOFF * (np.abs(value) + error)
        return value, error

    def short(self) -> str:
        """Return family, sizes, ranks and dtype."""
        ranks = "-".join(str(self.rank(branch)) for branch in self.branches)
        return (
            f"{self.family} m{self.m} k{self.k} r{ranks.replace('-', '_')} n{self.n} {self.dtype}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPSpec(GatedMLPUpSpec):
    """y[m, k] = (activation(x gate + gate_bias) * (x up + up_bias)) down + down_bias.

    As GatedMLPUpSpec, with down_u, down_v (or down_w) after the up projection.
    """

    down_r: int | None = None
    down_bias: bool = False

    family: ClassVar[str] = "gated_mlp"
    branches: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    def _estimate(self, arrays: tuple[Array, ...]) -> Estimate:
        h, error = super()._estimate(arrays)
        error = error + rounding_error(np.abs(h) + error, self.dtype)
        return self._branch("down", (h, error), self._operands(arrays))
