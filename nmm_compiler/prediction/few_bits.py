"""The kernels of few-bit weights that compute what kernels of dense weights and factors compute.

`corrected_rows`, of MX weights and of those with a branch:

(matmul, matmul, matmul) of one x     ->   one kernel of three linears, or three kernels
(gated_mlp,)                          ->   one kernel of gate, up and down
(gated_mlp_up, matmul)                ->   gate and up in one kernel, down in another

`in_form`, of one kernel: experts in the form, others with fp8 weights or factors; what takes no MX
blocks keeps the model's dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.experts.spec import ExpertsSpec
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.layer import NORMED
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.prediction.forms import Form
from nmm_compiler.prices.kernel import NO_KERNEL
from nmm_compiler.prices.ways import Row
from nmm_compiler.targets import Target

_PLAIN = ("m", "k", "dtype", "lnc", "x_layout", "out_layout", "activation", *NORMED)


def in_form(spec: Any, form: Form, target: Target) -> Any:
    """Return the spec for weights of a form, the same where no kernel of the target takes it.

    x has the format of fp8 weights, too, unless its norm is inside.
    """
    changes: dict[str, Any] = {}
    packed: str = getattr(spec, "weight", "")
    if packed or not form.base:
        return spec
    if isinstance(spec, ExpertsSpec):
        changes = {
            "weight": form.base, "ranks": (form.rank, form.rank), "halves": "joined",
            "weight_layout": "row",
        }  # fmt: skip
    elif form.base == "fp8" and hasattr(spec, "scales"):
        x_dtype = None if spec.norm == "none" else spec.dtype
        changes = {"dtype": FP8, "scales": "channel", "x_dtype": x_dtype}
    with contextlib.suppress(ShapeError, SpecError):
        made = dataclasses.replace(spec, **changes)
        if isinstance(spec, ExpertsSpec):
            made.check(target)
        return made
    return spec


def corrected_rows(rows: tuple[Row, ...], form: Form) -> tuple[Row, ...]:
    """Return the rows in a form; empty for a form that is none of few bits, and for plain fp8.

    Rows of joined dense weights are left out: each has a branch of its own.
    """
    if form.base in ("", "fp8") and not form.rank:
        return ()
    gated = [row for row in rows if isinstance(row[0], GatedMLPUpSpec)]
    most = max(map(len, rows), default=0)
    made: list[Row] = []
    try:
        for row in gated or [row for row in rows if len(row) == most]:
            made.append(tuple(_corrected(one, form) for one in row))
            if len(row) > 1 and not gated:
                made.append((_beside(row, form),))
    except (*NO_KERNEL, TypeError):
        return ()
    return tuple(made)


def _fields(spec: Any, form: Form) -> dict[str, Any]:
    kept = {name: getattr(spec, name) for name in _PLAIN}
    return {**kept, "rank": form.rank, "weight": form.base, "branch": form.branch}


def _corrected(spec: Any, form: Form) -> CorrectedSpec:
    """Return the kernel of a dense one in a form; TypeError for one that has none."""
    if not isinstance(spec, (MatmulSpec, GatedMLPUpSpec)):
        raise TypeError(f"{spec.short()} is no dense kernel")
    fields = _fields(spec, form)
    if isinstance(spec, GatedMLPUpSpec):
        if any(spec.rank(branch) for branch in spec.branches):
            raise TypeError(f"{spec.short()} is no dense kernel")
        return CorrectedMLPSpec(**fields, n=spec.n, down=isinstance(spec, GatedMLPSpec))
    return CorrectedSpec(**fields, n=spec.n, bias=spec.bias)


def _beside(row: Row, form: Form) -> CorrectedSpec:
    """Return one kernel of several dense ones of the same x."""
    first: Any = row[0]
    every: list[Any] = list(row)
    fields = [_fields(one, form) for one in every]
    if any(one != fields[0] for one in fields):
        raise TypeError("products of different inputs")
    bias = tuple(one.bias for one in every)
    return CorrectedSpec(**_fields(first, form), n=tuple(one.n for one in every), bias=bias)
