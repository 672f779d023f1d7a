"""What a program has beside its tensors: random numbers, registers, versions, another program.

The hardware's random bit streams are not public; these come from a seeded generator of the run, so
a kernel gives the same numbers every time, but not those of a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, OperandError, SimulationError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.isa.enums import dma_engine, engine, nc_version
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import (
    DMA_MEMORIES,
    SBUF,
    Issue,
    check_dtype,
)
from nmm_compiler.simulator.isa.values import F32, f32, put, scalar_value
from nmm_compiler.simulator.machine import CURRENT, current
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS, VECTOR_FLOATS
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.targets import get


@instruction(
    engines="vector gpsimd",
    operands="-> dst",
    dtypes={"dst": INTEGERS - {"int64", "uint64"}},
)
def rng(call: Issue, dst: Any, engine: Any = engine.vector) -> None:
    """dst = random bits, the low bits of 32, on VectorE or GpSimd."""
    bits = call.machine.random_state.integers(0, 1 << 32, dst.shape, np.uint64)
    item = dst.dtype.item_bytes
    low = (bits & ((1 << (8 * item)) - 1)).astype(f"u{item}").view(dst.dtype.numpy)
    put(dst, low)


@instruction(
    engines="vector",
    operands="src_seeds[1 1] ->",
    dtypes={"src_seeds": frozenset({"float32", "tfloat32", "int32", "uint32"})},
)
def set_rng_seed(call: Issue, src_seeds: Any) -> None:
    """Seed VectorE's generator with a [1, 1] 32-bit value."""
    bits = src_seeds.load(f"src_seeds of {call.name}").tobytes()
    seed = int.from_bytes(bits, "little")
    call.machine.random_state = np.random.default_rng(seed)


def _check_state(call: Issue, view: NkiTensor) -> str:
    """Return the engine whose state a tile holds, after the rules for it."""
    chosen = call.choose()
    wanted = 6 if chosen == "gpsimd" else 24
    call.need(
        view.dtype == "uint32" and view.free_size == wanted,
        f"for {chosen} it must be uint32 with {wanted} elements per partition",
    )
    return chosen


@instruction(
    engines="gpsimd vector",
    operands="src_seeds ->",
    memory=SBUF,
)
def rand_set_state(call: Issue, src_seeds: Any, engine: Any = engine.gpsimd) -> Steps:
    """Seed an engine's generators from a uint32 tile."""
    machine, chosen = call.machine, _check_state(call, src_seeds)
    yield {}
    seeds = src_seeds.load(f"src_seeds of {call.name}")
    machine.accumulators["random " + chosen] = seeds.copy()
    machine.random_state = np.random.default_rng([int(s) for s in seeds.reshape(-1)])


@instruction(
    engines="gpsimd vector",
    operands="-> dst",
)
def rand_get_state(call: Issue, dst: Any, engine: Any = engine.gpsimd) -> Steps:
    """Store an engine's generator state: what was last set, or zeros."""
    machine, chosen = call.machine, _check_state(call, dst)
    if dst.memory == "psum":
        machine.require("rand_get_state(dst in PSUM)")
    yield {}
    known = machine.accumulators.get("random " + chosen)
    if known is None or known.size != dst.size:
        known = np.zeros(dst.shape, np.uint32)
    put(dst, known.reshape(dst.shape))


@instruction(
    engines="vector",
    operands="-> dst[P F]",
    numbers={"min": FLOAT32, "max": FLOAT32},
    dtypes={"dst": VECTOR_FLOATS | INTEGERS - {"int64", "uint64"}},
)
def rand2(call: Issue, dst: Any, min: Any, max: Any) -> Steps:
    """dst = uniform random numbers in [min, max] on VectorE of trn3."""
    call.need(call.tensors(call.row.reads) or min < max, "min must be below max", HazardError)
    yield {}
    low, high = scalar_value(min, len(dst.shape)), scalar_value(max, len(dst.shape))
    unit = call.machine.random_state.random(dst.shape, dtype=F32)
    put(dst, (low + unit * (high - low)).astype(F32))


@instruction(
    engines="vector",
    operands="data[P F] -> dst[P F]",
    numbers={"prob": FLOATS},
    streams="data",
    same_dtype="dst data",
)
def dropout(call: Issue, dst: Any, data: Any, prob: Any) -> Steps:
    """dst = data with elements replaced by zero with probability `prob`, on VectorE."""
    if prob.__class__ is NkiTensor and data.dtype not in FLOATS:
        check_dtype(call, "prob", prob, FLOAT32)
    yield {}
    values = f32(data)
    drop = call.machine.random_state.random(values.shape, dtype=F32)
    put(dst, np.where(drop < scalar_value(prob, values.ndim), F32(0), values))


def get_nc_version() -> nc_version:
    """Return the generation of the target (trn2 outside a run)."""
    machine = CURRENT.machine
    return nc_version[(machine.target if machine is not None else get("trn2")).generation]


def get_nc_sub_version() -> int:
    """Return the silicon revision: always the first."""
    return 0


def register_alloc(x: Any = None) -> VirtualRegister:
    """Return a new register, with a value when `x` is an integer."""
    machine = current()
    machine.note("register_alloc", x)
    if isinstance(x, VirtualRegister):
        x = x.read()
    machine.need(
        x is None or isinstance(x, (int, np.integer)),
        f"nisa.register_alloc: {type(x).__name__}; pass an int, or load a tensor with "
        "nisa.register_load",
        OperandError,
    )
    return VirtualRegister(x)


@instruction(engines="sync", waits=True, named=False)
def register_move(call: Issue, dst: VirtualRegister, src: Any) -> Steps:
    """dst = src, an integer or another register."""
    if not isinstance(src, VirtualRegister):
        src = VirtualRegister(call.integer("src", src, range(-(2**31), 2**32)), symbol="")
    yield {}
    dst.write(src.value, src.known)


@instruction(
    engines="sync",
    operands="src[1 1] ->",
    memory=DMA_MEMORIES,
    waits=True,
    named=False,
)
def register_load(call: Issue, dst: VirtualRegister, src: Any) -> Steps:
    """dst = the single element of src (HBM or SBUF)."""
    call.need(src.dtype.item_bytes <= 4, "a register holds up to 32 bits")
    yield {}
    value = src.load("a register").reshape(-1)[0] if call.machine.data else 0
    dst.write(value, known=call.machine.data)


@instruction(
    engines="sync",
    operands="-> dst[1 1]",
    memory=DMA_MEMORIES,
    named=False,
)
def register_store(call: Issue, dst: Any, src: VirtualRegister) -> None:
    """dst (one element, HBM or SBUF) = register src."""
    put(dst, np.full(dst.shape, src.read(), np.float32))


@instruction(
    engines="gpsimd tensor vector scalar sync",
    operands="data ->",
    memory=("hbm",),
    waits=True,
    cycles=cycles.linear(0.0),  # whatever the size of data, nothing of it moves
)
def core_barrier(call: Issue, data: Any, cores: Any, engine: Any = engine.gpsimd) -> Steps:
    """Wait until the other program is here too; then its writes to `data` are visible."""
    machine = call.machine
    call.need(
        isinstance(cores, (tuple, list)) and tuple(cores) == (0, 1),
        "only the cores (0, 1) are supported",
    )
    call.need(machine.grid > 1, "a single program has no other core; pass grid=2", SimulationError)
    call.need(
        data.buffer.name == "shared_hbm",
        "the other core does not see data; allocate it in nl.shared_hbm",
    )
    call.writes += call.reads
    yield {}
    machine.programs.meet(
        machine, "nisa.core_barrier", (machine.rank,), machine.program_id, machine.grid, orders=True
    )


@instruction(
    engines="dma",
    operands="src -> dst",
    memory=SBUF,
    same_dtype="dst src",
    integers={"send_to_rank": range(2), "recv_from_rank": range(2)},
    waits=True,
    packed=True,
)
def sendrecv(
    call: Issue,
    src: Any,
    dst: Any,
    send_to_rank: Any,
    recv_from_rank: Any,
    pipe_id: Any,
    dma_engine: Any = dma_engine.dma,
) -> Steps:
    """Exchange SBUF tiles with the other program."""
    machine = call.machine
    call.need(dst.shape == src.shape, "dst and src must have the same shape")
    call.need(machine.grid > 1, "a single program has no peer; pass grid=2", SimulationError)
    call.need(
        dma_engine.name != "gpsimd_dma" or src.free_size <= 256,
        "gpsimd_dma takes at most 256 elements per partition",
    )
    yield {"issuer": "gpsimd", "dge_mode": "none"}
    sent = (src.load().copy(), machine.poisoned) if machine.data else None
    machine.poisoned = []
    me, what = machine.program_id, f"nisa.sendrecv on pipe {pipe_id}"
    # the peer has the same key only if each sends to the other and receives from it
    pairs = (tuple(sorted({me, other})) for other in (send_to_rank, recv_from_rank))
    key = machine.rank, str(pipe_id), *pairs
    met = machine.programs.meet(machine, what, key, me, machine.grid, sent, orders=True)
    if machine.data:
        values, machine.poisoned = met[recv_from_rank]
        put(dst, values, exact=True)
