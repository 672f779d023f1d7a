"""The names of the stand-in `nki.language`."""

from __future__ import annotations

from typing import Any

from nmm_compiler.simulator.language import base, exports, functions
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import NkiTensor

NAMES: dict[str, Any] = {
    **exports.NAMES,
    **functions.FUNCTIONS,
    **{str(d): d for d in dtypes.ALL.values() if d not in ("bool", "int64", "uint64")},
    "bool_": dtypes.bool_,
    "NKIObject": NKIObject,
    "NkiTensor": NkiTensor,
    "DType": dtypes.DType,
    "all": functions.all_,
    "sbuf": base.sbuf,
    "psum": base.psum,
    "hbm": base.hbm,
    "private_hbm": base.private_hbm,
    "shared_hbm": base.shared_hbm,
    "tile_size": base.tile_size,
    "sequential_range": base.affine_range,
    "static_range": base.affine_range,
}
