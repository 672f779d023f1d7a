"""Random numbers: rng, rand2, dropout and the generators' state.

The hardware's bit streams are not public; these come from a seeded generator of the run, so a
kernel gives the same numbers every time, but not those of a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import TensorDtypeError, TensorShapeError
from nmm_compiler.simulator.isa.elementwise import NO_ATTRIBUTES, write
from nmm_compiler.simulator.isa.operands import (
    F32,
    ON_CHIP,
    check_destination,
    choose_engine,
    engine,
    f32,
    no_psum_on_gpsimd,
    operand,
    raw,
    require_instruction,
    same_elements,
    scalar_operand,
    scalar_value,
)
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.trace import Instruction


def generator(machine: Machine) -> np.random.Generator:
    """Return the run's generator, seeded with 0 until a kernel seeds it."""
    if machine.random_state is None:
        machine.random_state = np.random.default_rng(0)
    found: np.random.Generator = machine.random_state
    return found


def rng(dst: Any, engine: Any = engine.vector, name: str | None = None) -> Instruction:
    """dst = random bits, the low bits of 32, on VectorE or GpSimd."""
    machine = current()
    writes = operand(machine, "rng", "dst", dst, ON_CHIP)
    chosen = choose_engine(machine, "rng", engine, ("vector", "gpsimd"), "vector")
    no_psum_on_gpsimd(machine, "rng", chosen, dst)
    if dst.dtype.kind != "int":
        raise machine.error(
            TensorDtypeError, f"nisa.rng: dst is {dst.dtype}; it must be an integer dtype"
        )
    check_destination(machine, "rng", dst)
    instruction = machine.record("rng", chosen, (), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        bits = generator(machine).integers(0, 1 << 32, dst.shape, np.uint64)
        item = dst.dtype.item_bytes
        low = (bits & ((1 << (8 * item)) - 1)).astype(f"u{item}").view(dst.dtype.numpy)
        write(machine, dst, low)
    return instruction


def set_rng_seed(src_seeds: Any, name: str | None = None) -> Instruction:
    """Seed VectorE's generator with a [1, 1] 32-bit value."""
    machine = current()
    reads = operand(machine, "set_rng_seed", "src_seeds", src_seeds, ON_CHIP)
    if src_seeds.size != 1 or src_seeds.dtype.item_bytes != 4:
        raise machine.error(
            TensorShapeError,
            f"nisa.set_rng_seed: {src_seeds.shape} {src_seeds.dtype}; pass one 32-bit value",
        )
    instruction = machine.record("set_rng_seed", "vector", (reads,), (), NO_ATTRIBUTES, name)
    if machine.data:
        seed = int(np.ascontiguousarray(raw(src_seeds)).reshape(-1).view(np.uint32)[0])
        machine.random_state = np.random.default_rng(seed)
    return instruction


def _state_size(machine: Machine, op: str, view: Any, chosen: str) -> None:
    wanted = 6 if chosen == "gpsimd" else 24
    if view.dtype != "uint32" or view.free_size != wanted:
        raise machine.error(
            TensorShapeError,
            f"nisa.{op}: {view.shape} {view.dtype}; it must be uint32 with {wanted} elements per "
            f"partition for {chosen}",
        )


def rand_set_state(
    src_seeds: Any, engine: Any = engine.gpsimd, name: str | None = None
) -> Instruction:
    """Seed an engine's generators from a uint32 tile."""
    machine = current()
    require_instruction(machine, "rand_set_state")
    reads = operand(machine, "rand_set_state", "src_seeds", src_seeds, ("sbuf",))
    chosen = choose_engine(machine, "rand_set_state", engine, ("gpsimd", "vector"), "gpsimd")
    _state_size(machine, "rand_set_state", src_seeds, chosen)
    instruction = machine.record("rand_set_state", chosen, (reads,), (), NO_ATTRIBUTES, name)
    if machine.data:
        seeds = raw(src_seeds)
        machine.accumulators["random " + chosen] = seeds.copy()
        machine.random_state = np.random.default_rng([int(s) for s in seeds.reshape(-1)])
    return instruction


def rand_get_state(dst: Any, engine: Any = engine.gpsimd, name: str | None = None) -> Instruction:
    """Store an engine's generator state: what was last set, or zeros."""
    machine = current()
    require_instruction(machine, "rand_get_state")
    writes = operand(machine, "rand_get_state", "dst", dst, ON_CHIP)
    chosen = choose_engine(machine, "rand_get_state", engine, ("gpsimd", "vector"), "gpsimd")
    no_psum_on_gpsimd(machine, "rand_get_state", chosen, dst)
    _state_size(machine, "rand_get_state", dst, chosen)
    instruction = machine.record("rand_get_state", chosen, (), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        known = machine.accumulators.get("random " + chosen)
        if known is None or known.size != dst.size:
            known = np.zeros(dst.shape, np.uint32)
        write(machine, dst, known.reshape(dst.shape))
    return instruction


def rand2(dst: Any, min: Any, max: Any, name: str | None = None) -> Instruction:
    """dst = uniform random numbers in [min, max] on VectorE of trn3."""
    machine = current()
    require_instruction(machine, "rand2")
    writes = operand(machine, "rand2", "dst", dst, ON_CHIP)
    reads: list[Any] = []
    scalar_operand(machine, "rand2", "min", min, dst.shape[0], reads)
    scalar_operand(machine, "rand2", "max", max, dst.shape[0], reads)
    check_destination(machine, "rand2", dst)
    instruction = machine.record("rand2", "vector", tuple(reads), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        low, high = scalar_value(min, len(dst.shape)), scalar_value(max, len(dst.shape))
        unit = generator(machine).random(dst.shape, dtype=F32)
        write(machine, dst, (low + unit * (high - low)).astype(F32))
    return instruction


def dropout(dst: Any, data: Any, prob: Any, name: str | None = None) -> Instruction:
    """dst = data with elements replaced by zero with probability `prob`, on VectorE."""
    machine = current()
    writes = operand(machine, "dropout", "dst", dst, ON_CHIP)
    reads = [operand(machine, "dropout", "data", data, ON_CHIP)]
    same_elements(machine, "dropout", dst, data)
    scalar_operand(machine, "dropout", "prob", prob, data.shape[0], reads)
    if dst.dtype != data.dtype:
        raise machine.error(
            TensorDtypeError,
            f"nisa.dropout: dst is {dst.dtype}, data {data.dtype}; they must be the same",
        )
    check_destination(machine, "dropout", dst)
    instruction = machine.record("dropout", "vector", tuple(reads), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        values = f32(data)
        drop = generator(machine).random(values.shape, dtype=F32)
        write(machine, dst, np.where(drop < scalar_value(prob, values.ndim), F32(0), values))
    return instruction
