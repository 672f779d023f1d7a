"""The accumulator registers of ScalarE and VectorE, which reductions of other instructions use."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import UninitializedReadError
from nmm_compiler.simulator.isa.instruction import Call
from nmm_compiler.simulator.isa.operators import Op
from nmm_compiler.simulator.isa.values import F32, put, scalar_value


def begin(
    call: Call, register: str, command: Any, op: Op, partitions: int, initial: Any = None
) -> np.ndarray:
    """Return float32 [P]: what the accumulators hold before an instruction adds to them.

    register: "scalar" or "vector". Each partition has its own, so `reduce` and `idle` find what an
    instruction of the same partitions has left there, and nothing else.
    """
    machine, name = call.machine, getattr(command, "name", "idle")
    if name in ("reset", "reset_reduce"):
        return np.full(partitions, op.identity, F32)
    if name == "load_reduce":
        start = np.asarray(scalar_value(initial, 1), F32).reshape(-1)
        return np.broadcast_to(start, (partitions,)).copy()
    first = call.reads[0].partition_start
    held, state = machine.accumulators.get(register, (None, None))
    if held != (first, partitions):
        machine.rule(
            UninitializedReadError,
            f"nisa.{call.op}: reduce_cmd.{name} reads the {register} engine's accumulators of "
            f"partitions {first}..{first + partitions - 1}, "
            + ("which no instruction has set" if held is None else
               f"the last instruction has set {held[0]}..{held[0] + held[1] - 1}")
            + "; start with reset_reduce",
        )  # fmt: skip
        return np.full(partitions, op.identity if name == "reduce" else np.nan, F32)
    return np.asarray(state)


def keep(call: Call, register: str, command: Any, state: np.ndarray) -> None:
    """Leave `state` in the accumulators, with the elements that depend on unwritten memory."""
    machine, name = call.machine, getattr(command, "name", "idle")
    partitions = len(state)
    machine.accumulators[register] = (call.reads[0].partition_start, partitions), state
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
    total = begin(call, register, command, op, len(values), initial)
    if not idle and command.name != "reset":
        part = op.reduce.reduce(np.asarray(values, F32).reshape(len(values), -1), axis=1)
        total = op.reduce(total, part).astype(F32)
    keep(call, register, command, total)
    if result is not None:
        put(result, (-total if negate else total).reshape(result.shape))
