"""Finds instructions that the NKI compiler drops, since an earlier one has the same result.

The published profile of the fused_mamba tutorial (v3) shows 39,695 VectorE instructions for 8,192
iterations of a loop that is written with five each: the product of two loop-invariant tiles is
computed once. The pass does the same for instructions that their function and operands determine
completely, if nothing wrote the operands in between. Identical loads are left as written: public
profiles show that some of them are dropped, without a visible rule.
"""

from __future__ import annotations

from nmm_compiler.simulator.trace import Access, Trace

_PURE = frozenset({"tensor_tensor", "reciprocal"})
_DISTANCE = 1000  # assumed: instructions over which the compiler keeps a result for reuse


def repeated_work(trace: Trace) -> dict[int, int]:
    """Return {index of a redundant instruction: index of the earlier one with the same result}."""
    if not _some_alike(trace):
        return {}
    versions: dict[int, int] = {}
    seen: dict[tuple[object, ...], int] = {}
    pairs: list[tuple[int, int]] = []
    for index, instruction in enumerate(trace.instructions):
        writes = instruction.writes
        if instruction.op in _PURE and len(writes) == 1 and not instruction.after:
            key = (
                instruction.op,
                instruction.engine,
                instruction.attributes.get("function"),
                _region(writes[0]),
                *((a.storage, versions.get(a.storage, 0), _region(a)) for a in instruction.reads),
            )
            earlier = seen.get(key)
            if earlier is not None and index - earlier <= _DISTANCE:
                pairs.append((index, earlier))
            else:
                seen[key] = index
        for access in writes:
            versions[access.storage] = versions.get(access.storage, 0) + 1
    instructions = trace.instructions
    return {
        index: earlier
        for index, earlier in pairs
        if _fresh(instructions[index].writes[0], versions, trace)
        and _fresh(instructions[earlier].writes[0], versions, trace)
    }


def _some_alike(trace: Trace) -> bool:
    """Return whether two instructions read the same regions, whatever was written in between."""
    seen = set()
    for instruction in trace.instructions:
        if instruction.op in _PURE:
            key = (instruction.op, *[(a.storage, _region(a)) for a in instruction.reads])
            if key in seen:
                return True
            seen.add(key)
    return False


def _region(access: Access) -> tuple[object, ...]:
    return (
        access.partition_start,
        access.partition_stop,
        access.byte_start,
        access.pattern,
        access.dtype,
    )


def _fresh(access: Access, versions: dict[int, int], trace: Trace) -> bool:
    """Return whether a tensor is on chip, placed by the compiler and written only this once."""
    if access.memory == "hbm" or versions[access.storage] != 1:
        return False
    allocation = trace.allocations.get(access.storage)
    return allocation is not None and allocation.address is None
