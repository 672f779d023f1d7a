"""Families `gated_mlp_up` and `gated_mlp`: the MLP of Llama and Qwen models, factored.

    gated_mlp_up   h = activation(x gate + gate_bias) * (x up + up_bias)
    gated_mlp      y = h down + down_bias, with h kept in SBUF

gate, up and down are each two factors, or one dense weight where their rank is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.base import OUTPUTS, WEIGHTS, Array, KernelSpec, Products
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF, Estimate, activated, combine
from nmm_compiler.kernels.matmul.spec import products_of
from nmm_compiler.kernels.product_spec import ProductSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPUpSpec(ProductSpec):
    """h[m, n] = activation(x gate + gate_bias) * (x up + up_bias) with x [m, k].

    gate_r, up_r: ranks; 0 for a dense weight; None takes r, and 0 where r is None too. Operands: x,
    then gate_u, gate_v (or gate_w), up_u, up_v (or up_w), then the biases. A weight is passed as it
    multiplies from the right, or transposed with weight_layout "col", as nn.Linear stores it.

    intermediate: the format to which values between products are rounded, once. With dtype
    float8_e4m3 every sum is multiplied by its weight's scale, and x_scale where x is a factor:
    scales "tensor" or "channel", one per output feature; results and biases are bfloat16 or
    `out_dtype`.
    """

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
    adds_residual: ClassVar[bool] = False
    branches: ClassVar[tuple[str, ...]] = ("gate", "up")
    down: ClassVar[bool] = False
    down_r: ClassVar[int | None] = 0
    down_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for branch in self.branches:
            rank = getattr(self, f"{branch}_r")
            rank = (self.r or 0) if rank is None else rank
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise ShapeError(f"{self.family}: {branch}_r is {rank!r}; pass a rank, 0 if dense")
            object.__setattr__(self, f"{branch}_r", rank)
        object.__setattr__(self, "r", None)  # so that equal specs compare equal

    def rank(self, branch: str) -> int:
        """Return the rank of a projection, 0 when it is dense."""
        return int(getattr(self, f"{branch}_r"))

    def ends(self, branch: str) -> tuple[int, int]:
        """Return (input features, output features) of a projection."""
        return (self.n, self.k) if branch == "down" else (self.k, self.n)

    def layout_of(self, name: str) -> str:
        """Return the layout in which an operand is passed."""
        return super().layout_of("x" if name == "x" else "weight")

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return the factors, or the dense weight, of each projection."""
        made: dict[str, tuple[int, int]] = {}
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            shapes = {"u": (first, rank), "v": (rank, last)} if rank else {"w": (first, last)}
            made |= {f"{branch}_{name}": shape for name, shape in shapes.items()}
        return made

    def multiplies_kept(self, weight: str) -> bool:
        """Return whether the left factor of a weight is h or an intermediate; else it is x."""
        return weight.startswith("down") or super().multiplies_kept(weight)

    def biases(self) -> dict[str, int]:
        """Return the bias of each projection that has one."""
        biased = (branch for branch in self.branches if getattr(self, f"{branch}_bias"))
        return {f"{branch}_bias": self.ends(branch)[1] for branch in biased}

    def weight_splits(self) -> tuple[str, ...]:
        """Return that the outputs of gate and up can be halved, or of factors all weights.

        A down projection takes all of h: the cores exchange it where that is dense, and where it
        has factors the sums of its first product.
        """
        tiles = 128 * self.lnc if self.down else self.lnc
        if self.n % tiles or (self.down and self.k % self.lnc):
            return ()
        dense = not (self.down and self.rank("down"))
        factors = all(self.rank(branch) for branch in self.branches)
        rows = factors and self.k % (128 * self.lnc) == 0
        return (*((OUTPUTS,) if dense else ()), *((WEIGHTS,) if rows else ()))

    def half_of(self, split: str) -> dict[str, Any]:
        """Return the sizes of a core's share of the weights."""
        return {"n": self.n // 2} | ({"k": self.k // 2} if split == WEIGHTS else {})

    def intermediates(self) -> tuple[str, ...]:
        """Return the intermediates between products: "gate_p" for x gate_u, and so on."""
        return tuple(f"{branch}_p" for branch in self.branches if self.rank(branch))

    def notes(self) -> tuple[str, ...]:
        """Return where a dense product would be cheaper, and the cost of an fp32 intermediate."""
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
        turned = "row" if self.m == 1 else "col"  # one token lies alike by rows and by columns
        for branch in self.branches:
            rank, (first, last) = self.rank(branch), self.ends(branch)
            down = branch == "down"
            ends: dict[str, Any] = {
                "x_layout": turned if down else self.x_layout,
                "out_layout": self.out_layout if down or not self.down else turned,
                "activation": self.activation if branch == "gate" else "identity",
                "bias": getattr(self, f"{branch}_bias"),
            }
            layouts = (self.weight_layout,) * 2
            whole = products_of(self, (first, last), layouts[:1], **ends)
            dense += whole
            separate += products_of(self, (first, rank, last), layouts, **ends) if rank else whole
        return tuple(separate), tuple(dense)

    def _estimates(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        x = self._x(operands, typical)
        gate, gate_error = activated(self._branch("gate", x, operands, typical), self.activation)
        up, up_error = self._branch("up", x, operands, typical)
        error = combine(np.abs(gate) * up_error, np.abs(up) * gate_error, typical)
        error = combine(error, gate_error * up_error, typical)
        error = combine(error, 2 * FP32_ROUNDOFF * (np.abs(gate * up) + error), typical)
        return ((gate * up, error),)

    def _branch(
        self, branch: str, left: Estimate, operands: dict[str, Array], typical: bool
    ) -> Estimate:
        last = f"{branch}_v" if self.rank(branch) else f"{branch}_w"
        if self.rank(branch):
            left = self._times(left, f"{branch}_u", operands, typical)
            left = self._kept(left, f"{branch}_p", operands, typical)
        made = self._times(left, last, operands, typical)
        return self._biased(made, f"{branch}_bias", operands, typical)

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
    adds_residual: ClassVar[bool] = True
    down: ClassVar[bool] = True
    branches: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    def intermediates(self) -> tuple[str, ...]:
        """Return the intermediates between products, with h."""
        return (*super().intermediates(), "h")

    def _estimates(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        (h,) = super()._estimates(operands, typical)
        h = self._kept(h, "h", operands, typical)
        return (self._branch("down", h, operands, typical),)
