"""The proof of one kernel: its emitted source, run in the simulator, against float64.

Arrays are random, scaled so that no stage overflows its dtype. The bound comes from the spec: it is
derived from dtype and contraction lengths, and is compared element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from nmm_compiler.kernels.numerics import FP32_ROUNDOFF, unit_roundoff
from nmm_compiler.records import Record

if TYPE_CHECKING:
    from nmm_compiler.codegen.build import Kernel


@dataclass(frozen=True, kw_only=True)
class Proof(Record):
    """What a check of one kernel found.

    max_error: largest absolute difference to float64; max_bound_share: largest ratio of an
    element's difference to its own bound, at most 1 for a pass; elements: how many were compared.
    """

    kernel: str
    passed: bool
    elements: int
    max_error: float
    largest_bound: float
    max_bound_share: float
    relative_error: float

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: {self.elements} elements, largest error {self.max_error:.3g} "
            f"(largest bound {self.largest_bound:.3g}), worst element at "
            f"{100 * self.max_bound_share:.1f} % of its bound, relative error "
            f"{self.relative_error:.2e} in Frobenius norm"
        )


def random_arrays(spec: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return one standard-normal array per input of `spec`, weights scaled by 1/sqrt(fan-in)."""
    generator = np.random.default_rng(seed)
    arrays = []
    for tensor in spec.inputs():
        dtype = np.dtype(getattr(ml_dtypes, tensor.dtype, tensor.dtype))
        values = generator.standard_normal(tensor.shape, dtype=np.float32)
        if tensor.name != "x" and len(tensor.shape) == 2:
            values /= np.sqrt(np.float32(max(tensor.shape)))
        if "scale" in tensor.name:
            values = np.abs(values) + np.float32(0.5)
        arrays.append(values.astype(dtype))
    return tuple(arrays)


def prove(kernel: Kernel, seed: int = 0) -> Proof:
    """Run `kernel`'s emitted source on random arrays and compare with the float64 reference."""
    arrays = random_arrays(kernel.spec, seed)
    outputs = kernel.simulate(*arrays, mode="functional").outputs
    references = kernel.spec.reference(*arrays)
    bounds = kernel.spec.error_bound(*arrays)
    if not isinstance(references, tuple):
        references, bounds = (references,), (bounds,)
    return compare(kernel.name, outputs, references, bounds, norm_limit(kernel.spec))


# At most this many values in a row are rounded to the operand dtype (the whole gated MLP: five).
_ROUNDINGS = 6
# Below this many elements cancellation in a few of them can dominate the norm.
_NORM_ELEMENTS = 10_000


def norm_limit(spec: Any) -> float:
    """Return the largest relative error in Frobenius norm of a right kernel on random arrays.

    Independent data does not enlarge a relative error on average: every rounding adds at most the
    dtype's unit roundoff, every fp32 sum of K terms about sqrt(K) of fp32's (Higham and Mary,
    2019). Elementwise bounds are worst cases and loose for long chains; this is what catches a
    wrong tile there.
    """
    longest = max(size for tensor in spec.inputs() for size in tensor.shape)
    roundoff = unit_roundoff(spec.dtype) + longest**0.5 * FP32_ROUNDOFF
    return _ROUNDINGS * roundoff


def compare(
    name: str,
    outputs: tuple[np.ndarray, ...],
    references: tuple[np.ndarray, ...],
    bounds: tuple[Any, ...],
    relative_limit: float = float("inf"),
) -> Proof:
    """Compare outputs with float64 references, element by element, under `bounds`.

    From 10,000 elements on, the relative error in Frobenius norm must keep `relative_limit` too.

    A missing output, a wrong shape, a NaN or an infinity fails.
    """
    same = len(outputs) == len(references) and all(
        got.shape == want.shape for got, want in zip(outputs, references, strict=True)
    )
    if not same:
        worst = float("inf")
        return Proof(
            kernel=name, passed=False, elements=0, max_error=worst, largest_bound=0.0,
            max_bound_share=worst, relative_error=worst,
        )  # fmt: skip
    errors = [
        np.abs(np.asarray(got, dtype=np.float64) - want)
        for got, want in zip(outputs, references, strict=True)
    ]
    limits = [np.broadcast_to(b, e.shape) for b, e in zip(bounds, errors, strict=True)]
    passed = all(bool(np.all(e <= b)) for e, b in zip(errors, limits, strict=True))
    shares = [np.max(e / np.maximum(b, 1e-300)) for e, b in zip(errors, limits, strict=True)]
    norm = np.sqrt(sum(float(np.sum(np.square(want))) for want in references))
    distance = np.sqrt(sum(float(np.sum(np.square(e))) for e in errors))
    elements = sum(e.size for e in errors)
    if elements >= _NORM_ELEMENTS:
        passed = passed and bool(distance <= relative_limit * norm)
    return Proof(
        kernel=name,
        passed=passed,
        elements=elements,
        max_error=float(max(np.max(e) for e in errors)),
        largest_bound=float(max(np.max(b) for b in limits)),
        max_bound_share=float(max(shares)),
        relative_error=float(distance / norm) if norm else float(distance),
    )
