"""The spec of experts: y[t] = sum over j of gates[t, j] MLP_i(x[t]), i = index[t, j].

    MLP_i(x) = h down_i + down_bias_i,  h = activation(x gate_i + ..) * (x up_i + ..)
    with a limit:  h = g sigmoid(slope g) (min(max(u, -limit), limit) + plus),  g = min(.., limit)

An index of -1 is no expert: of a token whose expert is on another device, say.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    GROUPS,
    LAYOUTS,
    WEIGHTS,
    Array,
    KernelSpec,
    Products,
    TensorSpec,
    check_arrays,
    check_cores,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    Estimate,
    activated,
    combine,
    plus_bias,
    rounded,
    scaled,
    times_weight,
)
from nmm_compiler.kernels.linear.adapters_spec import check_gathers
from nmm_compiler.kernels.linear.layer import Groups
from nmm_compiler.kernels.linear.specs import GatedMLPSpec
from nmm_compiler.kernels.tiling import lay
from nmm_compiler.targets import Target

HALVES = ("joined", "interleaved")
# Roundings of fp32 in g sigmoid(slope g) (u + plus).
_CLAMPED_ROUNDINGS = 24
TOKENS = 128
"""Tokens that may move through every group together; more of them are sorted by group."""


FEW = 32
"""Tokens that no kernel sorts; of more of them it may store the rows of their picks."""


def distinct_groups(groups: int, top_k: int, tokens: int) -> float:
    """Return the groups that tokens are expected to choose, if each chooses uniformly."""
    return groups * (1 - (1 - top_k / groups) ** tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec(KernelSpec):
    """y[m, k] = sum of gates times the chosen experts' gated MLPs; h has n features.

    groups: experts; top_k: picks of a token. weight_layout: "row" for gate_up [groups, k, 2 n] and
    down [groups, n, k], "col" for both stored [outputs, inputs]. halves: outputs of gate_up are
    gate's then up's, "joined", or take turns, "interleaved". limit: of a clamped product, 0 for
    activation(gate) * up. distinct: groups that tokens are expected to choose, for predictions; 0
    for those of uniform routing. Operands: x, gate_up, down, gate_up_bias, down_bias, then index
    [m, top_k], -1 for no expert, and gates [m, top_k].
    """

    m: int
    k: int
    n: int
    groups: int
    top_k: int = 1
    dtype: str = "bfloat16"
    weight_layout: str = "row"
    halves: str = "joined"
    activation: str = "silu"
    gate_up_bias: bool = False
    down_bias: bool = False
    limit: float = 0.0
    slope: float = 1.0
    plus: float = 0.0
    distinct: float = 0.0

    family: ClassVar[str] = "experts"
    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "n", "groups", "top_k")
    splits_tokens: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    def __post_init__(self) -> None:
        check_cores(self.family, self.lnc)
        check_sizes(self.family, {name: getattr(self, name) for name in self.sizes})
        check_name("dtype", self.dtype, self.dtypes)
        check_name("weight_layout", self.weight_layout, LAYOUTS)
        check_name("halves", self.halves, HALVES)
        check_name("activation", self.activation, ACTIVATIONS)
        for name in ("limit", "slope", "plus", "distinct"):
            value = float(getattr(self, name))
            if not np.isfinite(value) or value < 0:
                raise SpecError(f"experts: {name} is {value!r}; pass a number of 0 or more")
            object.__setattr__(self, name, value)
        if self.top_k > self.groups:
            raise SpecError(f"experts: top_k is {self.top_k} of {self.groups} groups; lower it")
        if not self.limit and (self.slope != 1.0 or self.plus):
            raise SpecError("experts: slope and plus belong to a limit; pass limit, or drop them")

    @property
    def chosen(self) -> Groups:
        """What the index chooses from."""
        return Groups(count=self.groups, top_k=self.top_k)

    @property
    def expected(self) -> float:
        """The distinct groups that tokens choose: as said, or with uniform routing."""
        uniform = distinct_groups(self.groups, self.top_k, self.m)
        return min(self.distinct or uniform, self.groups, self.m * self.top_k)

    def check(self, target: Target) -> None:
        """Raise SpecError if the target cannot compute the spec with any schedule."""
        super().check(target)
        check_gathers(self, target)

    def splits(self) -> tuple[str, ...]:
        """Return how the cores share the work: by groups; by features of h where picks are odd."""
        if self.lnc == 1:
            return ("",)
        if self.k % 2:
            return ()
        if self.m > 1 or self.top_k % 2 == 0:
            return (GROUPS,)
        return (WEIGHTS,) * (self.n % 2 == 0)

    def half_of(self, split: str) -> dict[str, Any]:
        """Return the features of h, or the picks of the only token, of each of two cores."""
        if split == WEIGHTS:
            return {"n": self.n // 2}
        return {"top_k": self.top_k // 2} if self.m == 1 else {}

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, the weights and biases of all groups, the index and the gates."""
        up, down = (
            lay(one, self.weight_layout) for one in ((self.k, 2 * self.n), (self.n, self.k))
        )
        made: list[tuple[str, tuple[int, ...]]] = [("x", (self.m, self.k))]
        made += [("gate_up", (self.groups, *up)), ("down", (self.groups, *down))]
        made += [("gate_up_bias", (self.groups, 2 * self.n))] * self.gate_up_bias
        made += [("down_bias", (self.groups, self.k))] * self.down_bias
        picks = (self.m, self.top_k)
        return (
            *(TensorSpec(name=name, shape=shape, dtype=self.dtype) for name, shape in made),
            TensorSpec(name="index", shape=picks, dtype="int32", below=self.groups),
            TensorSpec(name="gates", shape=picks, dtype="float32"),
        )

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        return (TensorSpec(name="y", shape=(self.m, self.k), dtype=self.dtype),)

    def flops(self) -> int:
        """Return those of the picks."""
        return 6 * self.m * self.top_k * self.k * self.n

    def minimal_hbm_bytes(self) -> int:
        """Return x, y, the picks, and the weights of the groups that tokens are expected to
        choose."""
        whole = {one.name: one.bytes for one in (*self.inputs(), *self.outputs())}
        weights = ("gate_up", "down", "gate_up_bias", "down_bias")
        read = sum(whole.pop(name, 0) for name in weights)
        return sum(whole.values()) + round(read * self.expected / self.groups)

    def reference(self, *arrays: Array) -> Any:
        """Return y in float64."""
        return self._estimate(arrays, False)[0]

    def error_bound(self, *arrays: Array) -> Any:
        """Return elementwise bounds: sums are in fp32, h, y, and of many tokens the rows of their
        picks are rounded once."""
        return rounded(self._estimate(arrays, False), self.dtype, False)[1]

    def typical_error(self, *arrays: Array) -> Any:
        """Return the error per element if roundings are independent."""
        return rounded(self._estimate(arrays, True), self.dtype, True)[1]

    def _estimate(self, arrays: tuple[Array, ...], typical: bool) -> Estimate:
        check_arrays(self, arrays)
        named = {t.name: a for t, a in zip(self.inputs(), arrays, strict=True)}
        index, gates = (np.asarray(named[name], np.float64) for name in ("index", "gates"))
        x = np.asarray(named["x"], np.float64)
        value, error = np.zeros(x.shape), np.zeros(x.shape)
        for group in (group for group in np.unique(index).astype(int) if group >= 0):
            factor = np.where(index == group, gates, 0.0).sum(1)[:, None]
            of = {name: np.asarray(array[group], np.float64) for name, array in named.items()
                  if name not in ("x", "index", "gates")}  # fmt: skip
            own = scaled(self._mlp(x, of, typical), (factor, 0.0), typical)
            value += own[0]
            error = combine(error, own[1], typical)
            error = combine(error, FP32_ROUNDOFF * (np.abs(value) + error), typical)
        return value, error

    def _mlp(self, x: Array, of: dict[str, Array], typical: bool) -> Estimate:
        """Return what one group makes of all tokens."""
        for name in ("gate_up", "down"):
            of[name] = of[name].T if self.weight_layout == "col" else of[name]
        gate, up = (
            self._biased(times_weight((x, 0.0), one, typical), bias, typical)
            for one, bias in zip(self._halves(of["gate_up"]),
                                 self._halves(of.get("gate_up_bias")), strict=True)
        )  # fmt: skip
        if self.limit:
            g, u = np.minimum(gate[0], self.limit), np.clip(up[0], -self.limit, self.limit)
            active = g / (1 + np.exp(-self.slope * g)), 1.1 * gate[1]
            made = scaled(active, (u + self.plus, up[1]), typical)
            own = _CLAMPED_ROUNDINGS * FP32_ROUNDOFF * (np.abs(made[0]) + np.abs(g) + 1)
            made = made[0], combine(made[1], own, typical)
        else:
            made = scaled(activated(gate, self.activation), up, typical)
        h = rounded(made, self.dtype, typical)
        made = self._biased(times_weight(h, of["down"], typical), of.get("down_bias"), typical)
        return made if self.m <= FEW else rounded(made, self.dtype, typical)

    def _biased(self, left: Estimate, bias: Array | None, typical: bool) -> Estimate:
        return left if bias is None else plus_bias(left, bias, typical)

    def _halves(self, both: Array | None) -> tuple[Any, Any]:
        if both is None:
            return None, None
        if self.halves == "interleaved":
            return both[..., ::2], both[..., 1::2]
        return both[..., : self.n], both[..., self.n :]

    def as_products(self) -> Products:
        """Return a gated MLP of all tokens for each group that they are expected to choose."""
        tokens = max(1, round(self.m * self.top_k / max(1.0, self.expected)))
        one = GatedMLPSpec(
            m=tokens, k=self.k, n=self.n, dtype=self.dtype, activation=self.activation,
            weight_layout=self.weight_layout, gate_bias=self.gate_up_bias,
            up_bias=self.gate_up_bias, down_bias=self.down_bias, lnc=self.lnc,
        )  # fmt: skip
        made = (one,) * max(1, round(self.expected))
        return made, made

    def short(self) -> str:
        """Return family, sizes and dtype."""
        clamped = " clamped" * bool(self.limit)
        return (
            f"experts m{self.m} k{self.k} g{self.groups} top{self.top_k} n{self.n} "
            f"{self.dtype}{clamped}"
        )
