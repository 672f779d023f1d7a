"""The cycles that an engine takes over an instruction, as the instruction's row names them.

A rule takes the target, the instruction, the engine that runs it and N, the most elements per
partition of an operand; it leaves out the fixed overheads, which `timing/costs.py` adds. Cycle
counts follow the cost tables of NKI 0.1, vector performance modes those of the trn2 architecture
guide. The number of partitions in use never matters.
"""

from __future__ import annotations

from collections.abc import Callable

from nmm_compiler.simulator.tensors.dtypes import FLOAT8
from nmm_compiler.simulator.trace import Instruction
from nmm_compiler.targets import Target

Cycles = Callable[[Target, Instruction, str, int], float]
_SIXTEEN_BIT = frozenset({"bfloat16", "float16"})


def _fast_mode(target: Target, instruction: Instruction, engine: str) -> float:
    """Return how many elements a cycle VectorE copies or scales per partition.

    trn2 architecture guide: 512 elements a cycle (4 per partition) with 16-bit operands in SBUF
    and a contiguous innermost dimension; 2 if not contiguous, or with one side in PSUM and
    contiguous; 256 (2 per partition) with other operands in SBUF. Probes say that an output
    wider than the input gets none of it. trn3 adds 8-bit floats.
    """
    if not target.vector_fast_modes or engine not in ("vector", "scalar"):
        return 1.0
    tensors = [
        a for a in instruction.operands if a.elements_per_partition > 1 or a in instruction.writes
    ]
    contiguous = all(a.inner_step == a.item_bytes for a in tensors)
    in_psum = sum(a.memory == "psum" for a in tensors)
    small = _SIXTEEN_BIT | (FLOAT8 if target.vector_fast_float8 else frozenset())
    if any(a.dtype not in small for a in tensors):
        widens = tensors[-1].item_bytes > tensors[0].item_bytes
        fast = engine == "vector" and contiguous and not in_psum and not widens
    elif engine == "scalar":  # trn3: two elements a cycle on 16-bit data
        fast = target.scalar_fast_modes
    else:
        if contiguous and not in_psum:
            return 4.0
        fast = not in_psum or (in_psum == 1 and contiguous)
    return 2.0 if fast else 1.0


def linear(times: float | str = 1.0, over: float = 1.0, fixed: float | str = 0) -> Cycles:
    """`times` cycles for `over` elements, after `fixed` ones; numbers or fields of the target."""

    def cycles(target: Target, instruction: Instruction, engine: str, n: int) -> float:
        before, each = (getattr(target, x) if isinstance(x, str) else x for x in (fixed, times))
        return float(before + each * n / over)

    return cycles


one_pass = linear()


def copy(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """As many elements a cycle as the engine copies or scales."""
    return n / _fast_mode(target, instruction, engine)


def reducing(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """One pass, and 64 cycles to read the accumulators out if it reduces on the way."""
    extra = target.engine_min_cycles if instruction.attributes.get("reduces") else 0
    return float(n + extra)


def two_inputs(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Two operands share one SBUF port: a pass each, or one when one streams from PSUM.

    All of them 16-bit in SBUF: half of that.
    """
    passes = target.vector_two_input_passes if engine == "vector" else 2.0
    wide = [a for a in instruction.reads if a.elements_per_partition > 1]
    if len(wide) < 2 or sum(a.memory == "psum" for a in wide) == 1:
        return float(n)
    if engine == "vector" and all(
        a.dtype in _SIXTEEN_BIT and (passes > 1.0 or a.memory == "sbuf")
        for a in instruction.operands
    ):
        return passes * n / 2.0
    return passes * n


def reduce(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Two elements a cycle where a sum or a maximum has 16-bit operands."""
    if instruction.attributes.get("function") in ("add", "max", "maximum") and all(
        a.dtype in _SIXTEEN_BIT for a in instruction.operands
    ):
        return n / 2.0
    return float(n)


def memset(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Two elements a cycle for zeros of 16 bits; VectorE is slower for wider ones."""
    if all(a.dtype in _SIXTEEN_BIT for a in instruction.writes):
        return float(n) if instruction.attributes.get("nonzero") else n / 2.0
    return target.vector_memset_cycles * n if engine == "vector" else float(n)


def local_gather(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Each index costs 28 + 4 e cycles for e elements, shared by elements narrower than 4 bytes.

    nki.isa.local_gather: 150 + n e / C cycles for n indices of e elements, C = ((28 + 4 e) / (4 e))
    / min(4 / bytes, e). The page divides by C, which falls with e, and says that longer runs gather
    faster; both hold only if C is cycles per element, so this multiplies.
    """
    attributes = instruction.attributes
    count, run = attributes.get("indices", n), attributes.get("elements", 1)
    item = instruction.reads[0].item_bytes
    each = (28.0 + 4.0 * run) / (4.0 * run) / min(4.0 / item, run)
    return target.gpsimd_fixed_cycles + count * run * each


def topk(target: Target, instruction: Instruction, engine: str, n: int) -> float:
    """Four passes, and the k that are written."""
    return 4.0 * n + float(instruction.attributes.get("k", 8))
