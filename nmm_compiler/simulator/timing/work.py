"""What an instruction takes: on which engine it runs, and for how long.

Costs depend on the op, the engine, the attributes and the geometry of the operands. A trace repeats
a few such kinds thousands of times, and the simulator numbers them while it runs
(`Instruction.kind`), so each is worked out once; an instruction without a number is looked up by
its geometry.
"""

from __future__ import annotations

from nmm_compiler.simulator.timing.compiler import scalar_can
from nmm_compiler.simulator.timing.costs import ComputeCosts
from nmm_compiler.simulator.timing.dependence import DMA, ENGINES, SCALAR, TENSOR, VECTOR
from nmm_compiler.simulator.timing.dma import DmaCost, DmaCosts
from nmm_compiler.simulator.trace import Instruction
from nmm_compiler.targets import Target

# Functions that every activation table holds, so that switching to them loads nothing.
_IN_EVERY_TABLE = frozenset({"copy", "identity", "square", "abs", "relu", ""})


class Work:
    """One kind of instruction. Times in microseconds.

    engine: where it runs, as an index of ENGINES. placed: the compiler put it there, not the trace.
    interval, latency: as in costs.py.
    table: the activation function whose table it needs, "" for none. dma: the cost of a transfer.
    psum, sbuf: whether it uses that memory.
    """

    __slots__ = (
        "dma", "engine", "interval", "latency", "placed", "psum", "sbuf", "table",
    )  # fmt: skip

    def __init__(self, engine: int, placed: bool, instruction: Instruction) -> None:
        self.engine, self.placed = engine, placed
        self.interval = self.latency = 0.0
        self.table = ""
        self.dma: DmaCost | None = None
        memories = {a.memory for a in (*instruction.reads, *instruction.writes)}
        self.psum, self.sbuf = "psum" in memories, "sbuf" in memories


class Works:
    """The work of every kind of instruction on one target.

    kinds: by `Instruction.kind`; what is not there, `find` works out.
    """

    def __init__(self, target: Target, dma_costs: DmaCosts) -> None:
        self.target, self.dma_costs = target, dma_costs
        self.costs = ComputeCosts(target)
        self.kinds: dict[int, Work] = {}
        self._codes = {name: code for code, name in enumerate(ENGINES)}

    def find(self, instruction: Instruction) -> Work:
        """Return the work of an instruction, and remember it by its kind."""
        engine = self._codes[instruction.engine]
        is_open = engine == VECTOR and scalar_can(instruction)
        if is_open and self.target.unset_engine_prefers_scalar:
            work = self._work(SCALAR, True, instruction)
        else:
            work = self._work(engine, False, instruction)
        if instruction.kind:
            self.kinds[instruction.kind] = work
        return work

    def _work(self, engine: int, placed: bool, instruction: Instruction) -> Work:
        work = Work(engine, placed, instruction)
        if engine == DMA:
            work.dma = self.dma_costs.cost(instruction)
        elif engine == TENSOR:
            work.interval, work.latency = self.costs.tensor(instruction)
        else:
            work.interval, work.latency = self.costs.other(instruction, ENGINES[engine])
            name = instruction.attributes.get("function", "")
            needs_table = engine == SCALAR and instruction.op.startswith("activat")
            if needs_table and name not in _IN_EVERY_TABLE:
                work.table = name
        return work
