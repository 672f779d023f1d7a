"""Dtypes of Beta 1 results: how tiles and numbers of different dtypes promote.

The rules are the type promotion table of the NKI documentation (aws-neuron-sdk 2.26,
`nki.api.shared`): a float wins over an integer, the wider of two floats or integers wins, and a
pair of which neither holds the other becomes a wider dtype. A Python number counts as the widest of
its kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.dtypes import DType

_WIDENED = {
    frozenset(("float16", "bfloat16")): dtypes.float32,
    frozenset(("float8_e4m3", "float8_e5m2")): dtypes.bfloat16,
    frozenset(("int32", "uint32")): dtypes.float32,
}
_FLOAT_RANK = {"float32": 4, "tfloat32": 3, "bfloat16": 2, "float16": 2}


def _as_integer(kind: DType) -> DType:
    return dtypes.uint8 if kind.kind == "bool" else kind


def promote(first: DType, second: DType) -> DType:
    """Return the dtype of an operation on both."""
    if first == second:
        return first
    widened = _WIDENED.get(frozenset((str(first), str(second))))
    if widened is not None:
        return widened
    a, b = _as_integer(first), _as_integer(second)
    if (a.kind == "float") != (b.kind == "float"):
        return a if a.kind == "float" else b
    if a.kind == "float":
        return a if _FLOAT_RANK.get(a, 1) >= _FLOAT_RANK.get(b, 1) else b
    both = np.promote_types(a.numpy, b.numpy)
    return dtypes.find(both) or dtypes.float32


def kind_of_number(value: Any) -> DType:
    """Return the dtype of a number: its own for NumPy scalars, the widest for Python's."""
    if isinstance(value, np.generic):
        return dtypes.find(value.dtype) or dtypes.float32
    if isinstance(value, bool):
        return dtypes.uint8
    return dtypes.int32 if isinstance(value, int) else dtypes.float32
