"""The compiler's choices: engines that a kernel leaves open, and tiles that it puts into PSUM.

The documentation says only "the compiler selects the best engine". Both rules are taken from public
device profiles of kernels that leave the choice to it.
"""

from __future__ import annotations

import dataclasses

from nmm_compiler.simulator.trace import Access, Instruction, Trace

_SCALAR_PAIRS = frozenset({("multiply", "add"), ("multiply", None), ("add", None)})


def scalar_can(instruction: Instruction) -> bool:
    """Return whether the kernel left the engine open and ScalarE can run the instruction.

    ScalarE copies, multiplies by a number or a column, adds one, or does both.
    """
    attributes = instruction.attributes
    if not attributes.get("unset"):
        return False
    pair = attributes.get("function"), attributes.get("function1") or None
    return instruction.op == "tensor_copy" or pair in _SCALAR_PAIRS


class PassedOn:
    """Tiles that ScalarE makes for one tensor_tensor and the compiler puts into PSUM.

    Where two inputs in SBUF take two passes, PSUM spares one. NKIBench's adamw, a kernel without
    a tensor in PSUM, writes six tiles there for each set of six tensor_tensor, and they are those
    that ScalarE makes and one tensor_tensor reads.
    """

    def __init__(self, trace: Trace, bank_bytes: int) -> None:
        """Find the SBUF tiles of at most `bank_bytes` that are written once and read once."""
        uses: dict[int, int] = {}
        found: list[int] = []
        for instruction in trace.instructions:
            for access in (*instruction.reads, *instruction.writes):
                uses[access.storage] = uses.get(access.storage, 0) + 1
            if instruction.op == "tensor_tensor":
                found += [access.storage for access in instruction.reads]
        sizes = trace.allocations
        self.candidates = {
            storage
            for storage in found
            if uses[storage] == 2
            and sizes[storage].memory == "sbuf"
            and sizes[storage].address is None
            and sizes[storage].bytes_per_partition <= bank_bytes
        }
        self.inside: set[int] = set()

    def timed(self, instruction: Instruction, on_scalar: bool) -> Instruction:
        """Return the instruction with its tiles where they are, as its cost sees them."""
        if on_scalar and instruction.writes[0].storage in self.candidates:
            self.inside.add(instruction.writes[0].storage)
        elif not any(access.storage in self.inside for access in instruction.reads):
            return instruction
        return dataclasses.replace(
            instruction,
            reads=tuple(map(self._moved, instruction.reads)),
            writes=tuple(map(self._moved, instruction.writes)),
        )

    def _moved(self, access: Access) -> Access:
        if access.storage not in self.inside:
            return access
        return dataclasses.replace(access, memory="psum")
