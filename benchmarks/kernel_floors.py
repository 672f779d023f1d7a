"""The time that a kernel cannot take less than: phases that each wait for the one before.

    start     the first DMA begins to move bytes
    operands  every operand crosses HBM, at the rate of the DMA engines or of HBM, or TensorE makes
              all its passes
    between   of two products, x as k x m: the last product with x is made and leaves PSUM
    results   the results of the tokens that come last are made, leave PSUM and cross HBM
    end       what came last wakes the last pass, its sum leaves PSUM, and a store starts
    engines   of the first load and of the last store, the DMA engines begin one after another
    seen      the semaphore of the last store

Every number is one of the target's. The first five are what no kernel can beat (`least_us`; a
kernel that is simulated faster ends the benchmark): the longest of three chains.

    data      all operands, then the last pass and the last store; or all bytes both ways
    tensor    all passes of TensorE, the first of them at half clock, as far as it was not warmed up
              while the first operands came, then the last store; between two products with a rank
              of one tile TensorE waits, as far as it has no other passes
    x         x as k x m arrives in rows of all its tokens, so that no token is summed before the
              last row is in, and no result leaves while x comes

Of the chain of x the weights of the second product are no part: they may arrive meanwhile. Tokens
that come in blocks have shorter rows, of which each costs a DMA engine a descriptor: the floor is
that of the block that makes it least. A pass takes the cycles that are documented for its columns,
at least 64, or 128 in fp32, whatever the rank: a product of rank 16 takes as long as one of rank
128.

Rows are judged against `floor_us`, with terms that hold for kernels as they are written, and not
for every one that could be: `engines` for loads and stores that fill all partitions, `seen`, the
time of p to leave PSUM `between` two products, which loads after the last of x could hide, and the
transfer of the first tiles of x and of a weight before TensorE's first pass.
"""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.codegen.cost import tensor_us
from nmm_compiler.kernels.base import item_bytes
from nmm_compiler.kernels.linear.spec import LinearSpec as ProductSpec
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.targets import Target, get

_US = 1e6

Phases = dict[str, float]


def phases_us(spec: ProductSpec, target: str) -> Phases:
    """Return the microseconds of each phase; their sum is what a row is judged against."""
    chip = get(target)
    first = min(128, spec.k) * (spec.m + 128) * item_bytes(str(spec.dtype)) / _rate(chip)
    phases = _least(spec, chip, first)
    kept = _leave_us(chip) if _two_products(spec) else 0.0
    return phases | {
        "between": max(phases["between"], kept),
        "engines": 2 * chip.dma_stagger_seconds * _US,
        "seen": chip.semaphore_seconds * _US,
    }


def floor_us(spec: ProductSpec, target: str) -> float:
    """Return the sum of the phases."""
    return _total(phases_us(spec, target))


def least_us(spec: ProductSpec, target: str) -> float:
    """Return the time that no kernel can beat."""
    return _total(_least(spec, get(target), 0.0))


def arithmetic(spec: Any, target: str) -> str:
    """Return the phases as a sum, for tables."""
    return " + ".join(f"{us:.1f}" for us in phases_us(spec, target).values())


def _least(spec: ProductSpec, chip: Target, first: float) -> Phases:
    """Return the phases of the longest chain; first: what TensorE waits for its first operands."""
    plain = _longest(_data(spec, chip, 0.0), _tensor(spec, chip, first))
    two = _two_products(spec)
    cut = spec.family.startswith("lowrank") and spec.x_layout == "col"
    if not (two and cut) or getattr(spec, "base", False):
        return plain
    blocks = (
        _longest(plain, _data(spec, chip, _cut_rows_us(spec, last, chip)), _x(spec, last, chip))
        for last in range(spec.m, 0, -1)
    )
    return min(blocks, key=_total)


def _two_products(spec: ProductSpec) -> bool:
    return spec.family == "lowrank_shared" or any(map(spec.multiplies_kept, spec.weights()))


def _total(phases: Phases) -> float:
    return sum(phases.values())


def _longest(*chains: Phases) -> Phases:
    return max(chains, key=_total)


def _data(spec: ProductSpec, chip: Target, more: float) -> Phases:
    """Return the chain of all bytes; more: what descriptors add to the time of x."""
    read = sum(tensor.bytes for tensor in spec.inputs()) / _rate(chip)
    written = sum(tensor.bytes for tensor in spec.outputs()) / _rate(chip)
    start, pass_us = _start_us(chip), _pass_us(str(spec.dtype), chip)
    end = chip.semaphore_seconds * _US + pass_us + _leave_us(chip) + start
    # results cross HBM beside the operands; only the end of the kernel has nothing to load
    return _phases(start, read + more, 0.0, max(0.0, written - end), end)


def _tensor(spec: ProductSpec, chip: Target, first: float) -> Phases:
    """Return the chain of all passes of TensorE."""
    dtype = str(spec.dtype)
    rows = _rows(dtype, chip)
    tensor = sum(_product_us(spec.m, k, n, rows, dtype, chip) for k, n in spec.weights().values())
    start, wake = _start_us(chip), chip.semaphore_seconds * _US
    # passes over zeros may warm TensorE up before the first operands are there
    cold = max(0.0, chip.tensor_ramp_seconds * _US - start - first - wake)
    ramp = cold * (1 - chip.tensor_ramp_start_fraction)
    made = first + wake + tensor + min(ramp, tensor)
    return _phases(start, made, _wait_us(spec, chip), 0.0, _leave_us(chip) + start)


def _wait_us(spec: ProductSpec, chip: Target) -> float:
    """Return what TensorE loses between the products of `lowrank` with a rank of one tile.

    The second product takes p, the whole sum of the first. Passes of the first product that are cut
    in two groups of tokens fill the time in which p of the first group leaves PSUM, and cost more
    than one pass: at least 64 columns each. The best cut of the best number of passes counts.
    """
    if spec.family != "lowrank" or spec.base or spec.r > 128:
        return 0.0
    dtype = str(spec.dtype)

    def pass_us(columns: int) -> float:
        return tensor_us(((1, max(columns, _least_columns(dtype, chip))),), dtype, chip)

    leave, best = _leave_us(chip), _leave_us(chip)
    for cut in range(1, min(spec.m, 512)):
        fills = pass_us(cut)
        more = max(0.0, fills + pass_us(min(spec.m, 512) - cut) - pass_us(min(spec.m, 512)))
        for count in range(1, tiles(spec.k, 128) + 1):
            best = min(best, max(0.0, leave - count * fills) + count * more)
    return best


def _x(spec: ProductSpec, last: int, chip: Target) -> Phases:
    """Return the chain of x and its products, if so many tokens of x come last."""
    m, dtype = spec.m, str(spec.dtype)
    second = {name: size for name, size in spec.weights().items() if spec.multiplies_kept(name)}
    late = sum(tensor.bytes for tensor in spec.inputs() if tensor.name in second)
    early = (sum(tensor.bytes for tensor in spec.inputs()) - late) / _rate(chip)
    pass_us = _pass_us(dtype, chip)
    between = chip.semaphore_seconds * _US + pass_us + _leave_us(chip)
    rows = _rows(dtype, chip)
    made = sum(_product_us(last, k, n, rows, dtype, chip) for k, n in second.values()) - pass_us
    outputs = sum(math.prod(tensor.shape) for tensor in spec.outputs()) / m
    # GpSimd reads no PSUM; sums of 16 bits leave it two a cycle
    fast = 2 if chip.matmul_bfloat16_sums else 1
    clocks = fast * (chip.vector_clock_hz + chip.scalar_clock_hz) / _US
    leave = (outputs * last / chip.partitions - 1) / clocks
    cross = sum(tensor.bytes for tensor in spec.outputs()) / _rate(chip) * last / m
    start = _start_us(chip)
    end = pass_us + _leave_us(chip) + start
    operands = early + _cut_rows_us(spec, last, chip)
    return _phases(start, operands, between, max(made, leave, cross, 0.0), end)


def _phases(start: float, operands: float, between: float, results: float, end: float) -> Phases:
    return {
        "start": start, "operands": operands, "between": between, "results": results, "end": end,
    }  # fmt: skip


def _rate(chip: Target) -> float:
    """Return bytes per microsecond between HBM and SBUF: the engines may be slower than HBM."""
    engines = chip.dma_engines * chip.dma_bytes_per_second_per_engine
    return min(chip.memory_bytes_per_second, engines) / _US


def _start_us(chip: Target) -> float:
    return chip.dma_start_latency_seconds * _US


def _pass_us(dtype: str, chip: Target) -> float:
    """Return TensorE time of the shortest pass."""
    return tensor_us(((1, _least_columns(dtype, chip)),), dtype, chip)


def _least_columns(dtype: str, chip: Target) -> int:
    return int(chip.tensor_fp32_min_columns) if dtype == "float32" else 0


def _leave_us(chip: Target) -> float:
    """Return the time from the last pass to its sum in SBUF, seen by who waits for it: the latency
    of the pass, and the shortest copy."""
    copy = (1 + chip.engine_isolated_overhead_cycles) / chip.vector_clock_hz
    return (chip.tensor_latency_seconds + 2 * chip.engine_semaphore_seconds + copy) * _US


def _rows(dtype: str, chip: Target) -> int:
    """Return how many tiles of the contraction a pass takes at most."""
    return 2 if chip.fp8_double_row and dtype.startswith("float8") else 1


def _cut_rows_us(spec: ProductSpec, last: int, chip: Target) -> float:
    """Return what descriptors add to the time of x if its rows are cut before the last tokens."""
    if last == spec.m:
        return 0.0
    size = item_bytes(str(spec.x_format))
    rate = _rate(chip) * _US / chip.dma_engines
    each = sum(
        max(chip.dma_descriptor_min_seconds, chip.dma_descriptor_seconds + size * tokens / rate)
        for tokens in (last, spec.m - last)
    )
    return spec.k * (each - size * spec.m / rate) / chip.dma_engines * _US


def _product_us(m: int, k: int, n: int, rows: int, dtype: str, chip: Target) -> float:
    """Return TensorE time of a product; so many whole tiles of tokens as is best are still."""
    depth = tiles(tiles(k, 128), rows)

    def moves(columns: int, count: int) -> float:
        """Return the time in which so many columns move past `count` tiles."""
        if not columns:
            return 0.0
        parts = tiles(columns, 512)
        each = max(columns / parts, _least_columns(dtype, chip))
        return tensor_us(((count * depth * parts, math.floor(each)),), dtype, chip)

    return min(
        moves(n, still) + moves(max(0, m - 128 * still), tiles(n, 128))
        for still in range(tiles(m, 128) + 1)
    )
