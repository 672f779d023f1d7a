"""The hash of every constant and price that a prediction depends on.

The predictions in benchmarks/data/timing_record.json and the errors in
`simulator/timing/held_out.json` are stale if it has changed since they were written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator

from nmm_compiler import targets
from nmm_compiler.simulator.timing import resources
from nmm_compiler.simulator.timing.costs import RULES, dma_cost, other_cost, tensor_cost
from nmm_compiler.simulator.trace import Access, Instruction

_CONSTANTS = (
    (resources, "_GAPS_KEPT"), (resources, "_SMALLEST_GAP_US"), (resources, "_WORTH_A_SWAP"),
)  # fmt: skip

# Fields of a target that no prediction of one kernel on one core depends on: rules for
# instructions, and limits for tiles, models and groups of cores. The hash covers every field that
# is not named here.
NOT_OF_TIMING = frozenset({
    "absent_forms", "absent_instructions", "collective_points",
    "dma_transposes", "hbm_bytes", "matmul_adds_to_written_psum", "matmul_bfloat16_sums",
    "matmul_psum_banks", "matmul_tile_min_elements",
    "moving_free_max_elements", "physical_cores_per_logical_core", "scalar_all_operators",
    "device_loops", "float8_kernels", "nki_beta_1",
})  # fmt: skip

# Instructions that no published kernel with a time has: their prices move no recorded error.
NOT_PUBLISHED = frozenset({"core_barrier"})


def constants_hash() -> str:
    """Return the digest of every constant that a prediction depends on, and of what the rules of
    `costs.py` makes of them."""
    values: dict[str, object] = {}
    for name in targets.names():
        target = targets.get(name)
        fields = sorted(set(target.sources) - NOT_OF_TIMING)
        values |= {f"{name}.{field}": getattr(target, field) for field in fields}
        values[f"{name} prices"] = [
            *(tensor_cost(target, product) for product in _products()),
            *(other_cost(target, work) for work in _work()),
            *(dataclasses.astuple(dma_cost(target, transfer)) for transfer in _transfers()),
        ]
    values |= {name: getattr(module, name) for module, name in _CONSTANTS}
    text = json.dumps(values, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_SIZES = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1}
_ATTRIBUTES: tuple[dict[str, object], ...] = (
    {},
    {"function": "exp"},
    {"function": "add", "reduces": True, "nonzero": True, "k": 16, "indices": 64, "elements": 4},
)


def _probe(op: str, engine: str, out: Access, *reads: Access, **attributes: object) -> Instruction:
    return Instruction(op, engine, reads, (out,), attributes, "", 0)


def _access(memory: str, dtype: str, columns: int = 512, step: int = 1, rows: int = 128) -> Access:
    """Return a region on chip; in HBM its rows lie apart."""
    item = _SIZES[dtype]
    pattern: tuple[tuple[int, int], ...] = ((step * item, columns),)
    if memory == "hbm":
        pattern, rows = ((2 * step * columns * item, rows), *pattern), 1
    stop = sum(pitch * (count - 1) for pitch, count in pattern) + item
    return Access(1, memory, 0, rows, 0, stop, pattern, dtype, item)


def _products() -> Iterator[Instruction]:
    """Yield products and transposes of every dtype, long and short, dense and with holes."""
    sides = itertools.product(_SIZES, (32, 128), (16, 512), (1, 4), (False, True), (False, True))
    for dtype, k, n, step, turns, onezero in sides:
        yield _probe(
            "nc_matmul", "tensor", _access("psum", "float32", n),
            _access("sbuf", dtype, 128, rows=k), _access("sbuf", dtype, n, step, k),
            k=k, m=128, n=n, is_transpose=turns, onezero=onezero,
        )  # fmt: skip


def _work() -> Iterator[Instruction]:
    """Yield each instruction of `RULES` and one without a rule, on each engine and memory."""
    places = [(1, memories) for memories in itertools.product(("sbuf", "psum"), repeat=3)]
    tensors = [
        (_access(out, to), _access(first, of, step=step), _access(second, of))
        for to, of in (*zip(_SIZES, _SIZES, strict=True), ("float32", "bfloat16"))
        for step, (out, first, second) in (*places, (8, ("sbuf", "sbuf", "sbuf")))
    ]
    engines = ("vector", "scalar", "gpsimd")
    ops = [op for op in RULES if op not in NOT_PUBLISHED]
    for op, engine, attributes in itertools.product((*ops, ""), engines, _ATTRIBUTES):
        for out, first, second in tensors:
            reads = (first, second)[: 0 if op == "memset" else 2 if "tensor_tensor" in op else 1]
            yield _probe(op, engine, out, *reads, **attributes)


def _transfers() -> Iterator[Instruction]:
    """Yield transfers of short and long rows, by each generator, turned and as they lie."""
    places = itertools.permutations(("hbm", "hbm", "sbuf", "sbuf"), 2)
    modes = (("unknown", ""), ("none", ""), ("swdge", ""), ("hwdge", "sync"), ("hwdge", "scalar"))
    sides = itertools.product(sorted(set(places)), modes, _SIZES, (24, 512, 65536), (False, True))
    for (to, of), (mode, issuer), dtype, columns, turns in sides:
        yield _probe(
            "dma_copy", "dma", _access(to, dtype, columns), _access(of, dtype, columns),
            dge_mode=mode, issuer=issuer, transpose=turns,
        )  # fmt: skip
