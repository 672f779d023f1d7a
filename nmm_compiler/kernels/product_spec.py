"""The base of all specs: operands and results, number formats, error bounds.

A family's spec declares its weights, and estimates its results from `_times`, `_kept` and
`_biased`: a value in float64 and the error that a right kernel may have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    WEIGHTS,
    Array,
    KernelSpec,
    TensorSpec,
    check_arrays,
    check_cores,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    Estimate,
    combine,
    plus_bias,
    rounded,
    rounding_error,
    times_weight,
)
from nmm_compiler.kernels.normed_x import NORMED, check_norm, normed
from nmm_compiler.kernels.number_formats import FP8, FP8_MAX, INTERMEDIATES, SCALES, X_DTYPES
from nmm_compiler.kernels.tiling import lay

# fp32 roundings of a scaled value: products of up to four scales, a reciprocal (2), the scaling.
_SCALE_ROUNDINGS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductSpec(KernelSpec):
    """A spec of products of x, the base of the specs of all families.

    m: tokens. k: input features. x_dtype: "bfloat16" or "float16" beside fp8 weights, where x is
    no fp8 number and has no scale; None for the dtype of the weights. Subclasses add dtype,
    x_layout, the sizes and layouts of their weights, and those of bias, activation, out_layout,
    scales, out_dtype and intermediate that they support. They say which weights and biases there
    are, and estimate their results.

    norm: "rms" or "layer" where the products are of the norm of x over its features: with norm_eps
    under the root, times norm_gain [k] + norm_offset where there is a gain, plus norm_bias [k] for
    a layer norm that has one. Its statistics are in fp32, and its value is rounded once, to the
    operands' dtype. residual: a last operand, laid out as the result. The result is rounded to its
    dtype, the residual is added, the sum is rounded again, as PyTorch does.
    """

    m: int
    k: int
    x_dtype: str | None = None
    norm: str = "none"
    norm_gain: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    norm_eps: float = 1e-6
    residual: bool = False

    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    many: ClassVar[bool] = False  # whether `reference` and the errors are tuples
    adds_residual: ClassVar[bool] = True  # whether the kernels of the family can

    def __post_init__(self) -> None:
        check_cores(self.family, self.lnc)
        check_sizes(self.family, {name: getattr(self, name) for name in self.sizes})
        self._settle_formats()
        self._check_names()
        check_norm(self)
        if self.residual and not self.adds_residual:
            raise SpecError(
                f"{self.family}: residual is not added to its results; drop residual, and add it "
                "after the kernel"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data; x_dtype, norm and residual only where there is one."""
        made = super().to_dict()
        names = ("x_dtype", *NORMED)
        plain = {name: ProductSpec.__dataclass_fields__[name].default for name in names}
        return {name: v for name, v in made.items() if name not in plain or v != plain[name]}

    def splits(self) -> tuple[str, ...]:
        """Return the ways in which the cores can share the work.

        The norm of x takes all of its features, so that no core can have half of them.
        """
        return tuple(way for way in super().splits() if self.norm == "none" or way != WEIGHTS)

    def norm_fields(self) -> dict[str, Any]:
        """Return the fields of the norm of x, for specs that have the same."""
        return {name: getattr(self, name) for name in NORMED if name != "residual"}

    def _check_names(self) -> None:
        """Raise UnknownNameError unless the activation and the layouts are known."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("activation", "inner_activation"):
                check_name(field.name, value, ACTIVATIONS)
            elif field.name.endswith("_layout"):
                check_name(field.name, value, LAYOUTS)

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each weight as it multiplies, in the order of the operands."""
        raise NotImplementedError

    def biases(self) -> dict[str, int]:
        """Return the output features of each bias that there is."""
        return {"bias": self.out_features} if getattr(self, "bias", False) else {}

    def intermediates(self) -> tuple[str, ...]:
        """Return the names of the intermediates between products."""
        return ()

    def multiplies_kept(self, weight: str) -> bool:
        """Return whether the left factor of a weight is an intermediate; else it is x."""
        return weight.endswith("v")

    @property
    def out_features(self) -> int:
        """The features of the result, those of the last weight."""
        return list(self.weights().values())[-1][1]

    def layout_of(self, name: str) -> str:
        """Return the layout in which an operand is passed."""
        return str(getattr(self, f"{name}_layout"))

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, the weights, the biases, the scales of fp8 operands, the vectors of the norm
        of x, the residual."""
        weights = self.weights()
        shapes = {"x": (self.m, self.k), **weights}
        operands = [
            TensorSpec(
                name=name,
                shape=lay(shape, self.layout_of(name)),
                dtype=self.x_format if name == "x" else self._dtype(),
            )
            for name, shape in shapes.items()
        ]
        biases = [
            TensorSpec(name=name, shape=(size,), dtype=self.result_dtype)
            for name, size in self.biases().items()
        ]
        return (*operands, *biases, *self._scale_tensors(weights), *self._norm_tensors())

    def _norm_tensors(self) -> list[TensorSpec]:
        """Return the vectors of the norm of x, and the residual."""
        made = [
            TensorSpec(name=name, shape=(self.k,), dtype=self._dtype())
            for name in ("norm_gain", "norm_bias")
            if getattr(self, name)
        ]
        if self.residual:
            shape = lay((self.m, self.out_features), self.result_layouts()[0])
            made.append(TensorSpec(name="residual", shape=shape, dtype=self.result_dtype))
        return made

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        shape = lay((self.m, self.out_features), self.result_layouts()[0])
        return (TensorSpec(name="y", shape=shape, dtype=self.result_dtype),)

    def flops(self) -> int:
        """Return those of every weight, 2 m times its elements."""
        return sum(self.flops_by_dtype().values())

    def flops_by_dtype(self) -> dict[str, int]:
        """Return the flops of products of x, and of products of intermediates, by their dtypes."""
        made = {self.x_format: 0}
        for name, (first, last) in self.weights().items():
            dtype = self.intermediate_dtype if self.multiplies_kept(name) else self.x_format
            made[dtype] = made.get(dtype, 0) + 2 * self.m * first * last
        return made

    def reference(self, *arrays: Array) -> Any:
        """Return the results in float64, laid out as `out_layout` says."""
        operands = self._operands(arrays)
        return self._laid(value for value, _ in self._results(operands, False))

    def error_bound(self, *arrays: Array) -> Any:
        """Return elementwise bounds: sums are in fp32, intermediates and results are rounded
        once."""
        return self._errors(arrays, False)

    def typical_error(self, *arrays: Array) -> Any:
        """Return the error per element if roundings are independent."""
        return self._errors(arrays, True)

    def _errors(self, arrays: tuple[Array, ...], typical: bool) -> Any:
        estimates = self._results(self._operands(arrays), typical)
        return self._laid(rounded(made, self.result_dtype, typical)[1] for made in estimates)

    def _results(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        """Return each result before it is stored, [m, n]: what `_estimates` gives for the norm of
        x, and the residual."""
        made = self._estimates(operands, typical)
        if not self.residual:
            return made
        return [
            plus_bias(rounded(one, self.result_dtype, typical), operands["residual"], typical)
            for one in made
        ]

    def _x(self, operands: dict[str, Array], typical: bool) -> Estimate:
        """Return the left factor of the first products: x, or its norm."""
        x = operands["x"]
        if self.norm == "none":
            return x, 0.0
        return rounded(normed(self, x, operands, typical), self._dtype(), typical)

    def _estimates(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        """Return each result without a residual, [m, n], from float64 operands."""
        raise NotImplementedError

    def _laid(self, results: Iterable[Any]) -> Any:
        """Return results [m, n] laid out as their kernel gives them."""
        each = zip(results, self.result_layouts(), strict=True)
        made = tuple(y if layout == "row" else np.ascontiguousarray(y.T) for y, layout in each)
        return made if self.many else made[0]

    def _operands(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        """Return the arrays by their names, in float64, as they multiply."""
        check_arrays(self, arrays)
        named = {
            tensor.name: np.asarray(array, dtype=np.float64)
            for tensor, array in zip(self.inputs(), arrays, strict=True)
        }
        turned = [name for name in ("x", *self.weights()) if self.layout_of(name) == "col"]
        turned += ["residual"] * (self.residual and self.result_layouts()[0] == "col")
        return named | {name: named[name].T for name in turned}

    def _times(
        self,
        left: Estimate,
        name: str,
        operands: dict[str, Array],
        typical: bool,
        terms: int | None = None,
    ) -> Estimate:
        """Return the estimate of a product with a weight, and with their scales.

        terms: of the sums, where other products go into them too.
        """
        made = times_weight(left, operands[name], typical, terms)
        if not self.fp8:
            return made
        of_x = self.fp8_x and not self.multiplies_kept(name)
        factors = [name, "x"] if of_x else [name]
        return self._scaled(made, [operands[f"{factor}_scale"] for factor in factors], typical)

    def _biased(
        self, left: Estimate, name: str, operands: dict[str, Array], typical: bool
    ) -> Estimate:
        """Return the estimate after the bias, if there is one."""
        return plus_bias(left, operands[name], typical) if name in operands else left

    @functools.cached_property
    def fp8(self) -> bool:
        """Whether the weights are fp8 numbers with scales."""
        return self._dtype() == FP8

    @functools.cached_property
    def x_format(self) -> str:
        """The dtype of x."""
        return self.x_dtype or self._dtype()

    @functools.cached_property
    def fp8_x(self) -> bool:
        """Whether x, too, is fp8 numbers with a scale."""
        return self.x_format == FP8

    @property
    def result_dtype(self) -> str:
        """The dtype of the result, and of biases: that of x, bfloat16 for fp8."""
        return getattr(self, "out_dtype", None) or self._plain_dtype()

    def _plain_dtype(self) -> str:
        return "bfloat16" if self.fp8_x else self.x_format

    @functools.cached_property
    def intermediate_dtype(self) -> str:
        """The dtype of the intermediates between two products."""
        kind = str(getattr(self, "intermediate", "operand"))
        return self._plain_dtype() if kind == "operand" else kind

    def formats(self) -> str:
        """Return the number formats that differ from plain operands in one word, for names."""
        words = [self._dtype(), self.x_dtype and f"x_{self.x_dtype}", getattr(self, "scales", None)]
        if self.requantized or self.wide:
            words.append(f"p_{self.intermediate_dtype}")
        words += [self.norm] * (self.norm != "none") + ["residual"] * self.residual
        return "_".join(word for word in words if word)

    @functools.cached_property
    def requantized(self) -> bool:
        """Whether intermediates are quantized to fp8 again, by a scale that is given."""
        return self.intermediate_dtype == FP8

    @functools.cached_property
    def wide(self) -> bool:
        """Whether intermediates are kept in fp32 though the operands are narrower."""
        return self.intermediate_dtype == "float32" != self._dtype()

    def _format_notes(self, second: str) -> tuple[str, ...]:
        """Return the cost of an fp32 intermediate, and the needs of an fp8 one."""
        if self.requantized:
            return (
                f"intermediate {FP8}: what lies beyond {FP8_MAX:g} times its scale saturates, and "
                "three bits of mantissa are kept; calibrate the scales",
            )
        if not self.wide:
            return ()
        return (
            f"intermediate float32: {second} runs with fp32 operands, at a quarter of the bf16 "
            "rate of TensorE, and its weight takes four bytes an element in SBUF",
        )

    def _settle_formats(self) -> None:
        """Check dtype, scales, out_dtype, intermediate; equal meanings become equal fields."""
        dtype = self._dtype()
        check_name("dtype", dtype, self.dtypes)
        scales, wanted = getattr(self, "scales", None), getattr(self, "out_dtype", None)
        if not self.fp8 and scales is not None:
            raise SpecError(
                f"{self.family}: scales={scales!r} belongs to dtype {FP8}, and dtype is {dtype}; "
                "leave scales out"
            )
        if self.fp8:
            check_name("scales", scales or "tensor", SCALES)
            object.__setattr__(self, "scales", scales or "tensor")
        kind = getattr(self, "intermediate", "operand")
        self._settle_x(dtype, kind)
        if wanted is not None:
            allowed = ("bfloat16", "float16", "float32") if self.fp8 else (dtype,)
            check_name("out_dtype", wanted, allowed)
            if wanted == self._plain_dtype():
                object.__setattr__(self, "out_dtype", None)
        check_name("intermediate", kind, INTERMEDIATES if self.fp8 else INTERMEDIATES[:2])
        if kind == dtype and not self.fp8:
            object.__setattr__(self, "intermediate", "operand")

    def _settle_x(self, dtype: str, kind: str) -> None:
        """Check x_dtype; that of the weights becomes None."""
        if self.x_dtype is not None:
            check_name("x_dtype", self.x_dtype, (*X_DTYPES, FP8) if self.fp8 else (dtype,))
        if self.x_dtype == dtype:
            object.__setattr__(self, "x_dtype", None)
        if self.x_dtype and kind == FP8:
            raise SpecError(
                f"{self.family}: intermediate {FP8} goes with an x of {FP8}, not of "
                f"{self.x_dtype}; drop x_dtype, or the intermediate"
            )

    def _scale_tensors(self, weights: Mapping[str, tuple[int, int]]) -> list[TensorSpec]:
        """Return the scales of an fp8 x, of fp8 weights, of quantized intermediates."""
        if not self.fp8:
            return []
        per_channel = getattr(self, "scales", None) == "channel"
        sizes = {"x": 1} if self.fp8_x else {}
        sizes |= {name: n if per_channel else 1 for name, (_, n) in weights.items()}
        if self.requantized:
            sizes |= dict.fromkeys(self.intermediates(), 1)
        return [
            TensorSpec(name=f"{name}_scale", shape=(size,), dtype="float32")
            for name, size in sizes.items()
        ]

    def _scaled(self, left: Estimate, scales: Sequence[Array], typical: bool) -> Estimate:
        """Return the estimate after a multiplication by scales, in fp32."""
        factor = np.prod(np.broadcast_arrays(*scales), axis=0)
        value, error = left[0] * factor, left[1] * np.abs(factor)
        own = _SCALE_ROUNDINGS * FP32_ROUNDOFF * (np.abs(value) + error)
        return value, combine(error, own, typical)

    def _kept(
        self, left: Estimate, name: str, operands: dict[str, Array], typical: bool
    ) -> Estimate:
        """Return the estimate of an intermediate once it is stored.

        A quantized one saturates at FP8_MAX times its scale. So does the value of the reference,
        and limiting does not enlarge an error.
        """
        if not self.requantized:
            return rounded(left, self.intermediate_dtype, typical)
        unit = float(np.abs(operands[f"{name}_scale"]).item())
        limit = FP8_MAX * unit
        value = np.clip(left[0], -limit, limit)
        # dividing by the scale and multiplying by it again costs fp32 roundings
        error = combine(left[1], _SCALE_ROUNDINGS * FP32_ROUNDOFF * np.abs(value), typical)
        magnitude = np.minimum(np.abs(value) + error, limit) / unit
        own = unit * rounding_error(magnitude, self.intermediate_dtype)
        return value, combine(error, own, typical)
