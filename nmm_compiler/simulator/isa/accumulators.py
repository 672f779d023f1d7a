"""The accumulator registers of ScalarE and VectorE, which reductions of other instructions use."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import (
    KernelArgumentError,
    TensorShapeError,
    UninitializedReadError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.instruction import Call
from nmm_compiler.simulator.isa.operands import refuse_dtype
from nmm_compiler.simulator.isa.operators import Op
from nmm_compiler.simulator.isa.values import F32, scalar_value, write
from nmm_compiler.simulator.machine import Machine


def _accumulate(
    machine: Machine,
    register: str,
    command: Any,
    op: Op,
    values: np.ndarray | None,
    initial: Any = None,
) -> np.ndarray:
    """Update the accumulator registers of an engine; return float32 [P].

    register: "scalar" or "vector". values: what is reduced along the free axes, [P, ...].
    """
    name = getattr(command, "name", "idle")
    state = machine.accumulators.get(register)
    partitions = 0 if values is None else values.shape[0]
    if name in ("reset", "reset_reduce"):
        state = np.full(partitions, op.identity, F32)
    elif name == "load_reduce":
        start = scalar_value(initial, 1)
        state = np.broadcast_to(np.asarray(start, F32).reshape(-1), (partitions,)).copy()
    elif name == "reduce" and (state is None or state.shape[0] != partitions):
        machine.rule(
            TensorShapeError,
            f"reduce_cmd.reduce continues the {register} engine's accumulators, which hold "
            f"{0 if state is None else state.shape[0]} partitions, not {partitions}; start with "
            "reset_reduce",
        )
        state = np.full(partitions, op.identity, F32)
    if name in ("reduce", "reset_reduce", "load_reduce") and values is not None:
        assert state is not None
        flat = np.asarray(values, F32).reshape(partitions, -1)
        part = op.reduce.reduce(flat, axis=1)
        state = op.reduce(state, part).astype(F32)
    if state is None or state.shape[0] != partitions:
        machine.rule(
            UninitializedReadError,
            f"reduce_res reads the {register} engine's accumulators, which no instruction has set "
            f"for {partitions} partitions; pass reduce_cmd=nisa.reduce_cmd.reset_reduce",
        )
        return np.full(partitions, np.nan, F32)
    machine.accumulators[register] = state
    key = f"poison of {register}"
    before = None if name not in ("idle", "reduce") else machine.accumulators.get(key)
    now = [(m, origin) for _, m, origin in machine.poisoned if len(m) == partitions]
    if before is not None:
        machine.poisoned.append((None, *before))
        now.append(before)
    if now:
        rows = np.logical_or.reduce([m.reshape(partitions, -1).any(axis=1) for m, _ in now])
        machine.accumulators[key] = rows[:, None], now[0][1]
    else:
        machine.accumulators.pop(key, None)
    return state


def write_sum(
    call: Call,
    register: str,
    command: Any,
    op: Op,
    values: np.ndarray,
    result: Any,
    initial: Any = None,
    negate: bool = False,
) -> None:
    """Update the accumulators by a reduce_cmd; read them out into `result` if it is a tile.

    VectorE's idle may still modify them, so their value is unknown afterwards.
    """
    idle = command is None or command.name == "idle"
    if idle and result is None:
        if register == "vector":
            call.machine.accumulators.pop(register, None)
        return
    total = _accumulate(call.machine, register, command, op, values, initial)
    if result is not None:
        write(result, (-total if negate else total).reshape(result.shape))


def check_command(
    call: Call, command: Any, supported: tuple[str, ...], initial: Any = None, role: str = ""
) -> None:
    """Check a reduce_cmd, and that an initial value comes with load_reduce and only with it.

    initial, role: the value that load_reduce starts from, None when unset, and its parameter.
    """
    name = "idle" if command is None else command.name
    if name not in supported:
        raise call.error(
            UnsupportedInstructionError,
            f"reduce_cmd.{name}; use reduce_cmd.{', '.join(supported)}",
        )
    if not role:
        return
    if name == "load_reduce" and initial is None:
        raise call.error(
            KernelArgumentError, f"reduce_cmd.load_reduce without {role}; pass the first value"
        )
    if name != "load_reduce" and initial is not None:
        raise call.error(
            KernelArgumentError,
            f"{role} is set with reduce_cmd.{name}; only load_reduce reads it",
        )


def reduce_result(
    call: Call, result: Any, partitions: int, allowed: frozenset[str] | None = None
) -> None:
    """Check and add the tile that accumulators are read into, if one is given."""
    if result is None:
        return
    call.write("reduce_res", result)
    if allowed is not None and result.dtype not in allowed:
        refuse_dtype(call.machine, call.op, "reduce_res", result, allowed)
    if result.shape[0] != partitions or result.free_size != 1:
        raise call.error(
            TensorShapeError, f"reduce_res {result.shape}; it must be ({partitions}, 1)"
        )
