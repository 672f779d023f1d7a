"""The names of the stand-in `nki.isa`: one entry per instruction, enum or constant."""

from __future__ import annotations

from typing import Any

from nmm_compiler.simulator import (
    isa_activation,
    isa_common,
    isa_dma,
    isa_elementwise,
    isa_gather,
    isa_microscaling,
    isa_random,
    isa_reduce,
    isa_registers,
    isa_select,
    isa_tensor,
)
from nmm_compiler.simulator.registers import VirtualRegister
from nmm_compiler.simulator.trace import Instruction

NAMES: dict[str, Any] = {
    "VirtualRegister": VirtualRegister,
    "NkiInstruction": Instruction,
    "tensor_engine": isa_common.engine.tensor,
    "vector_engine": isa_common.engine.vector,
    "scalar_engine": isa_common.engine.scalar,
    "gpsimd_engine": isa_common.engine.gpsimd,
    "unknown_engine": isa_common.engine.unknown,
}
ENUMS = (
    "engine", "reduce_cmd", "dge_mode", "oob_mode", "matmul_perf_mode", "nc_version", "dma_engine",
)  # fmt: skip
for _name in ENUMS:
    NAMES[_name] = getattr(isa_common, _name)
_INSTRUCTIONS: dict[Any, tuple[str, ...]] = {
    isa_activation: ("activation", "activation_reduce", "activate2", "exponential"),
    isa_dma: ("dma_copy", "dma_transpose", "dma_compute"),
    isa_elementwise: (
        "tensor_copy", "memset", "tensor_tensor", "tensor_scalar", "scalar_tensor_tensor",
        "reciprocal", "tensor_copy_predicated",
    ),
    isa_gather: (
        "local_gather", "nc_n_gather", "nc_stream_shuffle", "nonzero_with_count",
        "sequence_bounds", "topk",
    ),
    isa_microscaling: ("nc_matmul_mx", "quantize_mx"),
    isa_random: ("rng", "rand2", "set_rng_seed", "rand_set_state", "rand_get_state", "dropout"),
    isa_reduce: (
        "tensor_reduce", "tensor_partition_reduce", "tensor_scalar_reduce",
        "tensor_scalar_cumulative", "tensor_tensor_scan", "bn_stats", "bn_aggr", "max8",
        "nc_find_index8", "nc_match_replace8",
    ),
    isa_registers: (
        "get_nc_version", "get_nc_sub_version", "register_alloc", "register_move",
        "register_load", "register_store", "core_barrier", "sendrecv",
    ),
    isa_select: ("iota", "affine_select", "range_select", "select_reduce"),
    isa_tensor: ("nc_matmul", "nc_transpose"),
}  # fmt: skip
for _module, _names in _INSTRUCTIONS.items():
    for _name in _names:
        NAMES[_name] = getattr(_module, _name)
CONSTANTS: dict[str, Any] = {name: NAMES[name] for name in ENUMS}
