"""NKI dtypes: names, storage formats and how a value is converted on the way into memory.

A dtype is a string (`nl.float32 == "float32"`) that knows its NumPy storage dtype. Conversions
follow the documented rules: engines compute in float32; a float32 result is rounded to nearest
even on the write; float to integer rounds to nearest even and saturates.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


class DType(str):
    """An NKI dtype: a string with its storage format.

    numpy: dtype of one stored element; item_bytes, in kernels itemsize: its size.
    kind: "float", "int", "bool" or "packed".
    """

    numpy: np.dtype
    item_bytes: int
    itemsize: int
    name: str
    kind: str
    low: int
    high: int

    def __new__(cls, name: str, storage: Any = None, kind: str = "") -> DType:
        """Return the dtype `name` stored as NumPy dtype `storage`, or the known one."""
        if storage is None:
            known = find(str(name))
            if known is None:
                raise TypeError(f"{name!r} is no NKI dtype")
            return known
        self = super().__new__(cls, name)
        self.numpy = np.dtype(storage)
        self.item_bytes = self.itemsize = self.numpy.itemsize
        self.name = name
        self.kind = kind
        if kind == "int":
            info = np.iinfo(self.numpy)
            self.low, self.high = int(info.min), int(info.max)
        return self


_STORED: dict[str, dict[str, Any]] = {
    "float": {
        "float32": np.float32, "tfloat32": np.float32, "bfloat16": ml_dtypes.bfloat16,
        "float16": np.float16, "float8_e4m3": ml_dtypes.float8_e4m3,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    },
    "int": {
        "int8": np.int8, "int16": np.int16, "int32": np.int32, "uint8": np.uint8,
        "uint16": np.uint16, "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64,
    },
    "bool": {"bool": np.uint8},
    "packed": {
        "float8_e5m2_x4": np.uint32, "float8_e4m3fn_x4": np.uint32, "float4_e2m1fn_x4": np.uint16,
    },
}  # fmt: skip
"""The NumPy storage of each dtype, by kind."""
ALL: dict[str, DType] = {
    name: DType(name, storage, kind)
    for kind, stored in _STORED.items()
    for name, storage in stored.items()
}
float32, bfloat16, int32, uint8, uint16, bool_ = (
    ALL[name] for name in ("float32", "bfloat16", "int32", "uint8", "uint16", "bool")
)
ALL["bool_"] = bool_

FLOATS = frozenset(d for d in ALL.values() if d.kind == "float")
INTEGERS = frozenset(d for d in ALL.values() if d.kind == "int")
VECTOR_FLOATS = FLOATS - {"float8_e4m3fn", "float8_e8m0fnu"}
"""Those that VectorE's own exponentials and random numbers have."""
FLOAT32 = frozenset({"float32"})
FLOAT8 = frozenset({"float8_e4m3", "float8_e4m3fn", "float8_e5m2"})
PACKED_NUMPY = {str(d): np.dtype([(str(d), d.numpy)]) for d in ALL.values() if d.kind == "packed"}
"""NumPy dtypes of arrays of x4-packed elements: one field with the NKI dtype's name."""
_FROM_NUMPY = {
    **{d.numpy: d for d in ALL.values() if d.kind in ("int", "float") and d != "tfloat32"},
    **{array: ALL[name] for name, array in PACKED_NUMPY.items()},
    np.dtype(np.bool_): bool_,
}


def find(name: Any) -> DType | None:
    """Return the dtype for a name, DType, NumPy or ml_dtypes dtype or torch dtype, else None."""
    text = str(name)
    if isinstance(name, str) or text.startswith("torch."):
        return ALL.get(text.removeprefix("torch."))
    try:
        return _FROM_NUMPY.get(np.dtype(name))
    except TypeError:
        return None


def round_tfloat32(values: np.ndarray) -> np.ndarray:
    """Round float32 to 10 mantissa bits, nearest even; infinities and NaN pass."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def cast(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert computed values (float32 or integer) to the storage dtype of `dtype`.

    Round to nearest even; float to integer saturates (NaN becomes 0).
    """
    storage = dtype.numpy
    if dtype == "tfloat32":
        return round_tfloat32(values)
    if dtype.kind == "bool":
        return (values != 0).astype(np.uint8)
    if values.dtype == storage:
        return values
    if dtype.kind == "float":
        if values.dtype != np.float32 and dtype.item_bytes < 4:
            values = values.astype(np.float32)
        return values.astype(storage)
    if values.dtype.kind not in "iu":
        values = np.rint(values.astype(np.float64))
        values = np.where(np.isnan(values), 0.0, values)
    return np.clip(values, dtype.low, dtype.high).astype(storage)
