"""The names of the stand-in `nki.language`."""

from __future__ import annotations

from typing import Any

from nmm_compiler.simulator.language import (
    base,
    device_loops,
    math,
    random_numbers,
    reductions,
    tiles,
)
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import NkiTensor

NAMES: dict[str, Any] = {
    "NKIObject": NKIObject,
    "NkiTensor": NkiTensor,
    "DType": dtypes.DType,
    "MemoryRegion": base.MemoryRegion,
    "float8_e4m3fn_x4": dtypes.float8_e4m3fn_x4,
    "all": reductions.all_,
    "tan": math.tan,
    "where": math.where,
}
for _name in (
    "bool_", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32",
    "bfloat16", "tfloat32", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e5m2_x4",
    "float8_e8m0fnu", "float4_e2m1fn_x4",
):  # fmt: skip
    NAMES[_name] = getattr(dtypes, _name)
for _name in (
    "sbuf", "psum", "hbm", "private_hbm", "shared_hbm", "tile_size", "is_hbm", "is_on_chip",
    "is_psum", "is_sbuf", "ndarray", "shared_constant", "shared_identity_matrix", "ds",
    "affine_range", "sequential_range", "static_range", "no_reorder", "program_id", "num_programs",
    "program_ndim", "device_print",
):  # fmt: skip
    NAMES[_name] = getattr(base, _name)
for _name in ("dynamic_range", "fori_loop", "while_loop"):
    NAMES[_name] = getattr(device_loops, _name)
for _name in (
    "load", "store", "load_transpose2d", "transpose", "matmul", "expand_dims", "broadcast_to",
    "gather_flattened", "full", "zeros", "ones", "zeros_like", "empty_like",
):  # fmt: skip
    NAMES[_name] = getattr(tiles, _name)
for _name in ("mean", "var", "softmax", "rms_norm"):
    NAMES[_name] = getattr(reductions, _name)
for _name in ("rand", "random_seed", "dropout"):
    NAMES[_name] = getattr(random_numbers, _name)
NAMES.update(math.FUNCTIONS)
