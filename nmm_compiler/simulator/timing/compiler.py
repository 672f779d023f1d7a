"""What a compiler is taken to do to a kernel before it runs: one step, each law with its source.

Kernels that leave such work to a compiler are others': ours load everything once and name their
engines. benchmarks/laws.py shows what each law is worth.

*Open work.* The documentation says only "the compiler selects the best engine". On trn1, profiles
of NKIBench (zhang677/AccelOpt) show copies and multiply-add on ScalarE (`costs.Work`).

*One buffer for a load.* On trn2 Beta 1's nl.matmul loads a right operand for one product into one
buffer: NKIBench's two norms with a product take 4,114 and 8,466 us (Joejoedesu/voyager-compiler),
four times as long as with loads that run ahead.
"""

from __future__ import annotations

from nmm_compiler.simulator.isa.elementwise import SCALAR_PAIRS
from nmm_compiler.simulator.trace import Instruction, Trace
from nmm_compiler.targets.base import Target


def scalar_can(instruction: Instruction) -> bool:
    """Return whether the kernel left the engine open and ScalarE can run the instruction.

    ScalarE copies, multiplies by a number or a column, adds one, or does both.
    """
    attributes = instruction.attributes
    pair = attributes.get("function"), attributes.get("function1") or None
    simple = instruction.op == "tensor_copy" or pair in SCALAR_PAIRS
    return simple and bool(attributes.get("unset"))


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
