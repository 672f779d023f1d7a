"""The cost of a compute instruction: how long it holds its engine, and when its result is ready.

`(interval, latency)` in microseconds: the engine can start the next instruction after `interval`;
a consumer waits for `latency`. The difference is the fixed pipeline overhead, which back-to-back
independent instructions hide and dependent ones pay. How many cycles an instruction streams is in
its row (`isa/cycles.py`). A trace repeats a few kinds of instructions thousands of times, and the
simulator numbers them while it runs (`Instruction.kind`), so each cost is found once.
"""

from __future__ import annotations

from nmm_compiler.simulator.isa.cycles import one_pass
from nmm_compiler.simulator.isa.names import CYCLES
from nmm_compiler.simulator.timing.compiler import scalar_can
from nmm_compiler.simulator.timing.dependence import DMA, ENGINES, SCALAR, TENSOR, VECTOR
from nmm_compiler.simulator.timing.dma import DmaCost, dma_cost
from nmm_compiler.simulator.trace import Instruction
from nmm_compiler.targets import Target

Cost = tuple[float, float]

_US = 1e6
RULES = {op: cycles for op, cycles in sorted(CYCLES.items()) if cycles is not one_pass}
"""How long an instruction holds its engine, where that is not a pass over its elements."""


def elements(instruction: Instruction) -> int:
    """Return N: the most elements per partition that any tensor operand walks."""
    return max([1, *(access.elements_per_partition for access in instruction.operands)])


def tensor_dtype(instruction: Instruction) -> str:
    """Return the dtype that sets the rate of a product: float32 if an operand is, of any two."""
    dtypes = [access.dtype for access in instruction.reads]
    return "float32" if "float32" in dtypes else dtypes[-1]


def _clock_us(target: Target, engine: str) -> float:
    """Return the microseconds of a cycle of an engine."""
    return _US / float(getattr(target, f"{engine}_clock_hz"))


def tensor_cost(target: Target, instruction: Instruction) -> Cost:
    """Return the cost of a matmul or a transpose on TensorE, at full clock.

    MultiplyMoving issues every max(N, 64) cycles; fp32 takes four passes.

    The next LoadStationary runs behind it at up to four times the speed, so it shows only when
    the stationary tile has more than four times the columns of the moving one. fp32 also pays
    for a short contraction.
    """
    attributes = instruction.attributes
    moving = attributes.get("n") or elements(instruction)
    stationary = attributes.get("m") or target.stationary_free_max_elements
    columns = max(moving, target.tensor_min_interval_cycles)
    columns = max(columns, stationary / target.stationary_load_speedup)
    if tensor_dtype(instruction) == "float32":
        transpose = attributes.get("is_transpose")
        factor = target.fp32_pass_factor
        if transpose and target.tensor_transpose_mode:
            factor /= 2.0
        elif attributes.get("k", target.partitions) <= target.tensor_fp32_short_rows:
            factor *= target.tensor_fp32_short_factor
        elif attributes.get("onezero"):
            factor /= 2.0  # an operand of ones and zeros needs no low half
        columns = max(columns, target.tensor_fp32_min_columns)
        cycles = factor * columns + target.tensor_fp32_overhead_cycles
    else:
        cycles = columns + target.tensor_interval_overhead_cycles
    interval = cycles * _clock_us(target, "tensor")
    return interval, interval + target.tensor_latency_seconds * _US


def other_cost(target: Target, instruction: Instruction, engine: str = "") -> Cost:
    """Return the cost of an instruction of any engine but TensorE.

    engine: where the compiler has placed it, by default where the trace says.
    No instruction issues sooner than 64 cycles after the one before it.
    """
    engine = engine or instruction.engine
    clock = _clock_us(target, "gpsimd" if engine == "sync" else engine)
    if engine == "sync" or not instruction.operands:
        cycles = 0.0
    else:
        rule = RULES.get(instruction.op, one_pass)
        cycles = rule(target, instruction, engine, elements(instruction))
        accesses, least = instruction.operands, target.wide_stride_bytes
        if any(a.memory != "hbm" and abs(a.inner_step) >= least for a in accesses):
            cycles *= target.wide_stride_factor
    interval = max(
        cycles + target.engine_streaming_overhead_cycles, float(target.engine_min_cycles)
    )
    latency = max(cycles + _pipeline_cycles(target, instruction, engine), interval)
    return interval * clock, latency * clock


def _pipeline_cycles(target: Target, instruction: Instruction, engine: str) -> float:
    """Return the cycles between the last element and its result.

    Nothing is read for a memset. ScalarE reads each bias and scale tile first, and every function
    but a copy reads a bias, given or not.
    """
    if not instruction.reads:
        return float(target.engine_min_cycles)
    if engine != "scalar":
        return float(target.engine_isolated_overhead_cycles)
    small = sum(a.elements_per_partition == 1 for a in instruction.reads[1:])
    if instruction.attributes.get("function", "copy") not in _COPIES:
        small = max(small, 1)
    return float(target.scalar_isolated_overhead_cycles + small * target.scalar_operand_read_cycles)


_COPIES = frozenset({"copy", "identity", "multiply", "add", ""})


# Functions that every activation table holds, so that switching to them loads nothing.
_IN_EVERY_TABLE = frozenset({"copy", "identity", "square", "abs", "relu", ""})


class Work:
    """One kind of instruction. Times in microseconds.

    first: one of them; count: how many there are in the trace.
    engine: where it runs, as an index of ENGINES: where the trace says, or the compiler puts it.
    interval, latency: as in costs.py.
    table: the activation function whose table it needs, "" for none. dma: the cost of a transfer.
    psum, sbuf: whether it uses that memory.
    """

    def __init__(self, engine: int, instruction: Instruction) -> None:
        self.first, self.count = instruction, 0
        self.engine = engine
        self.interval = self.latency = 0.0
        self.table = ""
        self.dma: DmaCost | None = None
        memories = {a.memory for a in instruction.operands}
        self.psum, self.sbuf = "psum" in memories, "sbuf" in memories


def work_of(target: Target, instruction: Instruction) -> Work:
    """Return the work of an instruction."""
    engine = ENGINES.index(instruction.engine)
    if target.unset_engine_prefers_scalar and engine == VECTOR and scalar_can(instruction):
        engine = SCALAR
    work = Work(engine, instruction)
    if engine == DMA:
        work.dma = dma_cost(target, instruction)
    elif engine == TENSOR:
        work.interval, work.latency = tensor_cost(target, instruction)
    else:
        work.interval, work.latency = other_cost(target, instruction, ENGINES[work.engine])
        name = instruction.attributes.get("function", "")
        needs_table = work.engine == SCALAR and instruction.op.startswith("activat")
        if needs_table and name not in _IN_EVERY_TABLE:
            work.table = name
    return work
