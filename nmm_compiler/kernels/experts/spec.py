"""The spec of experts: y[t] = sum over j of gates[t, j] MLP_i(x[t]), i = index[t, j].

    MLP_i(x) = h down_i + down_bias_i,  h = activation(x gate_i + ..) * (x up_i + ..)
    with a limit:  h = g sigmoid(slope g) (min(max(u, -limit), limit) + plus),  g = min(.., limit)

Each weight is a matrix in x's dtype or in few bits, a pair of thin factors, or a matrix and a pair:
x gate_i is then x w_i + (x u_i) v_i.

An index of -1 is no expert: of a token whose expert is on another device, say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import (
    DTYPES,
    GROUPS,
    WEIGHTS,
    Array,
    KernelSpec,
    Products,
    TensorSpec,
    check_arrays,
    check_name,
)
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF, Estimate
from nmm_compiler.kernels.linear.corrected import MULTIPLIED
from nmm_compiler.kernels.linear.estimates import Estimates
from nmm_compiler.kernels.linear.layer import MULTIPLY, Layer, Linear, LowRank, Weight
from nmm_compiler.kernels.linear.spec import mx_scale_of, operand_of
from nmm_compiler.kernels.linear.specs import GatedMLPSpec
from nmm_compiler.kernels.number_formats import FP8, X_DTYPES
from nmm_compiler.kernels.packed_formats import MX, from_nki
from nmm_compiler.kernels.tiling import tiles

NOTHING = Weight()
HALVES = ("joined", "interleaved")
FACTORS = "factors"
"""The format of weights that are a pair of thin factors alone."""
# Roundings of fp32 in g sigmoid(slope g) (u + plus).
_CLAMPED_ROUNDINGS = 24
_OF_TOKENS = ("x", "index", "gates")
TOKENS = 128
"""Tokens that may move through every group together; more of them are sorted by group."""


FEW = 32
"""Tokens that no kernel sorts; of more of them it may store the rows of their picks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec(KernelSpec):
    """y[m, k] = sum of gates times the chosen experts' gated MLPs; h has n features.

    groups: experts; top_k: picks of a token. weight_layout: "row" for gate_up [groups, k, 2 n] and
    down [groups, n, k], "col" for both stored [outputs, inputs]. halves: outputs of gate_up are
    gate's then up's, "joined", or take turns, "interleaved". limit: of a clamped product, 0 for
    activation(gate) * up. distinct: groups that tokens are expected to choose, for predictions; 0
    for those of uniform routing.

    weight: format of gate_up and down, "" for x's dtype. "fp8" has scales [groups, outputs] in x's
    dtype. MX blocks are joined halves, as `for_nki` gives them, of inputs and of features of h that
    are filled up with zeros to whole 128s. ranks: of the factors of gate_up and of down, 0 for
    none: u [groups, inputs, rank], v [groups, rank, outputs], v divided by scales of fp8. With
    weight "factors" they are all there is.

    Operands: x, gate_up, down, their scales, gate_up_u, gate_up_v, down_u, down_v, gate_up_bias,
    down_bias, those that there are, then index [m, top_k], -1 for no expert, and gates [m, top_k].
    """

    m: int
    k: int
    n: int
    groups: int
    top_k: int = 1
    dtype: str = "bfloat16"
    weight: str = ""
    ranks: tuple[int, int] = (0, 0)
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
    dtypes: ClassVar[tuple[str, ...]] = DTYPES[:3]
    splits_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("halves", self.halves, HALVES)
        if self.top_k > self.groups:
            raise SpecError(f"experts: top_k is {self.top_k} of {self.groups} groups; lower it")
        if not self.limit and (self.slope != 1.0 or self.plus):
            raise SpecError("experts: slope and plus belong to a limit; pass limit, or drop them")
        check_name("weight", self.weight, ("", FACTORS, *MULTIPLIED))
        if self.weight:
            self._check_stored()

    def _check_stored(self) -> None:
        """Raise SpecError or ShapeError for few-bit weights, or factors, that no kernel takes."""
        if self.weight_layout != "row" or (self.weight != FACTORS and self.dtype not in X_DTYPES):
            raise SpecError(
                f"experts: {self.weight} weights with layout {self.weight_layout!r} and x in "
                f"{self.dtype}; pass layout 'row' and x in {' or '.join(X_DTYPES)}"
            )
        if self.weight == FACTORS and min(self.ranks) < 1:
            raise SpecError(f"experts: ranks are {self.ranks} of factors alone; pass 1 or more")
        if self.weight in MX and (self.halves != "joined" or self.k % 32 or self.n % 4):
            raise ShapeError(
                f"experts: {self.weight} weights of {self.k} inputs and {self.n} features, halves "
                f"{self.halves!r}; blocks take whole 32s of inputs, 4s of features, halves 'joined'"
            )

    @property
    def expected(self) -> float:
        """The distinct groups that tokens choose: as said, or with uniform routing."""
        uniform = self.groups * (1 - (1 - self.top_k / self.groups) ** self.m)
        return min(self.distinct or uniform, self.groups, self.m * self.top_k)

    @property
    def mx(self) -> bool:
        """Whether weights are of MX blocks."""
        return self.weight in MX

    @property
    def features(self) -> int:
        """The features of h as they are stored."""
        return 128 * tiles(self.n, 128) if self.mx else self.n

    def stored(self) -> dict[str, Weight]:
        """Return the matrices of a group: gate_up and down, and the factors of both."""
        n, form = self.features, FP8 if self.weight == "fp8" else self.weight
        k = 128 * tiles(self.k, 128) if self.mx else self.k
        sizes = {"gate_up": (k, 2 * n), "down": (n, self.k)}
        made = {}
        for rank, inputs, (name, (k, outputs)) in zip(
            self.ranks, (self.k, self.n), sizes.items(), strict=True
        ):
            if self.weight != FACTORS:
                made[name] = Weight(name=name, k=k, n=outputs, format=form or self.dtype)
            if rank:
                made[f"{name}_u"] = Weight(name=f"{name}_u", k=inputs, n=rank, format=self.dtype)
                made[f"{name}_v"] = Weight(name=f"{name}_v", k=rank, n=outputs, format=self.dtype)
        return made

    def splits(self) -> tuple[str, ...]:
        """Return how the cores share the work: by groups; by features of h where picks are odd."""
        if self.lnc == 1:
            return ("",)
        if self.k % 2:
            return ()
        if self.m > 1 or self.top_k % 2 == 0:
            return (GROUPS,)
        return (WEIGHTS,) * (self.n % (256 if self.mx else 2) == 0)

    def half(self, split: str) -> ExpertsSpec:
        """Return the share of one of two cores: of features of h, or of the only token's picks."""
        n = self.n // 2 if split == WEIGHTS else self.n
        picks = self.top_k // 2 if split == GROUPS and self.m == 1 else self.top_k
        return dataclasses.replace(self, lnc=1, n=n, top_k=picks)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, the weights, scales, factors and biases of all groups, the index, the gates."""
        groups, stored = self.groups, self.stored()
        base = [one for name, one in stored.items() if name in ("gate_up", "down")]
        made = [TensorSpec(name="x", shape=(self.m, self.k), dtype=self.dtype, token_dim=0)]
        made += [operand_of(one, one.format, self.weight_layout, groups) for one in base]
        made += [mx_scale_of(one, groups) for one in base if one.mx]
        vectors = [(one.scale, one.n) for one in base if self.weight == "fp8"]
        biases = [("gate_up_bias", 2 * self.features)] * self.gate_up_bias
        biases += [("down_bias", self.k)] * self.down_bias
        factors = [one for one in stored.values() if one not in base]
        picks = (self.m, self.top_k)
        return (
            *made,
            *(TensorSpec(name=name, shape=(groups, n), dtype=self.dtype) for name, n in vectors),
            *(operand_of(one, self.dtype, "row", groups) for one in factors),
            *(TensorSpec(name=name, shape=(groups, n), dtype=self.dtype) for name, n in biases),
            TensorSpec(name="index", shape=picks, dtype="int32", below=self.groups, token_dim=0),
            TensorSpec(name="gates", shape=picks, dtype="float32", token_dim=0),
        )

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        return (TensorSpec(name="y", shape=(self.m, self.k), dtype=self.dtype),)

    def flops_by_dtype(self) -> dict[str, int]:
        """Return those of the picks: of few-bit weights, and of what is in x's dtype."""
        made: dict[str, int] = {}
        for one in self.stored().values():
            dtype = one.format if one.mx else self.dtype  # fp8 weights multiply x at its own rate
            made[dtype] = made.get(dtype, 0) + 2 * self.m * self.top_k * one.k * one.n
        return made

    def minimal_hbm_bytes(self) -> int:
        """Return x, y, the picks, and the weights of the groups that tokens are expected to
        choose."""
        whole = {one.name: one.bytes for one in (*self.inputs(), *self.outputs())}
        rest = sum(whole.pop(name) for name in ("x", "y", "index", "gates"))
        return rest + round(sum(whole.values()) * self.expected / self.groups)

    def layer_of_group(self) -> Layer:
        """Return the layer of one group: what is stored for gate and up are two linears there."""
        made = []
        for end, of, k, n, r in (
            ("gate", "gate_up", self.k, self.n, self.ranks[0]),
            ("up", "gate_up", self.k, self.n, self.ranks[0]),
            ("down", "down", self.n, self.k, self.ranks[1]),
        ):
            pair = LowRank(
                u=Weight(name=f"{of}_u", k=k, n=r, format=self.dtype),
                v=Weight(name=f"{end}_v", k=r, n=n, format=self.dtype),
            )
            weight = Weight(name=end, k=k, n=n, format=self.weight * self.mx)
            made.append(
                Linear(
                    n=n, weight=NOTHING if self.weight == FACTORS else weight, low_rank=pair,
                    bias=f"{end}_bias" * getattr(self, f"{of}_bias"),
                    activation=self.activation if end == "gate" and not self.limit else "identity",
                )
            )  # fmt: skip
        return Layer(
            m=self.m, k=self.k, linears=tuple(made[:2]), combine=MULTIPLY, down=made[2],
            dtype=FP8 if self.weight == "fp8" else self.dtype, x_format=self.dtype,
            kept_dtype=self.dtype,
        )  # fmt: skip

    def estimates(self, arrays: tuple[Array, ...], typical: bool) -> Iterable[Estimate]:
        """Return y before it is rounded; of many tokens the rows of picks are rounded, too."""
        check_arrays(self, arrays)
        named = {t.name: a for t, a in zip(self.inputs(), arrays, strict=True)}
        index, gates, x = (np.asarray(named[name], np.float64) for name in ("index", "gates", "x"))
        total = Estimate(np.zeros(x.shape), np.zeros(x.shape), typical)
        layer, kind = self.layer_of_group(), _Clamped if self.limit else Estimates
        for group in (group for group in np.unique(index).astype(int) if group >= 0):
            factor = np.where(index == group, gates, 0.0).sum(1)[:, None]
            (y,) = kind(self, layer, {"x": x} | self._of_group(named, group), typical).results()
            y = y if self.m <= FEW else y.rounded(self.dtype)
            total = total.with_sum(y.scaled(factor))
            total = total.in_fp32(total.value, total.error)
        return [total]

    def _of_group(self, named: dict[str, Array], group: int) -> dict[str, Array]:
        """Return the operands of a group's linears in float64, weights as they multiply."""
        of = {name: array[group] for name, array in named.items() if name not in _OF_TOKENS}
        for name, inputs in (("gate_up", self.k), ("down", self.features)):
            if self.mx:
                data, scales = of[name], of.pop(f"{name}_scale")
                of[name] = from_nki(data, scales, MX[self.weight])[:inputs]
            elif name in of and self.weight_layout == "col":
                of[name] = of[name].T
        columns = np.arange(2 * self.features).reshape(2, -1)
        if self.halves == "interleaved":
            columns = columns.reshape(-1, 2).T
        for name in [name for name in of if name.startswith("gate_up") and name != "gate_up_u"]:
            for end, own in zip(("gate", "up"), columns, strict=True):
                of[name.replace("gate_up", end)] = of[name][..., own]
        if "down_u" in of:  # it has no rows of the features that blocks are filled up with
            of["down_u"] = np.pad(of["down_u"], ((0, self.features - self.n), (0, 0)))
        return {name: np.asarray(array, np.float64) for name, array in of.items()}

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
        words = [f"experts m{self.m} k{self.k} g{self.groups} top{self.top_k} n{self.n}"]
        words += ["r{}_{}".format(*self.ranks)] * any(self.ranks)
        words += [self.weight, self.dtype, "clamped" * bool(self.limit)]
        return " ".join(word for word in words if word)


class _Clamped(Estimates):
    """The results of a group whose gate and up are clamped before their product."""

    def gated(self, gate: Estimate, up: Estimate) -> Estimate:
        """Return h, as the head of this file says it."""
        spec = self.spec
        g, u = np.minimum(gate.value, spec.limit), np.clip(up.value, -spec.limit, spec.limit)
        active = Estimate(g / (1 + np.exp(-spec.slope * g)), 1.1 * gate.error, self.typical)
        h = active.scaled(u + spec.plus, up.error)
        return h.off_by(_CLAMPED_ROUNDINGS * FP32_ROUNDOFF * (np.abs(h.value) + np.abs(g) + 1))
