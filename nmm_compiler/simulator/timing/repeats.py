"""Finds instructions that the NKI compiler drops, since an earlier one has the same result.

The published profile of the fused_mamba tutorial (v3) shows 39,695 VectorE instructions for 8,192
iterations of a loop that is written with five each: the product of two loop-invariant tiles is
computed once. The pass does the same for instructions that their function and operands determine
completely, if nothing wrote the operands in between, and for rows that are spread over the
partitions again: NKIBench's matmul_add_rmsnorm spreads its scales in each of 32 iterations, and by
the counters of kda-for-trainium (v1) TensorE works for its other products only. Identical loads are
left as written: public profiles show that some of them are dropped, without a visible rule.
"""

from __future__ import annotations

from nmm_compiler.simulator.trace import Access, Instruction, Trace

_PURE = frozenset({"tensor_tensor", "reciprocal"})
_DISTANCE = 1000  # assumed: instructions over which the compiler keeps a result for reuse


def repeated_work(trace: Trace) -> dict[int, int]:
    """Return {index of a redundant instruction: index of the earlier one with the same result}."""
    return _repeated_results(trace) | _repeated_rows(trace)


def _repeated_results(trace: Trace) -> dict[int, int]:
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


def _repeated_rows(trace: Trace) -> dict[int, int]:
    """Return the pairs of products, and of copies, that fill a tile as an earlier one is filled."""
    spreads = [i for i, ins in enumerate(trace.instructions) if _spreads_row(trace, i, ins)]
    if len(spreads) < 2:
        return {}
    keys: dict[int, list[tuple[object, ...]]] = {}  # of each tile: what is spread, and whereto
    first: dict[int, list[int]] = {}  # of each tile: the products that fill it
    versions: dict[int, int] = {}
    spread = set(spreads)
    for index, instruction in enumerate(trace.instructions):
        if index in spread:
            row, copy = instruction.reads[-1], trace.instructions[index + 1]
            result, version = copy.writes[0], versions.get(row.storage, 0)
            key = (copy.engine, row.storage, version, _region(row), _region(result))
            keys.setdefault(result.storage, []).append(key)
            first.setdefault(result.storage, []).append(index)
        for access in instruction.writes:
            versions[access.storage] = versions.get(access.storage, 0) + 1
    pairs: dict[int, int] = {}
    seen: dict[tuple[object, ...], list[int]] = {}
    for storage, parts in keys.items():
        products = first[storage]
        if versions[storage] != len(parts) or trace.allocations[storage].address is not None:
            continue  # something else writes it as well
        if any(versions[trace.instructions[i].writes[0].storage] != 1 for i in products):
            continue
        earlier = seen.get(tuple(parts))
        if earlier is not None and products[0] - earlier[0] <= _DISTANCE:
            for later, known in zip(products, earlier, strict=True):
                pairs |= {later: known, later + 1: known + 1}
        else:
            seen[tuple(parts)] = products
    return pairs


def _spreads_row(trace: Trace, index: int, instruction: Instruction) -> bool:
    """Return whether TensorE spreads a row over the partitions here: ones times one row, a copy."""
    if instruction.op != "nc_matmul":
        return False
    attributes = instruction.attributes
    if attributes.get("k") != 1 or not attributes.get("onezero"):
        return False
    behind = trace.instructions[index + 1 : index + 2]
    return bool(behind) and _copies(behind[0], instruction.writes[0].storage)


def _copies(instruction: Instruction, storage: int) -> bool:
    function = instruction.attributes.get("function")
    plain = instruction.op == "tensor_copy" or (
        instruction.op == "activation" and function in ("copy", "identity")
    )
    return plain and len(instruction.reads) == 1 and instruction.reads[0].storage == storage


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
