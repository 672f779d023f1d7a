"""`depends_on`: an instruction that waits for others by name must be able to do so."""

from __future__ import annotations

from nmm_compiler.errors import HazardError
from nmm_compiler.simulator.timing.regions import overlaps
from nmm_compiler.simulator.trace import Instruction, Trace

_OUT_OF_A_LOOP = (
    "which is inside a loop on the device that it is not in; wait for an instruction of its own "
    "loop, or outside of it"
)
_CYCLE = "which waits for it in turn, so that neither ever runs; remove one of the two"


def check_dependencies(trace: Trace) -> None:
    """Refuse a `depends_on` whose semaphore fires once a turn for one wait, or never."""
    for place, consumer in enumerate(trace.instructions):
        for producer in consumer.after:
            source = producer.index
            if any(a <= source < b and not a <= place < b for a, b in trace.turns):
                why = _OUT_OF_A_LOOP
            elif source >= place and _waits_for(trace.instructions, producer, consumer):
                why = _CYCLE
            else:
                continue
            raise HazardError(
                f"nisa.{consumer.op} depends on nisa.{producer.op} (line {producer.line}), {why}",
                consumer.file,
                consumer.line,
            )


def _waits_for(instructions: list[Instruction], first: Instruction, wanted: Instruction) -> bool:
    """Return whether `first` is `wanted`, or waits for it over `depends_on` and data."""
    todo, seen = [first], {first.index}
    while todo:
        instruction = todo.pop()
        if instruction is wanted:
            return True
        between = instructions[wanted.index : instruction.index]
        awaited = [one for one in between if _shares_data(one, instruction)]
        for producer in (*instruction.after, *awaited):
            if producer.index not in seen:
                seen.add(producer.index)
                todo.append(producer)
    return False


def _shares_data(before: Instruction, after: Instruction) -> bool:
    """Return whether two instructions touch one place, and one of them writes there."""
    pairs = [(written, other) for written in before.writes for other in after.reads]
    pairs += [(other, written) for other in before.operands
              for written in after.writes]  # fmt: skip
    return any(a.storage == b.storage and overlaps(a, b) for a, b in pairs)
