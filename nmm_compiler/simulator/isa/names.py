"""The names of the stand-in `nki.isa`: one entry per instruction, enum or constant."""

from __future__ import annotations

from typing import Any

from nmm_compiler.simulator.isa import (
    activation,
    dma,
    elementwise,
    enums,
    gather,
    microscaling,
    random_numbers,
    reductions,
    registers_and_programs,
    selection,
    tensor_engine,
)
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.trace import Instruction

NAMES: dict[str, Any] = {
    "VirtualRegister": VirtualRegister,
    "NkiInstruction": Instruction,
    "tensor_engine": enums.engine.tensor,
    "vector_engine": enums.engine.vector,
    "scalar_engine": enums.engine.scalar,
    "gpsimd_engine": enums.engine.gpsimd,
    "unknown_engine": enums.engine.unknown,
}
ENUMS = (
    "engine", "reduce_cmd", "dge_mode", "oob_mode", "matmul_perf_mode", "nc_version", "dma_engine",
)  # fmt: skip
for _name in ENUMS:
    NAMES[_name] = getattr(enums, _name)
_INSTRUCTIONS: dict[Any, tuple[str, ...]] = {
    activation: ("activation", "activation_reduce", "activate2", "exponential"),
    dma: ("dma_copy", "dma_transpose", "dma_compute"),
    elementwise: (
        "tensor_copy", "memset", "tensor_tensor", "tensor_scalar", "scalar_tensor_tensor",
        "reciprocal", "tensor_copy_predicated",
    ),
    gather: (
        "local_gather", "nc_n_gather", "nc_stream_shuffle", "nonzero_with_count",
        "sequence_bounds", "topk",
    ),
    microscaling: ("nc_matmul_mx", "quantize_mx"),
    random_numbers: ("rng", "rand2", "set_rng_seed", "rand_set_state", "rand_get_state", "dropout"),
    reductions: (
        "tensor_reduce", "tensor_partition_reduce", "tensor_scalar_reduce",
        "tensor_scalar_cumulative", "tensor_tensor_scan", "bn_stats", "bn_aggr", "max8",
        "nc_find_index8", "nc_match_replace8",
    ),
    registers_and_programs: (
        "get_nc_version", "get_nc_sub_version", "register_alloc", "register_move",
        "register_load", "register_store", "core_barrier", "sendrecv",
    ),
    selection: ("iota", "affine_select", "range_select", "select_reduce"),
    tensor_engine: ("nc_matmul", "nc_transpose"),
}  # fmt: skip
for _module, _names in _INSTRUCTIONS.items():
    for _name in _names:
        NAMES[_name] = getattr(_module, _name)
CONSTANTS: dict[str, Any] = {name: NAMES[name] for name in ENUMS}
