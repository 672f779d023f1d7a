"""The names of the stand-in `nki.isa`: instructions, enumerations and constants."""

from __future__ import annotations

from typing import Any

from nmm_compiler.simulator.isa import (
    dma,
    elementwise,
    enums,
    gather,
    program_state,
    reductions,
    tensor_engine,
)
from nmm_compiler.simulator.isa.instruction import MEMBERS, Row
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.trace import Instruction

INSTRUCTIONS: dict[str, Any] = {
    name: row
    for family in (dma, elementwise, gather, program_state, reductions, tensor_engine)
    for name, row in vars(family).items()
    if isinstance(row, Row)
}

CONSTANTS: dict[str, Any] = {**MEMBERS, "nc_version": enums.nc_version}
NAMES: dict[str, Any] = {
    **INSTRUCTIONS,
    **CONSTANTS,
    "activation_reduce": elementwise.activation_reduce,
    "get_nc_version": program_state.get_nc_version,
    "get_nc_sub_version": program_state.get_nc_sub_version,
    "register_alloc": program_state.register_alloc,
    "VirtualRegister": VirtualRegister,
    "NkiInstruction": Instruction,
    **{f"{e.name}_engine": e for e in enums.engine if e.name not in ("dma", "sync")},
}
