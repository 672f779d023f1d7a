"""The spec of adapters in one batch: a linear layer of all tokens, and a branch for each.

    y[t] = activation(x[t] w + gain_i (x[t] u_i) v_i + bias), i = index[t]; no branch for index -1

The factors of all adapters are stacked: u is [k, groups r] and v [groups r, n], rows r i to r i + r
of the rank being adapter i. One product of all tokens takes all of them, p = x u, and p is
multiplied by 0 where its row belongs to another adapter than its token. For one token, and for half
as many tokens as adapters, a kernel gathers the factors of each token instead, if they lie in rows:
u as [groups r, k], layout "col", and v as [groups r, n], layout "row".
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import WEIGHTS, KernelSpec, TensorSpec
from nmm_compiler.kernels.linear.layer import Groups, Linear, LowRank, Weight
from nmm_compiler.kernels.linear.spec import LinearSpec
from nmm_compiler.kernels.tiling import lay
from nmm_compiler.targets import Target


def check_gathers(spec: KernelSpec, target: Target) -> None:
    """Raise SpecError unless the target's DMA engines take rows that an index chooses."""
    if not target.dma_generates_descriptors:
        raise SpecError(
            f"{spec.short()}: the device writes the DMA descriptors of chosen rows on trn2 and "
            f"trn3; {target.name} does not, so keep one weight for all tokens there"
        )


_FEW = 64
"""Tokens up to which the factors of each are gathered: TensorE turns the rows of u."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptersSpec(LinearSpec):
    """y = activation(x w + gain_i (x u_i) v_i + bias) for the adapter i that index[t] names.

    r: the rank of one adapter, n: output features, groups: adapters. base: whether there is a w.
    Operands: x, u, v, w, bias, then index [m], -1 for a token without an adapter, and row_scale
    [groups r], the gain of each adapter, r times.
    """

    r: int
    n: int
    groups: int
    dtype: str = "bfloat16"
    x_layout: str = "row"
    out_layout: str = "row"
    u_layout: str = "col"
    v_layout: str = "row"
    w_layout: str = "row"
    bias: bool = False
    activation: str = "identity"
    base: bool = True

    family: ClassVar[str] = "adapters"
    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "r", "n", "groups")
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    @property
    def slots(self) -> int:
        """Groups whose factors are gathered, one for each token; 0 where all are loaded."""
        lie = self.u_layout == "col" and self.v_layout == "row"
        few = self.m == 1 or (self.m <= _FEW and 2 * self.m <= self.groups)
        return self.m if lie and few and (self.lnc == 1 or self.base) else 0

    def _layer(self) -> dict[str, Any]:
        rank = self.r * (self.slots or self.groups)
        u = self._weight("u", self.k, rank)
        u = dataclasses.replace(u, layout="row") if self.slots else u  # a gather turns it
        pair = LowRank(u=u, v=self._weight("v", rank, self.n))
        one = Linear(
            n=self.n, low_rank=pair, bias="bias" * self.bias, activation=self.activation,
            weight=self._weight("w", self.k, self.n) if self.base else Weight(),
            layout=self.out_layout,
            groups=Groups(count=self.groups, rank=self.r, slots=self.slots),
        )  # fmt: skip
        return {"linears": (one,)}

    def splits(self) -> tuple[str, ...]:
        """Return the ways in which the cores can share the work: gathered factors by outputs."""
        ways = super().splits()
        return tuple(way for way in ways if way in ("", WEIGHTS)) if self.slots else ways

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, the factors of all adapters, w, bias, index, row_scale, the norm, residual."""
        first, *rest = super().inputs()
        rank = self.r * self.groups
        whole = {"u": (self.k, rank), "v": (rank, self.n)}
        made = [
            dataclasses.replace(one, shape=lay(whole[one.name], self.layout_of(one.name)))
            if one.name in whole
            else one
            for one in rest
        ]
        chosen = (
            TensorSpec(name="index", shape=(self.m,), dtype="int32", below=self.groups),
            TensorSpec(name="row_scale", shape=(rank,), dtype="float32"),
        )
        last = len(made) - sum((self.norm_gain, self.norm_bias, self.residual))
        return (first, *made[:last], *chosen, *made[last:])

    def check(self, target: Target) -> None:
        """Raise SpecError if the target cannot compute the spec with any schedule."""
        super().check(target)
        check_gathers(self, target)

    def minimal_hbm_bytes(self) -> int:
        """Return every operand and the result once, of adapters those that tokens can choose."""
        unread = max(0, self.groups - self.m) * self.r * (self.k + self.n)
        size = next(one.bytes for one in self.inputs() if one.name == "u")
        return super().minimal_hbm_bytes() - unread * size // (self.k * self.r * self.groups)

    def short(self) -> str:
        """Return family, sizes and dtype."""
        base = " base" if self.base else ""
        return (
            f"adapters m{self.m} k{self.k} g{self.groups} r{self.r} n{self.n} "
            f"{self.formats()}{base}"
        )
