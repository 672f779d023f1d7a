"""The specs of few-bit weights with low-rank branches, y = activation(x w + (x u) v + bias).

    CorrectedSpec      one linear, or several of one x
    CorrectedMLPSpec   (activation(x gate) * (x up)) down, each with its branch

The weight is MX blocks (mxfp4, mxfp8), for which trn3's kernels round the left factor to MXFP8,
or fp8 with a scale an output. The branch is plain, and corrects what rounding the weight lost. MX
scales act inside of the products, so that both are one sum; beside fp8 weights v comes divided by
their scales, which multiply the sum. A branch of fp8 numbers has one scale a rank, which multiplies
x u: those of u and of v are one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import MX_PRODUCT, check_name
from nmm_compiler.kernels.linear.layer import MULTIPLY, Linear, LowRank, Weight
from nmm_compiler.kernels.linear.spec import LinearSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8, X_DTYPES
from nmm_compiler.kernels.packed_formats import FORMATS, MX
from nmm_compiler.kernels.tiling import FOURS, STRIDED
from nmm_compiler.targets import Target

MULTIPLIED = (*MX, "fp8")
"""The formats of a weight that TensorE multiplies as it is stored."""


def operand_name(name: str, end: str) -> str:
    """Return the name of an operand of one of several linears: w0 of end "0", up_w of "up"."""
    if name == "w_scale":
        return operand_name("w", end) + "_scale"
    return f"{end}_{name}" if end[:1].isalpha() else name + end


def reads_as_stored(target: Target, format: str) -> bool:
    """Return whether kernels of a target multiply weights of a format as they are stored."""
    if format in MX:
        return MX_PRODUCT not in target.absent_instructions
    return format in MULTIPLIED and target.float8_kernels


def first_layout(format: str, k: int, behind: bool) -> str:
    """Return the layout of a first factor of k inputs beside a weight: a run for each partition in
    order "fours" beside MX blocks, in the order of tiles behind h, where these divide k."""
    layout, block = (FOURS, 512) if format in MX else (STRIDED if behind and format else "row", 128)
    return "row" if k % block else layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedSpec(LinearSpec):
    """y[m, n] = activation(x w + (x u) v + bias) with x [m, k], u [k, rank], v [rank, n].

    n: outputs, or those of each of several linears, whose operands then end in their numbers; rank,
    bias, activation and out_layout may have a value for each, too. rank 0: no branch. weight: the
    format of w. MX: w is bytes [k / 4, n size] and w_scale [k / 32, n], as `for_nki` gives them; u
    of whole 512s has its rows in the order of `rows_in_runs(k, "fours")`. fp8: w is [k, n], w_scale
    [n], and v comes divided by it; behind h, u of whole 128s has its rows in the order of
    `rows_in_runs(n, "strided_rows")`. branch: "fp8" for a u and a v of such numbers; "" for those
    of x's dtype. Behind the other scales branch_scale then has a row for each pair, the scales of
    its ranks filled up with ones to as many whole 128s as the widest has.
    """

    n: int | tuple[int, ...]
    rank: int | tuple[int, ...] = 0
    weight: str = "mxfp4"
    branch: str = ""
    bias: bool | tuple[bool, ...] = False
    activation: str | tuple[str, ...] = "identity"

    family: ClassVar[str] = "linear"
    sizes: ClassVar[tuple[str, ...]] = ("m", "k")
    dtypes: ClassVar[tuple[str, ...]] = X_DTYPES
    shared: ClassVar[str] = "tokens, or of outputs, of MX weights fours"

    def __post_init__(self) -> None:
        check_name("weight", self.weight, tuple(FORMATS))
        check_name("branch", self.branch, ("", "fp8"))
        if self.weight not in MULTIPLIED:
            raise SpecError(
                f"{self.family}: no product takes {self.weight} weights; pass weight "
                f"{' or '.join(MULTIPLIED)}, or multiply the weight out for family matmul"
            )
        if self.weight == "fp8":
            object.__setattr__(self, "scales", "channel")
            object.__setattr__(self, "x_dtype", self.dtype)
        super().__post_init__()
        for k, n, r, _ in self._linears():
            self._check_sizes(k, n, r)

    def _check_sizes(self, k: int, n: int, r: int) -> None:
        """Raise ShapeError unless blocks divide a weight, and a branch beside it saves bytes."""
        for name, value, least in (("n", n, 1), ("rank", r, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ShapeError(f"{self.family}: {name} is {value!r}; pass {least} or more")
        if self.weight in MX and (k % 128 or n % 2):
            raise ShapeError(
                f"{self.family}: a {self.weight} weight [{k}, {n}]: products of MX blocks take "
                "whole 128s of inputs and an even number of outputs; pad it with zeros, or take fp8"
            )
        if self.weight in MX and self.norm != "none" and self.k % 512:
            raise ShapeError(
                f"{self.family}: a norm before MX products takes whole 512s of inputs, not "
                f"{self.k}; make the norm before the kernel"
            )
        stored = FORMATS[self.weight].stored_bytes(n, k, 4)
        most = (2 * k * n - stored) // ((1 if self.branch else 2) * (k + n))
        if r > most:
            raise SpecError(
                f"{self.family}: a branch of rank {r} beside {self.weight} [{k}, {n}] stores more "
                f"than the plain weight, {2 * k * n:,} B; pass a rank of {most} or less, or family "
                "matmul"
            )

    def _dtype(self) -> str:
        return FP8 if self.weight == "fp8" else self.dtype

    @property
    def many(self) -> bool:  # type: ignore[override]
        """Whether there are several results."""
        return isinstance(self.n, tuple)

    @property
    def adds_residual(self) -> bool:  # type: ignore[override]
        """Whether a residual can be added to the result."""
        return not self.many

    def layout_of(self, name: str) -> str:
        """Return the layout in which an operand is passed: weights as they multiply."""
        return self.x_layout if name == "x" else "row"

    def _linears(self) -> list[tuple[int, int, int, str]]:
        """Return (inputs, outputs, rank, the end of its operands' names) of each linear."""
        ns = self.n if isinstance(self.n, tuple) else (self.n,)
        ends = [str(i) for i in range(len(ns))] if self.many else [""]
        each = zip(ns, self.each("rank", len(ns)), ends, strict=True)
        return [(self.k, n, r, end) for n, r, end in each]

    def _one(self, sizes: tuple[int, int, int, str], bias: bool, **ends: Any) -> Linear:
        """Return a linear with its branch."""
        k, n, r, end = sizes
        names = {name: operand_name(name, end) for name in "wuv"}
        layout = first_layout(self.weight, k, end == "down")
        plain = FP8 if self.branch else self.dtype if self.weight == "fp8" else ""
        form = "" if self.weight == "fp8" else self.weight
        pair = LowRank(
            u=Weight(name=names["u"], k=k, n=r, format=plain, layout=layout),
            v=Weight(name=names["v"], k=r, n=n, format=plain),
        )
        return Linear(
            n=n, weight=Weight(name=names["w"], k=k, n=n, format=form), bias=f"bias{end}" * bias,
            low_rank=pair if r else LowRank(), **ends,
        )  # fmt: skip

    def _layer(self) -> dict[str, Any]:
        every = self._linears()
        each = (self.each(name, len(every)) for name in ("bias", "activation", "out_layout"))
        linears = [
            self._one(sizes, bias, activation=activation, layout=layout)
            for sizes, bias, activation, layout in zip(every, *each, strict=True)
        ]
        return {"linears": tuple(linears)}

    def _product(self, k: int, n: int, weight: Weight, **ends: Any) -> LinearSpec:
        """Return a product alone: with a weight of few bits, or plain, as factors are then."""
        own: dict[str, Any] = {"m": self.m, "k": k, "n": n, "dtype": self.dtype, "lnc": self.lnc}
        if weight.name in [one.weight.name for one in self.layer.layers]:
            return CorrectedSpec(**own, weight=self.weight, **ends)
        return MatmulSpec(**own, **ends)

    def short(self) -> str:
        """Return family, sizes, the weight's format and the rank."""
        n = "_".join(map(str, self.n)) if isinstance(self.n, tuple) else self.n
        ranks = [r for _, _, r, _ in self._linears()]
        shown = "_".join(map(str, ranks[:1] if len(set(ranks)) == 1 else ranks))
        what = f"{self.weight} r{shown}{self.branch} {self.formats()}"
        return f"{self.family} m{self.m} k{self.k} n{n} {what}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedMLPSpec(CorrectedSpec):
    """y[m, k] = (activation(x gate + (x gate_u) gate_v) * (x up + ..)) down + (h down_u) down_v.

    rank: one for all, or three. With down False the result is h [m, n], and ranks are two. Operands
    are x, then gate_u, gate_v, gate_w, the same of up and down, then the scales.
    """

    n: int
    activation: str = "silu"
    down: bool = True

    family: ClassVar[str] = "linear_mlp"
    many: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight in MX and self.down and self.n % 512:
            raise ShapeError(
                f"{self.family}: MX products behind h take whole 512s of features, not {self.n}; "
                "pass down=False, and make down a linear of its own"
            )
        if self.bias:
            raise SpecError(f"{self.family}: no bias; make the linears kernels of their own")

    @property
    def adds_residual(self) -> bool:  # type: ignore[override]
        """Whether a residual can be added to the result."""
        return self.down

    def _linears(self) -> list[tuple[int, int, int, str]]:
        n = self.n
        sizes = [(self.k, n, "gate"), (self.k, n, "up"), *([(n, self.k, "down")] * self.down)]
        ranks = self.each("rank", len(sizes))
        return [(k, n, r, name) for (k, n, name), r in zip(sizes, ranks, strict=True)]

    def _layer(self) -> dict[str, Any]:
        layout = "col" if self.down else self.out_layout
        gate, up, *down = self._linears()
        both = (
            self._one(gate, False, activation=self.activation, layout=layout),
            self._one(up, False, layout=layout),
        )
        last = self._one(down[0], False, layout=self.out_layout) if down else Linear()
        return {"linears": both, "combine": MULTIPLY, "down": last}
