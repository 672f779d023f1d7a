"""The specs of linear layers: one base, derived from the record of the layer, and its constructors.

    LowRankSpec         y = activation(x w + scale p v + bias), p = activation(x u + inner_bias)
    LowRankSharedSpec   several (x u_i) v_ij + bias, as q, k and v of an attention
    MatmulSpec          y = activation(x w + bias)
    AdaptersSpec        y = activation(x w + gain_i (x u_i) v_i + bias), i chosen for each token
    GatedMLPUpSpec      h = activation(x gate + gate_bias) * (x up + up_bias)
    GatedMLPSpec        y = h down + down_bias

A "col" layout means that an operand is passed, or the result comes back, transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import TensorSpec, check_name, check_sizes
from nmm_compiler.kernels.linear.layer import MULTIPLY, Groups, Linear, LowRank, Weight
from nmm_compiler.kernels.linear.spec import LinearSpec, MatmulSpec
from nmm_compiler.kernels.tiling import item_bytes, lay
from nmm_compiler.targets import Target

RANK_AXES = ("rows",)
"""What ranks may cut: the rows of u, with the features of x."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSpec(LinearSpec):
    """y[m, n] = activation(x w + scale p v + bias), p = inner_activation(x u + inner_bias).

    x is [m, k], u [k, r], v [r, n]; inner_activation and inner_bias [r] are those of a bottleneck
    adapter, and base adds the dense product x w. inner_norm, for latent attention: p is the RMS
    norm of x u over the rank, with inner_eps under the root, times inner_gain [r].

    tp: ranks that compute the product together, each from its shard, whose sizes these are.
    tp_axis: "rows", x and u are cut by inputs, and x u is summed before v. `whole` and `sharded` go
    between the product and its shards; reference and error bounds take the operands of the whole.
    """

    r: int
    n: int
    u_layout: str = "row"
    v_layout: str = "row"
    bias: bool = False
    activation: str = "identity"
    base: bool = False
    scale: float = 1.0
    w_layout: str = "row"
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
        self._check_ranks()
        if self.fp8 and self.base:
            raise SpecError(
                "lowrank: base goes with plain factors and a plain w; take family linear with "
                "weight 'fp8' for an fp8 w beside plain factors"
            )
        if self.inner and (self.fp8 or self.scale != 1.0):
            raise SpecError(
                f"lowrank: inner_activation {self.inner_activation!r}, inner_bias "
                f"{self.inner_bias} and inner_norm {self.inner_norm} go with scale 1 and plain "
                f"dtypes, not with scale {self.scale:g} and {self.dtype}; fold the scale into v, "
                "or use bfloat16"
            )
        object.__setattr__(self, "inner_eps", self.inner_eps if self.inner_norm else 1e-6)
        if self.inner_norm and (
            self.inner_bias or self.inner_activation != "identity" or self.base
        ):
            raise SpecError(
                "lowrank: inner_norm goes without inner_bias, inner_activation and base; drop "
                "them, or make the products kernels of their own"
            )

    def _check_ranks(self) -> None:
        """Raise SpecError unless the ranks can compute the product together."""
        if not isinstance(self.tp, int) or isinstance(self.tp, bool) or not 0 < self.tp <= 64:
            raise SpecError(f"lowrank: tp is {self.tp!r}; pass 1 to 64 ranks")
        if self.tp == 1 and self.tp_axis:
            raise SpecError(f"lowrank: tp_axis is {self.tp_axis!r} and tp 1; pass tp, or no axis")
        check_name("tp_axis", self.tp_axis, RANK_AXES if self.tp > 1 else ("",))
        if self.tp > 1 and (self.base or self.inner_norm):
            raise SpecError(
                f"lowrank: tp_axis {self.tp_axis!r} sums the low-rank product alone, and a norm "
                f"takes whole sums; base is {self.base}, inner_norm {self.inner_norm}: cut v by "
                "its outputs instead, which sums nothing, in calls without tp"
            )

    def _layer(self) -> dict[str, Any]:
        pair = LowRank(
            u=self._weight("u", self.k, self.r), v=self._weight("v", self.r, self.n),
            scale=self.scale, bias="inner_bias" * self.inner_bias,
            activation=self.inner_activation, gain="inner_gain" * self.inner_norm,
            eps=self.inner_eps,
        )  # fmt: skip
        one = Linear(
            n=self.n, low_rank=pair, bias="bias" * self.bias, activation=self.activation,
            weight=self._weight("w", self.k, self.n) if self.base else Weight(),
            layout=self.layout_of("out"),
        )  # fmt: skip
        return {"linears": (one,)}

    def whole(self) -> LowRankSpec:
        """Return the spec of the product that all ranks compute together."""
        one = dataclasses.replace(self, k=self.k * self.tp, tp=1, tp_axis="")
        return one if self.tp > 1 else self

    def sharded(self, tp: int, axis: str) -> LowRankSpec:
        """Return the spec of one of `tp` ranks; raises ShapeError where sizes do not divide."""
        if self.k % tp:
            raise ShapeError(
                f"{self.short()}: k is {self.k}, which does not divide by {tp} ranks; pad it"
            )
        return dataclasses.replace(self, k=self.k // tp, tp=tp, tp_axis=axis)

    def _cut_dims(self) -> tuple[int, int]:
        """Return the dimensions of x and of u of which ranks have parts."""
        return int(self.x_layout == "row"), int(self.u_layout == "col")

    def shards(self, *arrays: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the operands of each rank, from those of the whole."""
        made = []
        for rank in range(self.tp):
            own = [slice(rank * self.k, (rank + 1) * self.k)]
            cut = [
                array[tuple([slice(None)] * dim + own)]
                for array, dim in zip(arrays, self._cut_dims(), strict=False)
            ]
            made.append((*cut, *arrays[2:]))
        return tuple(made)

    def joined(self, *arrays: Any) -> tuple[Any, ...]:
        """Return the operands of the whole, of which every rank has `arrays`."""
        cut = [
            np.concatenate([array] * self.tp, dim)
            for array, dim in zip(arrays, self._cut_dims(), strict=False)
        ]
        return (*cut, *arrays[2:])

    def exchanged_bytes(self) -> int:
        """Return the bytes of each rank that the kernel sums over the ranks."""
        return self.m * self.r * item_bytes(self.layer.kept_dtype) if self.tp > 1 else 0

    def check(self, target: Target) -> None:
        """Raise SpecError if the target cannot compute the spec with any schedule."""
        super().check(target)
        if self.tp > 1 and "nki.collectives.all_reduce" in target.absent_instructions:
            raise SpecError(
                f"{self.short()}: nki.collectives are documented for trn2 and trn3; on "
                f"{target.name} pass tp=1 and sum between kernels"
            )

    @property
    def inner(self) -> bool:
        """Whether a function stands between the products."""
        return self.inner_bias or self.inner_norm or self.inner_activation != "identity"

    def short(self) -> str:
        """Return what others say, what stands between the products, and that ranks sum."""
        inner = f" inner {'rms' if self.inner_norm else self.inner_activation}" * self.inner
        return super().short() + inner + " rows" * (self.tp > 1)


Pair = tuple[int, tuple[int, ...]]
"""A rank, and the output features of every v that follows that u."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSharedSpec(LinearSpec):
    """y_ij = activation((x u_i) v_ij + bias), x [m, k], u_i [k, r_i], v_ij [r_i, n_ij].

    pairs: (r_i, (n_i1, n_i2, ...)) for each u; a single n may be given as a number, a pair as the
    text "r:n,n". bias, activation and out_layout: one value, or one per result, in the order of
    the pairs. u_layout and v_layout hold for all u and all v. Operands: x, every u, every v, then
    the biases there are.
    """

    pairs: tuple[Pair, ...]
    u_layout: str = "row"
    v_layout: str = "row"
    bias: bool | tuple[bool, ...] = False
    activation: str | tuple[str, ...] = "identity"

    family: ClassVar[str] = "lowrank_shared"
    sizes: ClassVar[tuple[str, ...]] = ("m", "k")
    many: ClassVar[bool] = True
    adds_residual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", read_pairs(self.pairs))
        for i, (r, ns) in enumerate(self.pairs):
            check_sizes(self.family, {f"r of pair {i}": r} | {f"n of pair {i}": n for n in ns})
        for name in ("bias", "activation", "out_layout"):
            each = self.each(name, sum(len(ns) for _, ns in self.pairs))
            same = all(value == each[0] for value in each)
            object.__setattr__(self, name, each[0] if same else each)  # equal specs, equal JSON
        super().__post_init__()

    def layout_of(self, name: str) -> str:
        """Return the layout in which an operand is passed: all u, and all v, have one."""
        return super().layout_of(name[0])

    def _layer(self) -> dict[str, Any]:
        sizes = [(i, r, n) for i, (r, ns) in enumerate(self.pairs) for n in ns]
        names = "bias", "activation", "out_layout"
        ends = zip(*(self.each(name, len(sizes)) for name in names), strict=True)
        linears = [
            Linear(
                n=n, bias=f"bias{j}" * bias, activation=activation, layout=layout,
                low_rank=LowRank(
                    u=self._weight(f"u{i}", self.k, r), v=self._weight(f"v{j}", r, n)
                ),
            )
            for j, ((i, r, n), (bias, activation, layout)) in enumerate(
                zip(sizes, ends, strict=True)
            )
        ]  # fmt: skip
        return {"linears": tuple(linears)}

    def parts(self) -> tuple[LowRankSpec, ...]:
        """Return the lowrank kernel of every result."""
        known = {field.name for field in dataclasses.fields(LowRankSpec)}
        shared = {name: value for name, value in vars(self).items() if name in known}
        return tuple(
            LowRankSpec(
                **shared | {
                    "r": one.low_rank.r, "n": one.n, "out_layout": one.layout,
                    "bias": bool(one.bias), "activation": one.activation,
                }
            )
            for one in self.layer.linears
        )  # fmt: skip

    def short(self) -> str:
        """Return family, sizes and dtype: 256x2048 128x512_512 is one v, then two v of one u."""
        pairs = " ".join(f"{r}x{'_'.join(map(str, ns))}" for r, ns in self.pairs)
        return f"lowrank_shared m{self.m} k{self.k} {pairs} {self.formats()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPUpSpec(LinearSpec):
    """h[m, n] = activation(x gate + gate_bias) * (x up + up_bias) with x [m, k].

    gate_r, up_r: ranks; 0 for a dense weight; None takes r, and 0 where r is None too. Operands: x,
    then gate_u, gate_v (or gate_w), up_u, up_v (or up_w), then the biases. A weight is passed as it
    multiplies from the right, or transposed with weight_layout "col", as nn.Linear stores it.
    """

    n: int
    r: int | None = None
    gate_r: int | None = None
    up_r: int | None = None
    activation: str = "silu"
    weight_layout: str = "row"
    gate_bias: bool = False
    up_bias: bool = False

    family: ClassVar[str] = "gated_mlp_up"
    adds_residual: ClassVar[bool] = False
    branches: ClassVar[tuple[str, ...]] = ("gate", "up")

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

    def _linear(self, branch: str) -> Linear:
        rank, (first, last) = self.rank(branch), self.ends(branch)
        pair, weight = LowRank(), Weight()
        if rank:
            pair = LowRank(
                u=self._weight(f"{branch}_u", first, rank),
                v=self._weight(f"{branch}_v", rank, last),
            )
        else:
            weight = self._weight(f"{branch}_w", first, last)
        kept = branch != "down" and "down" in self.branches
        return Linear(
            n=last, weight=weight, low_rank=pair,
            bias=f"{branch}_bias" * getattr(self, f"{branch}_bias"),
            activation=self.activation if branch == "gate" else "identity",
            layout="col" if kept else str(self.out_layout),
        )  # fmt: skip

    def _layer(self) -> dict[str, Any]:
        gate, up, *down = map(self._linear, self.branches)
        last = down[0] if down else Linear()
        return {"linears": (gate, up), "combine": MULTIPLY, "down": last}

    def short(self) -> str:
        """Return family, sizes, ranks and dtype."""
        ranks = "_".join(str(self.rank(branch)) for branch in self.branches)
        return f"{self.family} m{self.m} k{self.k} r{ranks} n{self.n} {self.formats()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPSpec(GatedMLPUpSpec):
    """y[m, k] = (activation(x gate + gate_bias) * (x up + up_bias)) down + down_bias.

    As GatedMLPUpSpec, with down_u, down_v (or down_w) after the up projection.
    """

    down_r: int | None = None
    down_bias: bool = False

    family: ClassVar[str] = "gated_mlp"
    adds_residual: ClassVar[bool] = True
    branches: ClassVar[tuple[str, ...]] = ("gate", "up", "down")


_FEW_GATHERED = 64
"""Tokens up to which the factors of each are gathered: TensorE turns the rows of u."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptersSpec(LinearSpec):
    """y = activation(x w + gain_i (x u_i) v_i + bias) for the adapter i that index[t] names.

    The factors of all adapters are stacked: u is [k, groups r] and v [groups r, n], rows r i to
    r i + r of the rank being adapter i. One product of all tokens takes all of them, p = x u, and p
    is multiplied by 0 where its row belongs to another adapter than its token. For one token, and
    for half as many tokens as adapters, a kernel gathers the factors of each token instead, if they
    lie in rows: u as [groups r, k], layout "col", and v as [groups r, n], layout "row".

    r: the rank of one adapter, n: output features, groups: adapters. base: whether there is a w.
    Operands: x, u, v, w, bias, then index [m], -1 for a token without an adapter, and row_scale
    [groups r], the gain of each adapter, r times.
    """

    r: int
    n: int
    groups: int
    u_layout: str = "col"
    v_layout: str = "row"
    w_layout: str = "row"
    bias: bool = False
    activation: str = "identity"
    base: bool = True

    family: ClassVar[str] = "adapters"
    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "groups", "r", "n")
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    @property
    def slots(self) -> int:
        """Groups whose factors are gathered, one for each token; 0 where all are loaded."""
        lie = self.u_layout == "col" and self.v_layout == "row"
        few = self.m == 1 or (self.m <= _FEW_GATHERED and 2 * self.m <= self.groups)
        return self.m if lie and few and (self.lnc == 1 or self.base) else 0

    def _layer(self) -> dict[str, Any]:
        rank = self.r * (self.slots or self.groups)
        u = self._weight("u", self.k, rank)
        u = dataclasses.replace(u, layout="row") if self.slots else u  # a gather turns it
        pair = LowRank(
            u=u, v=self._weight("v", rank, self.n),
            groups=Groups(count=self.groups, rank=self.r, slots=self.slots),
        )  # fmt: skip
        one = Linear(
            n=self.n, low_rank=pair, bias="bias" * self.bias, activation=self.activation,
            weight=self._weight("w", self.k, self.n) if self.base else Weight(),
            layout=self.layout_of("out"),
        )  # fmt: skip
        return {"linears": (one,)}

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
            TensorSpec(
                name="index", shape=(self.m,), dtype="int32", below=self.groups, token_dim=0
            ),
            TensorSpec(name="row_scale", shape=(rank,), dtype="float32"),
        )
        last = len(made) - sum((self.norm_gain, self.norm_bias, self.residual))
        return (first, *made[:last], *chosen, *made[last:])

    def minimal_hbm_bytes(self) -> int:
        """Return every operand and the result once, of adapters those that tokens can choose."""
        unread = max(0, self.groups - self.m) * self.r * (self.k + self.n)
        return super().minimal_hbm_bytes() - unread * item_bytes(self.dtype)


def read_pairs(pairs: Any) -> tuple[Pair, ...]:
    """Return pairs in their one form; each may be (r, n), (r, (n, n)) or the text "r:n,n".

    Raises SpecError for anything else.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        pairs = [pairs]
    made: list[Pair] = []
    for pair in pairs:
        try:
            if isinstance(pair, str):
                r, _, ns = pair.partition(":")
                made.append((int(r), tuple(int(n) for n in ns.split(","))))
            else:
                rank, after = pair
                made.append((rank, tuple(after) if isinstance(after, (tuple, list)) else (after,)))
        except (TypeError, ValueError):
            raise SpecError(
                f"lowrank_shared: pair {pair!r} is not a rank and the outputs of its v; write "
                "(256, 2048), (128, (512, 512)) or '128:512,512'"
            ) from None
    if not made or not all(ns for _, ns in made):
        raise SpecError("lowrank_shared: every u needs a v, and there must be one of each")
    return tuple(made)


SPECS = cast(
    "tuple[type[LinearSpec], ...]",
    (LowRankSpec, LowRankSharedSpec, MatmulSpec, GatedMLPUpSpec, GatedMLPSpec, AdaptersSpec),
)
