"""The kernels of few-bit weights with branches that compute what dense kernels compute.

(matmul, matmul, matmul) of one x     ->   one kernel of three linears, or three kernels
(gated_mlp,)                          ->   one kernel of gate, up and down
(gated_mlp_up, matmul)                ->   gate and up in one kernel, down in another
"""

from __future__ import annotations

from typing import Any

from nmm_compiler.kernels.linear.corrected import MULTIPLIED, CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.layer import NORMED
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, MatmulSpec
from nmm_compiler.prediction.forms import Form
from nmm_compiler.prices.kernel import NO_KERNEL
from nmm_compiler.prices.ways import Row

_PLAIN = ("m", "k", "dtype", "lnc", "x_layout", "out_layout", "activation", *NORMED)


def corrected_rows(rows: tuple[Row, ...], form: Form) -> tuple[Row, ...]:
    """Return the rows in a form; empty where TensorE does not multiply it as it is stored.

    Rows of joined dense weights are left out: each has a branch of its own.
    """
    if form.base not in MULTIPLIED:
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
