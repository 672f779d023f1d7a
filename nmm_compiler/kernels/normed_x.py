"""The norm of x before the first products of a kernel: its fields checked, its value and error."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import Array, check_name
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    Estimate,
    combine,
    gamma,
    inverse_roots,
    plus_bias,
    scaled,
)

NORMS = ("none", "rms", "layer")
NORMED = (
    "norm", "norm_gain", "norm_bias", "norm_offset", "norm_eps", "residual",
)  # fmt: skip
"""The fields of a spec that say what stands before and after its products."""


def check_norm(spec: Any) -> None:
    """Raise SpecError or UnknownNameError unless the norm is one that kernels compute.

    Fields that mean nothing without a norm, or without a gain, get one value.
    """
    check_name("norm", spec.norm, NORMS)
    for name in ("norm_eps", "norm_offset"):
        value = getattr(spec, name)
        if not np.isfinite(value) or (name == "norm_eps" and value < 0):
            raise SpecError(f"{spec.family}: {name} is {value!r}; pass a number of 0 or more")
    if spec.norm == "none":
        if spec.norm_gain or spec.norm_bias:
            raise SpecError(
                f"{spec.family}: norm_gain and norm_bias belong to a norm; pass norm='rms' or "
                "'layer', or drop them"
            )
        object.__setattr__(spec, "norm_eps", 1e-6)
    elif spec.fp8_x:
        raise SpecError(
            f"{spec.family}: norm={spec.norm!r} takes a plain x, and x is {spec.x_format}; make "
            "the norm before the kernel, or pass x_dtype bfloat16"
        )
    if getattr(spec, "tp_axis", "") and (spec.norm != "none" or spec.residual):
        raise SpecError(
            f"{spec.family}: norm and residual go with one rank, and tp_axis is {spec.tp_axis!r}; "
            "make the norm before the kernel, and add the residual behind it"
        )
    if spec.norm_bias and spec.norm == "rms":
        raise SpecError(f"{spec.family}: an rms norm has no bias; drop norm_bias")
    offset = float(spec.norm_offset) if spec.norm_gain else 0.0
    object.__setattr__(spec, "norm_offset", offset)
    object.__setattr__(spec, "norm_eps", float(spec.norm_eps))


def normed(spec: Any, x: Array, operands: dict[str, Array], typical: bool) -> Estimate:
    """Return the estimate of the norm of x [m, k] over its features, in fp32.

    The mean of a layer norm is a sum of k terms, times 1 / k.
    """
    value: Estimate = x, 0.0
    if spec.norm == "layer":
        k = x.shape[1]
        size = np.abs(x).mean(1, keepdims=True)
        off = (np.sqrt(k + 2) * FP32_ROUNDOFF if typical else gamma(k + 2)) * size
        centered = x - x.mean(1, keepdims=True)
        own = FP32_ROUNDOFF * (np.abs(centered) + off)
        value = centered, combine(np.broadcast_to(off, x.shape), own, typical)
    value = scaled(value, inverse_roots(value, spec.norm_eps, typical), typical)
    if spec.norm_gain:
        gain = operands["norm_gain"] + spec.norm_offset
        value = scaled(value, (gain, FP32_ROUNDOFF * np.abs(gain)), typical)
    return plus_bias(value, operands["norm_bias"], typical) if spec.norm_bias else value
