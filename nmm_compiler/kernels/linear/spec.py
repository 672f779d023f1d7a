"""What linear layers compute, derived from the record of the layer; and the plainest of them.

Further constructors are in specs.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import (
    TOKENS,
    WEIGHTS,
    Array,
    KernelSpec,
    Products,
    TensorSpec,
    check_arrays,
    check_name,
)
from nmm_compiler.kernels.error_bounds import Estimate
from nmm_compiler.kernels.linear.estimates import Estimates
from nmm_compiler.kernels.linear.layer import (
    NORMED,
    NORMS,
    Layer,
    Linear,
    Weight,
    half,
    placed,
)
from nmm_compiler.kernels.number_formats import FP8, SCALES, X_DTYPES
from nmm_compiler.kernels.packed_formats import from_nki
from nmm_compiler.kernels.tiling import RUNS, lay, rows_in_runs


def operand_of(weight: Weight, dtype: str, layout: str, *groups: int) -> TensorSpec:
    """Return the operand of a weight, or of those of all groups; dtype: unless it is MX blocks."""
    shape, mx = lay((weight.k, weight.n), layout), weight if weight.mx else None
    if weight.mx:
        shape, dtype = (weight.k // 4, weight.n * weight.mx_bytes), "uint8"
    return TensorSpec(name=weight.name, shape=(*groups, *shape), dtype=dtype, mx=mx)


def mx_scale_of(weight: Weight, *groups: int) -> TensorSpec:
    """Return the operand with the scales of MX blocks."""
    shape = (*groups, weight.k // 32, weight.n)
    return TensorSpec(name=weight.scale, shape=shape, dtype="uint8", mx=weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSpec(KernelSpec):
    """A spec of linear layers of one x; subclasses add fields and say their layer in `_layer`.

    m: tokens. k: input features. dtype: of weights and x. With float8_e4m3 each weight is fp8
    numbers times a scale, "tensor" [1] or "channel", one an output; x is fp8 numbers, unless
    x_dtype is "bfloat16" or "float16". Results and biases then are bfloat16, or `out_dtype`.

    norm: "rms" or "layer" where the products are of the norm of x over its features: with norm_eps
    under the root, times norm_gain [k] + norm_offset where there is a gain, plus norm_bias [k] for
    a layer norm that has one. Its statistics are in fp32, and its value is rounded once, to the
    operands' dtype. residual: a last operand, laid out as the result. The result is rounded to its
    dtype, the residual is added, the sum is rounded again, as PyTorch does.
    """

    m: int
    k: int
    dtype: str = "bfloat16"
    x_dtype: str | None = None
    out_dtype: str | None = None
    scales: str | None = None
    x_layout: str = "row"
    out_layout: str | tuple[str, ...] = "row"
    norm: str = "none"
    norm_gain: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    norm_eps: float = 1e-6
    residual: bool = False

    rare: ClassVar[tuple[str, ...]] = (
        "lnc", "x_dtype", "scales", "out_dtype", "tp", "tp_axis", *NORMED,
    )  # fmt: skip
    adds_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_formats()
        self._check_norm()
        if self.residual and not self.adds_residual:
            raise SpecError(
                f"{self.family}: residual is not added to its results; drop residual, and add it "
                "after the kernel"
            )

    def _check_norm(self) -> None:
        """Raise SpecError or UnknownNameError unless the norm is one that kernels compute.

        Fields that mean nothing without a norm, or without a gain, get one value.
        """
        check_name("norm", self.norm, NORMS)
        if self.norm == "none":
            if self.norm_gain or self.norm_bias:
                raise SpecError(
                    f"{self.family}: norm_gain and norm_bias belong to a norm; pass norm='rms' or "
                    "'layer', or drop them"
                )
            object.__setattr__(self, "norm_eps", 1e-6)
        elif self.x_format == FP8:
            raise SpecError(
                f"{self.family}: norm={self.norm!r} takes a plain x, and x is {self.x_format}; "
                "make the norm before the kernel, or pass x_dtype bfloat16"
            )
        if self.tp > 1 and (self.norm != "none" or self.residual):
            raise SpecError(
                f"{self.family}: norm and residual go with one rank, not {self.tp}; make "
                "the norm before the kernel, and add the residual behind it"
            )
        if self.norm_bias and self.norm == "rms":
            raise SpecError(f"{self.family}: an rms norm has no bias; drop norm_bias")
        object.__setattr__(self, "norm_offset", self.norm_offset if self.norm_gain else 0.0)

    def _settle_formats(self) -> None:
        """Check scales, x_dtype and out_dtype; equal meanings become equal fields."""
        dtype, scales = self._dtype(), self.scales
        if dtype != FP8 and scales is not None:
            raise SpecError(
                f"{self.family}: scales={scales!r} belongs to dtype {FP8}, and dtype is {dtype}; "
                "leave scales out"
            )
        if dtype == FP8:
            check_name("scales", scales or "tensor", SCALES)
            object.__setattr__(self, "scales", scales or "tensor")
        if self.x_dtype is not None:
            check_name("x_dtype", self.x_dtype, (*X_DTYPES, FP8) if dtype == FP8 else (dtype,))
        if self.x_dtype == dtype:
            object.__setattr__(self, "x_dtype", None)
        if self.out_dtype is not None:
            allowed = ("bfloat16", "float16", "float32") if dtype == FP8 else (dtype,)
            check_name("out_dtype", self.out_dtype, allowed)
        if self.out_dtype == self._plain_dtype():
            object.__setattr__(self, "out_dtype", None)

    def _dtype(self) -> str:
        """Return the dtype of the weights, which says at what rate they are multiplied."""
        return self.dtype

    def _plain_dtype(self) -> str:
        dtype = self.x_dtype or self._dtype()
        return "bfloat16" if dtype == FP8 else dtype

    @property
    def x_format(self) -> str:
        """The dtype of x."""
        return self.x_dtype or self._dtype()

    @property
    def result_dtype(self) -> str:
        """The dtype of the result, and of biases: that of x, bfloat16 for fp8."""
        return self.out_dtype or self._plain_dtype()

    @property
    def fp8(self) -> bool:
        """Whether the weights are fp8 numbers with scales."""
        return self._dtype() == FP8

    @functools.cached_property
    def layer(self) -> Layer:
        """What is computed, by all cores together."""
        more = {name: getattr(self, name) for name in NORMED}
        return placed(
            Layer(
                m=self.m, k=self.k, dtype=self._dtype(), x_format=self.x_format,
                result_dtype=self.result_dtype, kept_dtype=self._plain_dtype(),
                x_layout=self.layout_of("x"), scales=self.scales or "",
                tp=self.tp, **more, **self._layer(),
            )
        )  # fmt: skip

    def _layer(self) -> dict[str, Any]:
        """Return the fields of the layer that the subclass says: linears, combine, down."""
        raise NotImplementedError

    def _weight(self, name: str, k: int, n: int) -> Weight:
        return Weight(name=name, k=k, n=n, layout=self.layout_of(name))

    def layout_of(self, name: str) -> str:
        """Return the layout in which an operand is passed."""
        return str(getattr(self, f"{name}_layout"))

    def each(self, name: str, count: int) -> tuple[Any, ...]:
        """Return a field that may be one value for all linears as one value for each."""
        value = getattr(self, name)
        each = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
        if len(each) != count:
            raise ShapeError(
                f"{self.family}: {name} has {len(each)} values for {count} results; pass one for "
                "all of them, or one for each"
            )
        return each

    def splits(self) -> tuple[str, ...]:
        """Return the ways in which the cores can share the work; one core has the way ""."""
        if self.lnc == 1:
            return ("",)
        layer = self.layer
        # of MX weights each core has an even number of outputs, and whole 512s of h
        step, of_h = (4, 1024) if layer.mx else (2, 256)
        even = all(one.n % step == 0 for one in layer.layers)
        even = even and not (layer.down.n and layer.linears[0].n % of_h)
        halves = self.m % 2 == 0 and not layer.gathers  # gathered factors are halved by outputs
        return (*((TOKENS,) if halves else ()), *((WEIGHTS,) if even else ()))

    def half(self, split: str) -> Layer:
        """Return the share of one of two cores."""
        return half(self.layer, split)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, the weights, the biases, the scales of fp8 operands, the vectors of the norm
        of x, the residual."""
        layer = self.layer
        weights = layer.weights()
        x = TensorSpec(
            name="x", shape=lay((self.m, self.k), layer.x_layout), dtype=self.x_format,
            token_dim=int(layer.x_layout == "col"),
        )  # fmt: skip
        matrices = [operand_of(one, layer.format_of(one), one.layout) for one in weights]
        vectors = {one.bias: one.n for one in layer.layers}
        vectors |= {name: pair.r for pair in layer.pairs for name in (pair.bias, pair.gain)}
        biases = [
            TensorSpec(name=name, shape=(n,), dtype=self.result_dtype)
            for name, n in vectors.items()
            if name
        ]
        scales = [
            TensorSpec(
                name=one.scale, shape=(one.n if layer.scales == "channel" else 1,), dtype="float32"
            )
            for one in weights
            if layer.fp8 and not one.format
        ]
        scales += [mx_scale_of(one) for one in weights if one.mx]
        if layer.branch_tiles:
            rows = len(layer.pairs), 128 * layer.branch_tiles
            scales.append(TensorSpec(name="branch_scale", shape=rows, dtype="float32"))
        norm = [
            TensorSpec(name=name, shape=(self.k,), dtype=self.x_format)
            for name in ("norm_gain", "norm_bias")
            if getattr(self, name)
        ]
        residual = [
            dataclasses.replace(self.outputs()[0], name="residual") for _ in range(self.residual)
        ]
        return (x, *matrices, *biases, *scales, *norm, *residual)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return every y."""
        results = self.layer.results
        return tuple(
            TensorSpec(
                name=f"y{i}" if self.many else "y",
                shape=lay((self.m, one.n), one.layout),
                dtype=self.result_dtype,
                token_dim=int(not one.rows),
            )
            for i, one in enumerate(results)
        )

    def flops_by_dtype(self) -> dict[str, int]:
        """Return the flops of products of x, and of products of intermediates, by their dtypes."""
        made = {self.x_format: 0}
        for one in self.layer.weights():
            plain = self.x_format if self.layer.of_x(one) else self._plain_dtype()
            dtype = one.format if one.mx else plain
            made[dtype] = made.get(dtype, 0) + 2 * self.m * one.k * one.n
        return made

    def estimates(self, arrays: tuple[Array, ...], typical: bool) -> Iterable[Estimate]:
        """Return each result [m, n] before it is rounded to its dtype."""
        whole = self.whole()
        check_arrays(whole, arrays)
        layer = whole.layer
        layouts = {"x": layer.x_layout, "residual": whole.result_layouts()[0]}
        layouts |= {weight.name: whole.layout_of(weight.name) for weight in layer.weights()}
        raw = {tensor.name: array for tensor, array in zip(whole.inputs(), arrays, strict=True)}
        raw |= {one.name: from_nki(raw[one.name], raw[one.scale], one.mx)
                for one in layer.weights() if one.mx}  # fmt: skip
        named = {name: np.asarray(array, dtype=np.float64) for name, array in raw.items()}
        named |= {
            name: named[name].T for name in layouts if layouts[name] == "col" and name in named
        }
        for one in layer.weights():
            if one.layout in RUNS:
                named[one.name] = named[one.name][np.argsort(rows_in_runs(one.k, one.layout))]
        return Estimates(self, layer, named, typical).results()

    def as_products(self) -> Products:
        """Return (every product, every linear dense) of the layer, what is between transposed.

        A function between two factors leaves no dense product: the two stand for it. A product of
        two results is left out of both, which favours them.
        """
        separate: dict[str, KernelSpec] = {}  # of each weight; linears may share one
        dense: list[KernelSpec] = []
        between = "row" if self.m == 1 else "col"  # one token lies alike by rows and by columns
        layer = self.layer
        for linear in layer.layers:
            pair, weight, behind = linear.low_rank, linear.weight, linear is layer.down
            k = layer.linears[0].n if behind else self.k
            ends = {
                "x_layout": (between if behind else layer.x_layout),
                "out_layout": between if layer.down.n and not behind else linear.layout,
                "activation": linear.activation, "bias": bool(linear.bias),
            }  # fmt: skip
            if pair.r:
                separate[pair.u.name] = self._product(
                    k, pair.r, pair.u, x_layout=ends["x_layout"], out_layout="col",
                    bias=bool(pair.bias), activation=pair.activation,
                )  # fmt: skip
                bare = {"activation": "identity", "bias": False} if weight.k else {}
                last = ends | {"x_layout": "col"} | bare
                separate[pair.v.name] = self._product(pair.r, linear.n, pair.v, **last)
            if weight.k:
                separate[weight.name] = self._product(k, linear.n, weight, **ends)
            whole = dataclasses.replace(weight if weight.k else pair.u, name="")
            dense.append(self._product(k, linear.n, whole, **ends))
        made = tuple(separate.values())
        return made, made if any(pair.shaped for pair in layer.factors) else tuple(dense)

    def _product(self, k: int, n: int, weight: Weight, **ends: Any) -> LinearSpec:
        """Return a product alone, with a weight that has no name where it is all of a linear."""
        own: dict[str, Any] = {"scales": self.scales, "x_dtype": self.x_dtype}
        return MatmulSpec(
            m=self.m, k=k, n=n, w_layout=weight.layout, dtype=weight.format or self._dtype(),
            lnc=self.lnc, **({} if weight.format else own), **ends,
        )  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        """Return where the dense product would be cheaper."""
        whole = self.whole().layer
        made = []
        for linear in whole.layers:
            pair = linear.low_rank
            outputs = sum(
                one.n for one in whole.layers if pair.r and one.low_rank.u.name == pair.u.name
            )
            if not pair.r or linear.weight.k or pair.shaped:
                continue
            k = whole.linears[0].n if linear is whole.down else whole.k
            if pair.r * (k + outputs) >= k * outputs:
                what = "r >= min(k, n)" if pair.r >= min(k, outputs) else "r (k + n) >= k n"
                made.append(
                    f"{pair.u.name}, {pair.v.name}: {what}: the dense product x (u v) needs "
                    f"{k * outputs:,} weights, the factors have {pair.r * (k + outputs):,}; "
                    "multiply them once and use family matmul"
                )
        return tuple(dict.fromkeys(made))

    def short(self) -> str:
        """Return family, sizes, number formats, and whether a dense weight is beside factors."""
        sizes = " ".join(f"{name[0]}{getattr(self, name)}" for name in self.sizes)
        base = " base" * any(one.weight.k and one.low_rank.r for one in self.layer.linears)
        return f"{self.family} {sizes} {self.formats()}{base}"

    def formats(self) -> str:
        """Return the number formats that differ from plain operands in one word, for names."""
        words = [self._dtype(), self.x_dtype and f"x_{self.x_dtype}", self.scales]
        words += [self.norm] * (self.norm != "none") + ["residual"] * self.residual
        return "_".join(word for word in words if word)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSpec(LinearSpec):
    """y[m, n] = activation(x w + bias) with x [m, k], w [k, n], bias [n]."""

    n: int
    w_layout: str = "row"
    bias: bool = False
    activation: str = "identity"

    family: ClassVar[str] = "matmul"

    def _layer(self) -> dict[str, Any]:
        one = Linear(
            n=self.n, weight=self._weight("w", self.k, self.n), bias="bias" * self.bias,
            activation=self.activation, layout=self.layout_of("out"),
        )  # fmt: skip
        return {"linears": (one,)}
