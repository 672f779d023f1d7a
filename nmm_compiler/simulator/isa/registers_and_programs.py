"""Registers, versions, and the exchange of two programs: core_barrier and sendrecv."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import OperandError, SimulationError
from nmm_compiler.simulator.isa.enums import dma_engine, engine, nc_version
from nmm_compiler.simulator.isa.instruction import (
    NO_ATTRIBUTES,
    Call,
    Steps,
    attributes,
    instruction,
)
from nmm_compiler.simulator.isa.operands import DMA_MEMORIES, SBUF
from nmm_compiler.simulator.isa.values import put, raw
from nmm_compiler.simulator.machine import current, running
from nmm_compiler.simulator.tensors.registers import VirtualRegister
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
    machine.note("register_alloc", x)
    if x is None:
        return VirtualRegister()
    if isinstance(x, VirtualRegister):
        return VirtualRegister(x.read())
    if not isinstance(x, (int, np.integer)):
        raise machine.error(
            OperandError,
            f"nisa.register_alloc: {type(x).__name__}; pass an int, or load a tensor with "
            "nisa.register_load",
        )
    return VirtualRegister(int(x))


def _register(role: str, value: Any) -> VirtualRegister:
    if isinstance(value, VirtualRegister):
        return value
    raise current().error(OperandError, f"nisa.{role}: {type(value).__name__}; pass a register")


@instruction(engines=("sync",), waits=True)
def register_move(call: Call, dst: Any, src: Any) -> Steps:
    """dst = src, an integer or another register."""
    target = _register("register_move", dst)
    number = (
        0 if isinstance(src, VirtualRegister) else call.integer("src", src, range(-(2**31), 2**32))
    )
    yield NO_ATTRIBUTES
    if isinstance(src, VirtualRegister):
        target.write(src.value, src.known)
    else:
        target.write(number)


@instruction(
    engines=("sync",),
    operands="src[1 1] ->",
    memory=DMA_MEMORIES,
    waits=True,
)
def register_load(call: Call, dst: Any, src: Any) -> Steps:
    """dst = the single element of src (HBM or SBUF)."""
    machine = call.machine
    target = _register("register_load", dst)
    if src.dtype.item_bytes > 4 or src.dtype.kind == "packed":
        raise call.error(OperandError, f"src is {src.dtype}; a register holds up to 32 bits")
    yield NO_ATTRIBUTES
    if machine.data:
        target.write(int(src.known("a register").reshape(-1)[0]))
    else:
        target.write(0, known=False)


@instruction(
    engines=("sync",),
    operands="-> dst[1 1]",
    memory=DMA_MEMORIES,
)
def register_store(call: Call, dst: Any, src: Any) -> Steps:
    """dst (one element, HBM or SBUF) = register src."""
    register = _register("register_store", src)
    yield NO_ATTRIBUTES
    put(dst, np.full(dst.shape, register.read(), np.float32))


@instruction(
    engines=("gpsimd",),
    operands="data ->",
    memory=("hbm",),
    waits=True,
)
def core_barrier(
    call: Call, data: Any, cores: Any, engine: Any = engine.gpsimd, name: str | None = None
) -> Steps:
    """Wait until the other program is here too; then its writes to `data` are visible."""
    machine = call.machine
    if not isinstance(cores, (tuple, list)) or tuple(cores) != (0, 1):
        raise call.error(OperandError, f"cores {cores!r}; only (0, 1) is supported")
    if machine.programs is None or machine.grid < 2:
        raise machine.error(
            SimulationError,
            "nisa.core_barrier in a single program waits for a core that does not run; pass grid=2",
        )
    if getattr(data.buffer, "name", "") != "shared_hbm":
        raise call.error(
            OperandError,
            f"data {data.name!r} is in private HBM, which the other core does not see; allocate "
            "it in nl.shared_hbm",
        )
    call.writes += call.reads
    call.engine = "gpsimd" if engine.name == "unknown" else engine.name
    if call.engine == "dma":
        raise call.error(OperandError, "engine=dma has no sequencer; use another engine")
    yield attributes(cores=2)
    machine.programs.barrier(machine)


@instruction(
    engines=("dma",),
    operands="src -> dst",
    memory=SBUF,
    same_dtype=("dst", "src"),
    integers={"send_to_rank": range(2), "recv_from_rank": range(2)},
    waits=True,
)
def sendrecv(
    call: Call,
    src: Any,
    dst: Any,
    send_to_rank: Any,
    recv_from_rank: Any,
    pipe_id: Any,
    dma_engine: Any = dma_engine.dma,
    name: str | None = None,
) -> Steps:
    """Exchange SBUF tiles with the other program."""
    machine = call.machine
    if dst.shape != src.shape:
        raise call.error(
            OperandError, f"dst {dst.shape}, src {src.shape}; they must have the same shape"
        )
    if machine.programs is None or machine.grid < 2:
        raise call.error(SimulationError, "it is in a single program has no peer; pass grid=2")
    size = src.free_size * src.dtype.item_bytes
    limit = 256 * src.dtype.item_bytes
    if getattr(dma_engine, "name", "") == "gpsimd_dma" and size > limit:
        raise call.error(
            OperandError,
            f"by gpsimd_dma: {size} B per partition; at most {limit} B of {src.dtype}",
        )
    yield attributes(
        issuer="gpsimd",
        dge_mode="none",
        transpose=False,
        indirect=False,
        pipe=str(pipe_id),
        engine=getattr(dma_engine, "name", "dma"),
    )
    sent = (raw(src).copy(), machine.poisoned) if machine.data else None
    machine.poisoned = []
    received = machine.programs.exchange(
        machine, (send_to_rank, recv_from_rank), str(pipe_id), sent
    )
    if machine.data:
        values, machine.poisoned = received
        put(dst, values, exact=True)
