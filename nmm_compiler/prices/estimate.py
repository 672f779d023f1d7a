"""Closed-form price of a kernel from its spec alone, without a simulation.

    estimate_us(spec, target) = closed form of the work that any good schedule of the spec has

It takes about 0.1 ms, where ranking the schedules of a large kernel takes a second, so that the
passes can ask it for every place of a graph. Every operand crosses HBM once, but weights cross once
for each block of tokens; the length of a block is the one that takes least. A last product of a
long intermediate, like the dense down projection of an MLP, has room for narrow panels of weights
only: its loads are short runs, and its passes wait for their sum. Its error against the simulator
is in `prices.ways.ERRORS`, by tests/prices/test_estimate.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from nmm_compiler.codegen.choose import rank
from nmm_compiler.codegen.cost import dma_us, eviction_us, tensor_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.kernels.base import KernelSpec, item_bytes
from nmm_compiler.kernels.product_spec import ProductSpec
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.kernels.work import Passes, Tally
from nmm_compiler.targets import Target
from nmm_compiler.targets.collective_time import collective_alone_us

# Shares of SBUF that schedules give to the tokens of a block, and to weights that stay.
_SHARE_OF_TOKENS = 0.9
_SHARE_OF_WEIGHTS = 0.3
_DMA_BYTES = 1 << 20  # of one load: 8 KiB in each of 128 partitions
_RUN_BYTES = 8192
_FIRST_BYTES = 1 << 18  # of the loads before the first product, and of the last store
_TILE, _BANK = 128, 512  # rows of a tile, columns of a PSUM bank in fp32
_FEW_TOKENS = 16  # so few move past dense weights, and sums are kept in SBUF
_NORM_BLOCK = 512  # tokens whose norm the first product waits for, at most
_NORM_PASSES = 3


def estimate_us(spec: KernelSpec, target: str | Target) -> float:
    """Return microseconds of a kernel on a target, from its first instruction to its last.

    A kernel that is no product of x has the closed form of its best schedule; raises CapacityError
    or SpecError where there is none.
    """
    return _estimate_us(spec, machine_target(target))


@functools.lru_cache(maxsize=4096)
def _estimate_us(spec: KernelSpec, chip: Target) -> float:
    if not isinstance(spec, ProductSpec):
        return rank(spec, chip)[0].cost_us
    if spec.exchanged_bytes():
        alone = dataclasses.replace(spec, tp=1, tp_axis="")  # type: ignore[call-arg]
        return _estimate_us(alone, chip) + collective_alone_us(
            spec.exchanged_bytes() / spec.lnc, spec.world_size, chip
        )
    if spec.lnc > 1:
        return min(_estimate_us(spec.share(split), chip) for split in spec.splits())
    return min(_in_blocks(spec, chip, tokens) for tokens in _blocks(spec, chip))


def _in_blocks(spec: ProductSpec, chip: Target, at_once: int) -> float:
    """Return the microseconds with so many tokens in SBUF at once."""
    m, x_bytes = spec.m, spec.inputs()[0].bytes
    size = item_bytes(str(getattr(spec, "dtype", "bfloat16")))
    y_bytes = sum(result.bytes for result in spec.outputs())
    by_rows = spec.result_layouts()[0] == "row"
    weights = spec.weights()
    stay = size * sum(map(math.prod, weights.values())) <= _SHARE_OF_WEIGHTS * _sbuf(chip)
    rereads = 1 if stay else tiles(m, at_once)
    last, factors = list(weights)[-1], any(name.endswith("u") for name in weights)
    moving = m <= _TILE and spec.intermediate_dtype != "float32"  # tokens, and results turned back
    tally = Tally()
    _move(tally, x_bytes, x_bytes // (m if spec.layout_of("x") == "row" else spec.k))
    _move(tally, y_bytes * (2 if spec.residual else 1), y_bytes // m)
    hops = 1
    if spec.layout_of("x") == "row":  # TensorE turns it: tokens come first, features are summed
        squares = tiles(m, _TILE) * tiles(spec.k, _TILE)
        tally.matmuls.append((squares, _TILE))
        tally.evictions.append((tiles(squares, 4), _BANK))
        hops += 1
    early, late, first = x_bytes, list[Passes](), 0
    for name, (inputs, outputs) in weights.items():
        kept, ends = spec.multiplies_kept(name), _is_result(spec, name)
        weight_bytes = inputs * outputs * size
        first = first or weight_bytes
        panel = outputs
        if kept and name == last and (factors or m > _FEW_TOKENS):
            panel = min(outputs, _panel(inputs, at_once, size, chip))
        _move(tally, weight_bytes, panel * size, rereads)
        if panel < min(_BANK, outputs) and by_rows:
            passes = tiles(inputs, _TILE) * tiles(m, _TILE) * tiles(outputs, panel), panel
            tally.chained_matmuls.append(passes)
        else:
            passes = _passes(m, inputs, outputs, chip, ends and by_rows and not moving)
            tally.matmuls.append(passes)
            late += [passes] if kept else []
        tally.evictions.append((passes[0] // tiles(inputs, _TILE), passes[1]))
        early += 0 if kept else weight_bytes
        if ends and by_rows and not moving:  # else features are on partitions, as scales are
            _broadcast(tally, outputs, int(getattr(spec, "scales", None) == "channel"))
    if by_rows and not moving:
        for outputs in spec.biases().values():
            _broadcast(tally, outputs, 1)
    hops += len({spec.multiplies_kept(name) for name in weights}) + int("down_v" in weights)
    norm = _norm_us(spec, tally, chip) if spec.norm != "none" else 0.0
    if spec.residual:
        tally.evictions.append((tiles(m, _TILE) * tiles(y_bytes // m, 2 * _BANK), _BANK))
    bandwidth = chip.memory_bytes_per_second / 1e6
    dtype = str(getattr(spec, "dtype", "bfloat16"))

    chained = tensor_us(
        tuple(tally.chained_matmuls), dtype, chip, chip.tensor_latency_seconds
    ) + tensor_us(tuple(tally.wide_matmuls), "float32", chip)
    start = 1e6 * (chip.dma_start_latency_seconds + chip.semaphore_seconds)
    lead = min(_FIRST_BYTES, x_bytes + first) / bandwidth + norm

    def tensor(group: list[Passes], before: float) -> float:
        """Return the time of passes; the clock starts slow, but for passes over zeros before."""
        us = tensor_us(tuple(group), dtype, chip) + chained
        ramp = min(us, 1e6 * chip.tensor_ramp_seconds)
        return us + max(0.0, ramp * (1.0 / chip.tensor_ramp_start_fraction - 1.0) - before)

    tail = tensor_us(((2 * tiles(at_once, _TILE), min(_BANK, tiles(y_bytes, m))),), dtype, chip)
    one_block = at_once == m and bool(late or tally.chained_matmuls)
    busy = max(
        tensor(tally.matmuls, start + lead if m > _FEW_TOKENS else 0.0) + lead,
        dma_us(tuple(tally.dmas), chip) + tail,
        early / bandwidth + norm + tensor(late, 0.0) if one_block else 0.0,
        eviction_us(tuple(tally.evictions), chip) + lead,
    )
    hop = chip.engine_isolated_overhead_cycles / chip.vector_clock_hz + chip.semaphore_seconds
    return start + busy + 1e6 * hops * hop + start + min(_FIRST_BYTES, y_bytes) / bandwidth


def _is_result(spec: ProductSpec, weight: str) -> bool:
    """Return whether the product with a weight gives a result, and no intermediate."""
    if getattr(spec, "down", False):
        return weight.startswith("down") and not weight.endswith("u")
    return not weight.startswith("u") and not weight.endswith("_u")


def _sbuf(chip: Target) -> int:
    return chip.sbuf_usable_bytes_per_partition * chip.partitions


def _blocks(spec: ProductSpec, chip: Target) -> Iterator[int]:
    """Yield the tokens that a block may have: all, or what fits and fewer, for wider panels."""
    weights = spec.weights()
    size = item_bytes(spec.intermediate_dtype)
    kept = sum(inputs for name, (inputs, _) in weights.items() if spec.multiplies_kept(name))
    fit = int(_SHARE_OF_TOKENS * _sbuf(chip)) // (item_bytes(spec.x_format) * spec.k + size * kept)
    block = min(spec.m, fit // _TILE * _TILE or max(1, fit))
    yield block
    while 2 * _TILE < block < spec.m:
        block = tiles(block, 2 * _TILE) * _TILE
        yield block


def _panel(inputs: int, tokens: int, size: int, chip: Target) -> int:
    """Return the columns of a weight that fit in SBUF twice beside `tokens` of what it multiplies.

    Schedules have panels of whole banks, else of one tile.
    """
    deep = tiles(inputs, _TILE) * size
    room = chip.sbuf_usable_bytes_per_partition - deep * tokens
    columns = room // (2 * deep)
    return columns // _BANK * _BANK or _TILE


def _passes(m: int, inputs: int, outputs: int, chip: Target, rows: bool) -> Passes:
    """Return the TensorE passes of a product, with that operand moving that takes less time.

    rows: the result has tokens on partitions, so that they are the stationary operand.
    """
    depth = tiles(inputs, _TILE)
    ways = [(depth * tiles(m, _TILE) * tiles(outputs, _BANK), min(outputs, _BANK))]
    if not rows:
        ways.append((depth * tiles(outputs, _TILE) * tiles(m, _BANK), min(m, _BANK)))
    return min(ways, key=lambda way: tensor_us((way,), "bfloat16", chip))


def _broadcast(tally: Tally, size: int, vectors: int) -> None:
    """Add the products with ones that copy a vector of `size` features to all partitions."""
    if vectors:
        tally.wide_matmuls.append((vectors * tiles(size, _BANK), min(size, _BANK)))
        tally.evictions.append((vectors * tiles(size, _BANK), min(size, _BANK)))


def _norm_us(spec: ProductSpec, tally: Tally, chip: Target) -> float:
    """Add the norm of x to the work; return how long the first product waits for it."""
    if spec.norm_gain and spec.m > _FEW_TOKENS:
        _broadcast(tally, spec.k, 1)
    tally.evictions.append((_NORM_PASSES * tiles(spec.m, _TILE), spec.k))
    elements = min(spec.m, _NORM_BLOCK) * spec.k / chip.partitions
    cycles = _NORM_PASSES * (elements + chip.engine_isolated_overhead_cycles)
    return 1e6 * cycles / chip.vector_clock_hz


def _move(tally: Tally, total: int, run: int, times: int = 1) -> None:
    count = tiles(total, _DMA_BYTES)
    tally.dmas.append((count * times, total // count, min(run, _RUN_BYTES), "copy"))
