"""Registers, versions, and what connects two programs: core_barrier and sendrecv."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import SimulationError, TensorDtypeError, TensorShapeError
from nmm_compiler.simulator.isa.dma import store
from nmm_compiler.simulator.isa.elementwise import attributes
from nmm_compiler.simulator.isa.operands import (
    DMA_MEMORIES,
    SBUF,
    check_destination,
    dma_engine,
    engine,
    nc_version,
    operand,
    raw,
    require_instruction,
    same_elements,
)
from nmm_compiler.simulator.machine import current, running
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.trace import Instruction
from nmm_compiler.targets import get


def get_nc_version() -> nc_version:
    """Return the generation of the target (trn2 outside a run)."""
    machine = running()
    return nc_version[(machine.target if machine is not None else get("trn2")).generation]


def get_nc_sub_version() -> int:
    """Return the silicon revision: always the first."""
    return 0


def register_alloc(x: Any = None) -> VirtualRegister:
    """Return a new register, with a value when `x` is an integer."""
    machine = current()
    if x is None:
        return VirtualRegister()
    if isinstance(x, VirtualRegister):
        return VirtualRegister(x.read())
    if not isinstance(x, (int, np.integer)):
        raise machine.error(
            TensorDtypeError,
            f"nisa.register_alloc: {type(x).__name__}; pass an int, or load a tensor with "
            "nisa.register_load",
        )
    return VirtualRegister(int(x))


def _register(role: str, value: Any) -> VirtualRegister:
    if isinstance(value, VirtualRegister):
        return value
    raise current().error(TensorDtypeError, f"nisa.{role}: {type(value).__name__}; pass a register")


def register_move(dst: Any, src: Any) -> None:
    """dst = src, an integer or another register."""
    target = _register("register_move", dst)
    machine = current()
    machine.record("register_move", "sync", (), (), {}, None)
    if isinstance(src, VirtualRegister):
        target.write(src.value, src.known)
    else:
        target.write(int(src))


def register_load(dst: Any, src: Any) -> None:
    """dst = the single element of src (HBM or SBUF)."""
    target = _register("register_load", dst)
    machine = current()
    access = operand(machine, "register_load", "src", src, DMA_MEMORIES)
    if src.size != 1:
        raise machine.error(
            TensorShapeError, f"nisa.register_load: src {src.shape}; it must have one element"
        )
    machine.record("register_load", "sync", (access,), (), {}, None)
    if machine.data:
        target.write(int(raw(src).reshape(-1)[0]))
    else:
        target.write(0, known=False)


def register_store(dst: Any, src: Any) -> None:
    """dst (one element, HBM or SBUF) = register src."""
    machine = current()
    access = operand(machine, "register_store", "dst", dst, DMA_MEMORIES)
    if dst.size != 1:
        raise machine.error(
            TensorShapeError, f"nisa.register_store: dst {dst.shape}; it must have one element"
        )
    check_destination(machine, "register_store", dst)
    machine.record("register_store", "sync", (), (access,), {}, None)
    if machine.data:
        store(dst, np.full(dst.shape, _register("register_store", src).read()), False)


def core_barrier(
    data: Any, cores: Any, engine: Any = engine.gpsimd, name: str | None = None
) -> Instruction:
    """Wait until the other program is here too; then its writes to `data` are visible."""
    machine = current()
    require_instruction(machine, "core_barrier")
    access = operand(machine, "core_barrier", "data", data, ("hbm",))
    if tuple(cores) != (0, 1):
        raise machine.error(
            TensorShapeError, f"nisa.core_barrier: cores {tuple(cores)}; only (0, 1) is supported"
        )
    if machine.programs is None:
        raise machine.error(
            SimulationError,
            "nisa.core_barrier in a single program waits for a core that does not run; pass grid=2",
        )
    instruction = machine.record(
        "core_barrier", getattr(engine, "name", "gpsimd"), (access,), (access,),
        attributes(cores=2), name,
    )  # fmt: skip
    machine.programs.barrier(machine)
    return instruction


def sendrecv(
    src: Any,
    dst: Any,
    send_to_rank: Any,
    recv_from_rank: Any,
    pipe_id: Any,
    dma_engine: Any = dma_engine.dma,
    name: str | None = None,
) -> Instruction:
    """Exchange SBUF tiles with the other program."""
    machine = current()
    require_instruction(machine, "sendrecv")
    writes = operand(machine, "sendrecv", "dst", dst, SBUF)
    reads = operand(machine, "sendrecv", "src", src, SBUF)
    same_elements(machine, "sendrecv", dst, src)
    check_destination(machine, "sendrecv", dst)
    if dst.dtype != src.dtype:
        raise machine.error(
            TensorDtypeError,
            f"nisa.sendrecv: dst is {dst.dtype}, src {src.dtype}; they must be the same",
        )
    if machine.programs is None:
        raise machine.error(
            SimulationError, "nisa.sendrecv in a single program has no peer; pass grid=2"
        )
    ranks = (int(send_to_rank), int(recv_from_rank))
    if any(r not in (0, 1) for r in ranks):
        raise machine.error(TensorShapeError, f"nisa.sendrecv: ranks {ranks}; each must be 0 or 1")
    size = src.free_size * src.dtype.item_bytes
    limit = 256 * src.dtype.item_bytes
    if getattr(dma_engine, "name", "") == "gpsimd_dma" and size > limit:
        raise machine.error(
            TensorShapeError,
            f"nisa.sendrecv by gpsimd_dma: {size} B per partition; at most {limit} B of "
            f"{src.dtype}",
        )
    instruction = machine.record(
        "sendrecv", "dma", (reads,), (writes,),
        attributes(issuer="gpsimd", dge_mode="none", transpose=False, indirect=False,
                   pipe=str(pipe_id), engine=getattr(dma_engine, "name", "dma")), name,
    )  # fmt: skip
    sent = raw(src).copy() if machine.data else None
    received = machine.programs.exchange(machine, ranks, str(pipe_id), sent)
    if machine.data:
        store(dst, received.reshape(dst.shape), True)
    return instruction
