"""Checks one kernel: compares its emitted source, run in the simulator, with float64.

Arrays are random, scaled so that no stage overflows its dtype. The bound comes from the spec: it is
derived from dtype and contraction lengths, and is compared element by element and in norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from nmm_compiler.kernels.packed_formats import for_nki, quantize
from nmm_compiler.records import Record

if TYPE_CHECKING:
    from nmm_compiler.codegen.build import Kernel


@dataclass(frozen=True, kw_only=True)
class Proof(Record):
    """The result of a check of one kernel.

    max_error: largest absolute difference to float64; max_bound_share: largest ratio of an
    element's difference to its own bound, norm_share: the error's Frobenius norm over its limit
    (0 where none is held), both at most 1 for a pass; elements: how many were compared.
    """

    kernel: str
    passed: bool
    elements: int
    max_error: float
    largest_bound: float
    max_bound_share: float
    relative_error: float
    norm_share: float = 0.0

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: {self.elements} elements, largest error {self.max_error:.3g} "
            f"(largest bound {self.largest_bound:.3g}), worst element at "
            f"{100 * self.max_bound_share:.1f} % of its bound, relative error "
            f"{self.relative_error:.2e} in Frobenius norm"
            + (f", {100 * self.norm_share:.0f} % of its limit" if self.norm_share else "")
        )


_ACTIVATIONS = ("x", "q", "k", "v", "rope")
"""Operands that are no weights: attention's scores need them at their own size."""


def random_arrays(spec: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return one standard-normal array per input of `spec`, weights scaled by 1/sqrt(fan-in).

    fp8 weights stay standard-normal, within the format's range, and their scales take the factor.
    """
    generator = np.random.default_rng(seed)
    arrays, fan_in = [], {}
    blocks = any(tensor.mx is not None for tensor in spec.inputs())
    for tensor in spec.inputs():
        name = tensor.name.removesuffix("_scale")
        if tensor.mx is not None:  # data and scales of one weight, of few numbers that repeat
            stack = tensor.shape[0] if len(tensor.shape) == 3 else 0
            arrays.append(_mx_weight(tensor.mx, seed, stack)[tensor.name != name])
            continue
        dtype = np.dtype(getattr(ml_dtypes, tensor.dtype, tensor.dtype))
        if tensor.below:
            arrays.append(random_index(tensor, generator))
            continue
        values = generator.standard_normal(tensor.shape, dtype=np.float32)
        if tensor.name not in _ACTIVATIONS and len(tensor.shape) >= 2:
            fan_in[tensor.name] = np.sqrt(np.float32(max(tensor.shape[-2:])))
            if not tensor.dtype.startswith("float8"):
                values /= fan_in[tensor.name]
        if "scale" in tensor.name:
            values = np.abs(values) + np.float32(0.5)
            values /= fan_in.get(tensor.name.removesuffix("_scale"), np.float32(1.0))
        if tensor.name == "branch_scale":  # of u and, beside MX blocks, of v: else w_scale has it
            for factor in "uv" if blocks else "u":
                ends = (one for one in fan_in if one.strip("0123456789")[-1] == factor)
                values /= max(map(fan_in.__getitem__, ends), default=np.float32(1.0))
        arrays.append(values.astype(dtype))
    return tuple(arrays)


def random_index(tensor: Any, generator: np.random.Generator) -> np.ndarray:
    """Return an index: different groups for each token, now and then none, which is -1."""
    tokens, several = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    scores = generator.random((tokens, tensor.below))
    index = np.argsort(scores, axis=1)[:, :several].astype(tensor.dtype)
    return np.where(generator.random(index.shape) < 1 / 8, -1, index).reshape(tensor.shape)


def _mx_weight(weight: Any, seed: int, stack: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and scales of a random weight of MX blocks, as kernels take them, or of a
    stack of so many."""
    if stack:
        each = [_mx_weight(weight, seed + 7 * i, 0) for i in range(stack)]
        data, scales = (np.stack(parts) for parts in zip(*each, strict=True))
        return data, scales
    generator = np.random.default_rng((seed, *weight.name.encode()))
    values = generator.standard_normal((weight.n, weight.k), dtype=np.float32)
    data, scales = for_nki(*quantize(values / np.sqrt(np.float32(weight.k)), weight.mx), weight.mx)
    return data.view(np.uint8), scales


def prove(kernel: Kernel, seed: int = 0) -> Proof:
    """Run `kernel`'s emitted source on random arrays and compare with the float64 reference.

    Of a kernel of many ranks, the result of each is compared with the whole result.
    """
    spec = kernel.spec
    arrays = random_arrays(spec.whole(), seed)
    if spec.tp > 1:
        runs = kernel.simulate_ranks(*arrays, mode="functional")
    else:
        runs = (kernel.simulate(*arrays, mode="functional"),)
    outputs = tuple(y for run in runs for y in run.outputs or ())
    limits = (spec.reference(*arrays), spec.error_bound(*arrays), spec.typical_error(*arrays))
    each = (one if isinstance(one, tuple) else (one,) for one in limits)
    return compare(kernel.name, outputs, *(one * spec.tp for one in each))


# The typical error takes every rounding at its largest, 1.7 times the root mean square. A right
# kernel's norm over many elements stays below twice that; a few elements may have seven standard
# deviations.
_NORM_SLACK = 2.0
_FEW_ELEMENTS = 100
_FEW_SLACK = 4.0


def compare(
    name: str,
    outputs: tuple[np.ndarray, ...],
    references: tuple[np.ndarray, ...],
    bounds: tuple[Any, ...],
    typical: tuple[Any, ...] = (),
) -> Proof:
    """Compare outputs with float64 references, element by element, under `bounds`.

    typical: with it, each output's error in Frobenius norm must keep twice that of its typical
    error too (four times for fewer than 100 elements). Worst-case bounds grow along a chain of
    products; this does not, and so finds a wrong tile, or a result of zeros, behind any chain.
    It holds for random arrays.

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
    norm_share = 0.0
    for error, expected in zip(errors, typical, strict=bool(typical)):
        most = np.linalg.norm(np.broadcast_to(expected, error.shape))
        slack = _NORM_SLACK if error.size >= _FEW_ELEMENTS else _FEW_SLACK
        found = float(np.linalg.norm(error))
        norm_share = max(norm_share, found / max(float(slack * most), 1e-300))
        passed = passed and found <= float(slack * most)
    return Proof(
        kernel=name,
        passed=passed,
        elements=sum(e.size for e in errors),
        max_error=float(max(np.max(e) for e in errors)),
        largest_bound=float(max(np.max(b) for b in limits)),
        max_bound_share=float(max(shares)),
        relative_error=float(distance / norm) if norm else float(distance),
        norm_share=norm_share,
    )
