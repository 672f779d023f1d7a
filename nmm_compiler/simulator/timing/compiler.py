"""What a compiler is taken to do to a kernel before it runs: one step, each law with its source.

Kernels that leave such work to a compiler are others': ours load everything once and name their
engines. benchmarks/laws.py shows what each law is worth.

*Open work.* The documentation says only "the compiler selects the best engine". On trn1, profiles
of NKIBench (zhang677/AccelOpt) show copies and multiply-add on ScalarE (`Works.find`).

*Tiles through PSUM.* Where two inputs in SBUF take two passes (trn1), PSUM spares one. The profile
of NKIBench's adamw, a kernel without a tensor in PSUM, writes six tiles there for each set of six
tensor_tensor: those that ScalarE makes and one tensor_tensor reads.

*One buffer for a load.* On trn2 Beta 1's nl.matmul loads a right operand for one product into one
buffer: NKIBench's two norms with a product take 4,114 and 8,466 us (Joejoedesu/voyager-compiler),
four times as long as with loads that run ahead.
"""

from __future__ import annotations

import dataclasses

from nmm_compiler.simulator.trace import Access, Instruction, Trace
from nmm_compiler.targets.base import Target

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
    """Tiles that ScalarE makes for one tensor_tensor and the compiler puts into PSUM."""

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


def awaited_tiles(trace: Trace, target: Target) -> set[int]:
    """Return the storages whose loads wait for the product that reads the tile before.

    A right operand of nl.matmul that is loaded for this one product has one buffer on trn2.
    """
    if not (trace.awaited and target.beta1_product_awaits_load):
        return set()
    found, readers = set(trace.awaited), dict.fromkeys(trace.awaited, 0)
    for instruction in trace.instructions:
        if instruction.engine != "dma":
            found.difference_update(access.storage for access in instruction.writes)
        for access in instruction.reads:
            if access.storage in readers:
                readers[access.storage] += 1
    return {storage for storage in found if readers[storage] == 1}
