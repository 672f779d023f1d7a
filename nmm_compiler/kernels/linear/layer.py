"""What a kernel of linear layers computes, as data: the layers of one x, and the one behind them.

    y_i = activation_i(x w_i + scale_i (x u_i) v_i + bias_i)          several linears of one x
    h = y_0 * y_1,  y = h w + (h u) v + bias                          combine "multiply", and down

A linear has a dense weight, a pair of thin factors, or both. Linears may share u. The names of the
public specs (specs.py) are constructors of this record; schedules and kernels read only the record.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.kernels.packed_formats import MX, PackedFormat
from nmm_compiler.kernels.pieces.weight_plan import WeightPlan
from nmm_compiler.kernels.tiling import STRIDED, tiles
from nmm_compiler.records import Record

MULTIPLY = "multiply"

NORMS = ("none", "rms", "layer")
NORMED = (
    "norm", "norm_gain", "norm_bias", "norm_offset", "norm_eps", "residual",
)  # fmt: skip
"""The fields of a spec that say what stands before and after its products."""

# NKI's names of the activations.
OPS = {
    "identity": "copy", "relu": "relu", "silu": "silu", "gelu": "gelu",
    "gelu_tanh": "gelu_apprx_tanh",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight(WeightPlan, Record):
    """A matrix [k, n] in HBM, and how it arrives in SBUF; k 0 for none.

    name: of the operand. format: its number format where it is not that of the layer, as of plain
    factors beside an fp8 weight. layout: "row" as it multiplies, "col" stored [n, k], or one of
    RUNS, its rows as `rows_in_runs` says. cut: the dimension of which each of two cores has half,
    -1 for none. apart, which a schedule sets: from one output of a tile to the next.
    """

    name: str = ""
    format: str = ""
    layout: str = "row"
    cut: int = -1
    apart: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mx_bytes", self.mx.bits // 2 if self.mx else 0)

    @property
    def mx(self) -> PackedFormat | None:
        """The format of a weight of MX blocks, None for any other."""
        return MX.get(self.format)

    @property
    def element(self) -> str:
        """NKI's dtype of four elements of MX blocks; of any other weight it means nothing."""
        return f"{self.mx.element_name}_x4" if self.mx else "uint8"

    @property
    def scale(self) -> str:
        """The name of the operand with its scales, where it has some."""
        return f"{self.name}_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups(Record):
    """Factors that an index chooses for each token: of `count` groups, 0 where nothing is chosen.

    rank: of one group's factors, where the factors of all groups are stacked and the dense weight
    is one for all. slots: groups whose factors a kernel gathers, one for each token, 0 where it
    loads those of all.
    """

    count: int = 0
    rank: int = 0
    slots: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(Record):
    """Two factors, and what stands between them: p = activation(scale x u + bias), or its RMS norm.

    bias, gain: names of operands, "" for none. tile: where p^T begins in the strip of all p^T.
    place: among all pairs. scales: what multiplies p: "factor", "tensor", "channel", "group", a
    number for each element of p, "" if nothing.
    """

    u: Weight = Weight()
    v: Weight = Weight()
    scale: float = 1.0
    bias: str = ""
    activation: str = "identity"
    gain: str = ""
    eps: float = 1e-6
    tile: int = 0
    place: int = 0
    scales: str = ""
    groups: Groups = Groups()

    @property
    def numbers(self) -> str:
        """The operand with a number for each feature of p, "" where there is none."""
        if self.u.format == FP8:
            return "branch_scale"
        return self.gain or "row_scale" * (self.groups.count > self.groups.slots == 0)

    @property
    def scaled(self) -> bool:
        """Whether a tensor multiplies p: scales of fp8 numbers, the gain of the norm, or groups."""
        return self.scales in ("tensor", "channel", "group")

    @property
    def r(self) -> int:
        """The rank, 0 for no factors."""
        return self.u.n

    @property
    def tiles(self) -> int:
        """The tiles of p^T."""
        return tiles(self.u.n, 128)

    @property
    def op(self) -> str:
        """NKI's name of the activation."""
        return OPS[self.activation]

    @property
    def shaped(self) -> bool:
        """Whether a function stands between the factors."""
        return bool(self.bias or self.gain) or self.activation != "identity"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Record):
    """One linear layer: its weight, its factors, its epilogue; n 0 for none.

    bias: the name of its operand. layout: "row" for tokens on the partitions, else outputs.
    place: among all linears of the kernel. cut: as of a weight, of the result. A schedule sets
    where a result that comes by rows has sums with outputs on the partitions: turned, TensorE turns
    them; runs, of one token, a partition has neighbours, which are stored as they lie.
    """

    n: int = 0
    weight: Weight = Weight()
    low_rank: LowRank = LowRank()
    bias: str = ""
    activation: str = "identity"
    layout: str = "row"
    place: int = 0
    cut: int = -1
    turned: bool = False
    runs: bool = False

    @property
    def op(self) -> str:
        """NKI's name of the activation."""
        return OPS[self.activation]

    @property
    def last(self) -> Weight:
        """The weight with this linear's outputs: v, or the dense one."""
        return self.low_rank.v if self.low_rank.r else self.weight

    @property
    def scaled(self) -> Weight:
        """The weight whose scales multiply the sums, where they are of fp8 numbers."""
        return self.weight if self.weight.k else self.low_rank.v

    @property
    def rows(self) -> bool:
        """Whether tokens come first in the result."""
        return self.layout == "row"

    @property
    def by_rows(self) -> bool:
        """Whether tokens lie on the partitions in the sums."""
        return self.rows and not (self.turned or self.runs)

    @property
    def normed(self) -> bool:
        """Whether one over the norm of p multiplies the sums."""
        return bool(self.low_rank.gain)

    def products(self) -> tuple[Weight, ...]:
        """Return u, v and the dense weight, those there are."""
        every = (self.low_rank.u, self.low_rank.v, self.weight)
        return tuple(weight for weight in every if weight.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Record):
    """The linears of one x, and what becomes of their results.

    combine: "multiply" for one result, activation(gate) * up. down: a linear of that. scales: fp8
    weights have one scale, "tensor", or one for each output, "channel"; "" for other formats.
    x_cut: the dimension of which each of two cores has half, -1 for none; out_cut that of results.
    tp: ranks that share the product, and sum x u. A schedule sets x_load, how x gets onto the
    partitions; x_chunk, its rows a load, 0 where it comes with the first weight; order, which rows
    of x share a partition: consecutive ones, or every 128th, as transposes leave them, or "fours"
    where products of MX blocks take x; x_parts, of x on its way through TensorE.
    """

    m: int
    k: int
    linears: tuple[Linear, ...]
    combine: str = ""
    down: Linear = Linear()
    dtype: str = "bfloat16"
    x_format: str = "bfloat16"
    result_dtype: str = "bfloat16"
    kept_dtype: str = "bfloat16"
    x_layout: str = "row"
    scales: str = ""
    norm: str = "none"
    norm_gain: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    norm_eps: float = 1e-6
    residual: bool = False
    x_cut: int = -1
    split: str = ""
    tp: int = 1
    x_load: str = "rows"
    x_chunk: int = 0
    order: str = STRIDED
    x_parts: int = 1
    nothing: Weight = Weight()

    @functools.cached_property
    def factors(self) -> tuple[LowRank, ...]:
        """The pairs of factors with different u, each with its place in the strip of all p^T."""
        made: dict[str, LowRank] = {}
        for linear in self.linears:
            if linear.low_rank.r:
                made.setdefault(linear.low_rank.u.name, linear.low_rank)
        return tuple(made.values())

    @property
    def down_pairs(self) -> tuple[LowRank, ...]:
        """The factors behind h, where there are some."""
        return (self.down.low_rank,) if self.down.low_rank.r else ()

    @property
    def pairs(self) -> tuple[LowRank, ...]:
        """All pairs of factors with different u."""
        return (*self.factors, *self.down_pairs)

    @property
    def p_tiles(self) -> int:
        """The tiles of the strip of all p^T."""
        return sum(pair.tiles for pair in self.factors)

    @property
    def branch_tiles(self) -> int:
        """Tiles of the rank that each pair of fp8 factors has in the scales of all, 0 without."""
        return max((one.tiles for one in self.pairs if one.u.format == FP8), default=0)

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The linears of x, and the one of h."""
        return (*self.linears, *((self.down,) if self.down.n else ()))

    @property
    def results(self) -> tuple[Linear, ...]:
        """The linears whose outputs are the results; of a product of two the last."""
        if not self.combine:
            return self.linears
        last = self.down if self.down.n else self.linears[-1]
        return (dataclasses.replace(last, place=0),)

    @property
    def h_tiles(self) -> int:
        """The tiles of h^T that a core makes, 0 where nothing follows h."""
        return tiles(self.linears[0].n, 128) if self.down.n else 0

    @property
    def x_tiles(self) -> int:
        """The tiles of the strip of x."""
        return 4 * tiles(self.k, 512) if self.mx else tiles(self.k, 128)

    @functools.cached_property
    def mx(self) -> bool:
        """Whether the dense weights are of MX blocks, for which left factors are quantized, too."""
        return any(linear.weight.mx for linear in self.linears)

    @property
    def fp8(self) -> bool:
        """Whether weights are fp8 numbers with scales."""
        return self.dtype == FP8

    @property
    def fp8_x(self) -> bool:
        """Whether x, too, is fp8 numbers."""
        return self.x_format == FP8

    @property
    def gathers(self) -> bool:
        """Whether the factors that tokens choose are gathered."""
        return any(pair.groups.slots for pair in self.factors)

    @property
    def x_later(self) -> str:
        """How the first product loads x, "none" where it is in SBUF before."""
        return "none" if self.x_chunk else self.x_load

    @property
    def x_aligned(self) -> bool:
        """Whether the tiles of x are multiples of 16 elements apart."""
        pairs = any(weight.double_row for weight in self.weights())
        return pairs or self.x_load == "dma"

    @property
    def exchanges_p(self) -> bool:
        """Whether two cores sum x u over half of x each."""
        return self.x_cut >= 0 and self.split == "weights"

    @property
    def exchanges_h(self) -> bool:
        """Whether each of two cores needs the other's half of h."""
        return self.split == "weights" and self.down.n > 0 and self.down.weight.k > 0

    @property
    def exchanges_down(self) -> bool:
        """Whether two cores sum h u over half of h each; where each needs all of h, none does."""
        return self.split == "weights" and self.down.low_rank.r > 0 and not self.down.weight.k

    @property
    def exchanges(self) -> int:
        """How often two cores exchange values."""
        return self.exchanges_p + self.exchanges_h + self.exchanges_down

    def format_of(self, weight: Weight) -> str:
        """Return the number format of a weight."""
        return weight.format or self.dtype

    def weights(self) -> tuple[Weight, ...]:
        """Return every weight, in the order of the operands."""
        if self.combine:
            every = [weight for linear in self.layers for weight in linear.products()]
        else:
            every = [pair.u for pair in self.factors]
            every += [one.low_rank.v for one in self.linears if one.low_rank.r]
            every += [one.weight for one in self.linears if one.weight.k]
        return tuple(every)

    def of_x(self, weight: Weight) -> bool:
        """Return whether a weight multiplies x."""
        every = {pair.u.name for pair in self.factors}
        return weight.name in every | {linear.weight.name for linear in self.linears}

    def each(self, change: Any) -> Layer:
        """Return the layer with each linear replaced by change(linear)."""
        down = change(self.down) if self.down.n else self.down
        return dataclasses.replace(self, linears=tuple(map(change, self.linears)), down=down)


def placed(layer: Layer) -> Layer:
    """Return the layer with the places of its linears, and of their p^T in one strip."""
    made, seen = [], dict[str, LowRank]()
    for place, linear in enumerate(layer.layers):
        pair = linear.low_rank
        if pair.r:
            behind = linear is layer.down  # its p^T is a strip of its own
            tile = 0 if behind else sum(known.tiles for known in seen.values())
            new = dataclasses.replace(pair, tile=tile, place=len(seen))
            known = seen.setdefault(pair.u.name, new)
            own = "channel" if pair.u.format == FP8 else ""
            scales = own if pair.u.format else layer.scales
            scales = "channel" if pair.gain else scales or "factor" * (pair.scale != 1.0)
            scales = "group" if pair.groups.count else scales
            pair = dataclasses.replace(pair, tile=known.tile, place=known.place, scales=scales)
        made.append(dataclasses.replace(linear, place=place, low_rank=pair))
    down = made.pop() if layer.down.n else layer.down
    return dataclasses.replace(layer, linears=tuple(made), down=down)


def half(layer: Layer, split: str) -> Layer:
    """Return what one of two cores computes: half of the tokens, or half of every weight.

    Of weights that means half of the outputs. Where all products of x are factors, each core also
    sums over half of x, and so does a low-rank down over its half of h.
    """
    if split == "tokens":
        x_cut = 0 if layer.x_layout == "row" else 1
        made = dataclasses.replace(layer, m=layer.m // 2, x_cut=x_cut, split=split)
        return made.each(lambda one: dataclasses.replace(one, cut=0 if one.rows else 1))
    # each core can sum over half of x where all of its products are factors
    plain = layer.norm == "none" and (not layer.fp8 or len(layer.linears) == 1 or layer.combine)
    dense = any(one.weight.k for one in layer.linears)
    sums = plain and not dense and layer.k % 256 == 0

    def halved(weight: Weight, dim: int) -> Weight:
        """Return half of a weight, of its inputs, 0, or of its outputs, 1."""
        along = dim if weight.layout == "row" else 1 - dim
        size: dict[str, Any] = {"n": weight.n // 2} if dim else {"k": weight.k // 2}
        return dataclasses.replace(weight, cut=along, **size) if weight.k else weight

    def of(linear: Linear, whole: bool) -> Linear:
        pair = linear.low_rank
        u = pair.u if whole else halved(pair.u, 0)
        return dataclasses.replace(
            linear, n=linear.n // 2, weight=halved(linear.weight, 1),
            low_rank=dataclasses.replace(pair, u=u, v=halved(pair.v, 1)),
            cut=1 if linear.rows else 0,
        )  # fmt: skip

    return dataclasses.replace(
        layer,
        k=layer.k // 2 if sums else layer.k,
        x_cut=int(layer.x_layout == "row") if sums else -1,
        split=split,
        linears=tuple(of(linear, not sums) for linear in layer.linears),
        down=of(layer.down, layer.down.weight.k > 0) if layer.down.n else layer.down,
    )
