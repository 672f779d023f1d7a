"""Random numbers: rng, rand2, dropout and the generators' state.

The hardware's bit streams are not public; these come from a seeded generator of the run, so a
kernel gives the same numbers every time, but not those of a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, OperandError
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.isa.instruction import NO_ATTRIBUTES, Call, Steps, instruction
from nmm_compiler.simulator.isa.operands import SBUF, check_dtype, require_present
from nmm_compiler.simulator.isa.values import F32, f32, put, raw, scalar_value
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_UNIFORM = frozenset(
    {"float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32"}
) | (INTEGERS - {"int64", "uint64"})


def generator(machine: Machine) -> np.random.Generator:
    """Return the run's generator, seeded with 0 until a kernel seeds it."""
    if machine.random_state is None:
        machine.random_state = np.random.default_rng(0)
    found: np.random.Generator = machine.random_state
    return found


@instruction(
    engines=("vector", "gpsimd"),
    operands="-> dst",
    dtypes={"dst": INTEGERS - {"int64", "uint64"}},
)
def rng(call: Call, dst: Any, engine: Any = engine.vector, name: str | None = None) -> Steps:
    """dst = random bits, the low bits of 32, on VectorE or GpSimd."""
    require_present(call.machine, f"rng(engine={call.choose()})")
    yield NO_ATTRIBUTES
    bits = generator(call.machine).integers(0, 1 << 32, dst.shape, np.uint64)
    item = dst.dtype.item_bytes
    low = (bits & ((1 << (8 * item)) - 1)).astype(f"u{item}").view(dst.dtype.numpy)
    put(dst, low)


@instruction(
    engines=("vector",),
    operands="src_seeds[1 1] ->",
)
def set_rng_seed(call: Call, src_seeds: Any, name: str | None = None) -> Steps:
    """Seed VectorE's generator with a [1, 1] 32-bit value."""
    if src_seeds.dtype.item_bytes != 4:
        raise call.error(OperandError, f"src_seeds is {src_seeds.dtype}; pass a 32-bit value")
    yield NO_ATTRIBUTES
    seed = int(np.ascontiguousarray(raw(src_seeds)).reshape(-1).view(np.uint32)[0])
    call.machine.random_state = np.random.default_rng(seed)


def _check_state(call: Call, view: NkiTensor) -> str:
    """Return the engine whose state a tile holds, after the rules for it."""
    chosen = call.choose()
    require_present(call.machine, f"{call.op}(engine={chosen})")
    wanted = 6 if chosen == "gpsimd" else 24
    if view.dtype != "uint32" or view.free_size != wanted:
        raise call.error(
            OperandError,
            f"{view.shape} {view.dtype}; it must be uint32 with {wanted} elements per partition "
            f"for {chosen}",
        )
    return chosen


@instruction(
    engines=("gpsimd", "vector"),
    operands="src_seeds ->",
    memory=SBUF,
)
def rand_set_state(
    call: Call, src_seeds: Any, engine: Any = engine.gpsimd, name: str | None = None
) -> Steps:
    """Seed an engine's generators from a uint32 tile."""
    machine, chosen = call.machine, _check_state(call, src_seeds)
    yield NO_ATTRIBUTES
    seeds = raw(src_seeds)
    machine.accumulators["random " + chosen] = seeds.copy()
    machine.random_state = np.random.default_rng([int(s) for s in seeds.reshape(-1)])


@instruction(
    engines=("gpsimd", "vector"),
    operands="-> dst",
)
def rand_get_state(
    call: Call, dst: Any, engine: Any = engine.gpsimd, name: str | None = None
) -> Steps:
    """Store an engine's generator state: what was last set, or zeros."""
    machine, chosen = call.machine, _check_state(call, dst)
    if dst.memory == "psum":
        require_present(machine, "rand_get_state(dst in PSUM)")
    yield NO_ATTRIBUTES
    known = machine.accumulators.get("random " + chosen)
    if known is None or known.size != dst.size:
        known = np.zeros(dst.shape, np.uint32)
    put(dst, known.reshape(dst.shape))


@instruction(
    engines=("vector",),
    operands="-> dst[P F]",
    numbers={"min": FLOAT32, "max": FLOAT32},
    dtypes={"dst": _UNIFORM},
)
def rand2(call: Call, dst: Any, min: Any, max: Any, name: str | None = None) -> Steps:
    """dst = uniform random numbers in [min, max] on VectorE of trn3."""
    if not call.tensors(call.row.reads) and not min < max:
        raise call.error(HazardError, f"min={min}, max={max}; min must be below max")
    yield NO_ATTRIBUTES
    low, high = scalar_value(min, len(dst.shape)), scalar_value(max, len(dst.shape))
    unit = generator(call.machine).random(dst.shape, dtype=F32)
    put(dst, (low + unit * (high - low)).astype(F32))


@instruction(
    engines=("vector",),
    operands="data[P F] -> dst[P F]",
    numbers={"prob": FLOATS},
    streams=("data",),
    same_dtype=("dst", "data"),
)
def dropout(call: Call, dst: Any, data: Any, prob: Any, name: str | None = None) -> Steps:
    """dst = data with elements replaced by zero with probability `prob`, on VectorE."""
    if prob.__class__ is NkiTensor and data.dtype not in FLOATS:
        check_dtype(call.machine, call.op, "prob", prob, FLOAT32)
    yield NO_ATTRIBUTES
    values = f32(data)
    drop = generator(call.machine).random(values.shape, dtype=F32)
    put(dst, np.where(drop < scalar_value(prob, values.ndim), F32(0), values))
