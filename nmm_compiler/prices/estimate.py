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
from collections.abc import Iterator

from nmm_compiler.codegen.choose import rank
from nmm_compiler.codegen.cost import dma_us, eviction_us, tensor_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.kernels.base import KernelSpec, item_bytes
from nmm_compiler.kernels.linear.layer import Layer, Weight
from nmm_compiler.kernels.linear.spec import LinearSpec
from nmm_compiler.kernels.tiling import tiles, weight_bytes
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
    if not isinstance(spec, LinearSpec):
        return rank(spec, chip)[0].cost_us
    if spec.exchanged_bytes():
        alone = dataclasses.replace(spec, tp=1, tp_axis="")  # type: ignore[call-arg]
        return _estimate_us(alone, chip) + collective_alone_us(
            spec.exchanged_bytes() / spec.lnc, spec.world_size, chip
        )
    shares = (spec.share(split) for split in spec.splits())
    return min(
        _in_blocks(layer, chip, tokens) for layer in shares for tokens in _blocks(layer, chip)
    )


def _in_blocks(layer: Layer, chip: Target, at_once: int) -> float:
    """Return the microseconds with so many tokens in SBUF at once."""
    m, y_size = layer.m, item_bytes(layer.result_dtype)
    x_bytes = m * layer.k * item_bytes(layer.x_format)
    y_bytes = sum(m * one.n * y_size for one in layer.results)
    by_rows = layer.results[0].rows
    weights = layer.weights()
    sizes = {one.name: weight_bytes(layer.format_of(one)) for one in weights}
    stay = sum(sizes[one.name] * one.k * one.n for one in weights) <= _SHARE_OF_WEIGHTS * _sbuf(
        chip
    )
    rereads = 1 if stay else tiles(m, at_once)
    moving = m <= _TILE and layer.kept_dtype != "float32"  # tokens, and results turned back
    tally = Tally()
    _move(tally, x_bytes, x_bytes // (m if layer.x_layout == "row" else layer.k))
    _move(tally, y_bytes * (2 if layer.residual else 1), y_bytes // m)
    hops = 1
    if layer.x_layout == "row":  # TensorE turns it: tokens come first, features are summed
        squares = tiles(m, _TILE) * tiles(layer.k, _TILE)
        tally.matmuls.append((squares, _TILE))
        tally.evictions.append((tiles(squares, 4), _BANK))
        hops += 1
    early, late, first = x_bytes, list[Passes](), 0
    for weight in weights:
        inputs, outputs, size = weight.k, weight.n, sizes[weight.name]
        kept, ends = not layer.of_x(weight), _is_result(layer, weight)
        stored = int(inputs * outputs * size)
        first = first or stored
        panel = outputs
        if kept and weight is weights[-1] and (layer.pairs or m > _FEW_TOKENS):
            panel = min(outputs, _panel(inputs, at_once, size, chip))
        _move(tally, stored, int(panel * size), rereads)
        inputs = tiles(inputs, 4) if weight.mx else inputs  # of a pass, four a partition
        if panel < min(_BANK, outputs) and by_rows:
            passes = tiles(inputs, _TILE) * tiles(m, _TILE) * tiles(outputs, panel), panel
            tally.chained_matmuls.append(passes)
        else:
            passes = _passes(m, inputs, outputs, chip, ends and by_rows and not moving)
            tally.matmuls.append(passes)
            late += [passes] if kept else []
        tally.evictions.append((passes[0] // tiles(inputs, _TILE), passes[1]))
        early += 0 if kept else stored
        if ends and by_rows and not moving:  # else features are on partitions, as scales are
            _broadcast(tally, outputs, int(layer.scales == "channel"))
    if by_rows and not moving:
        for one in layer.layers:
            _broadcast(tally, one.n, int(bool(one.bias)))
    hops += 1 + bool(layer.factors) + bool(layer.down.n) + len(layer.down_pairs)
    norm = _norm_us(layer, tally, chip) if layer.norm != "none" else 0.0
    if layer.residual:
        tally.evictions.append((tiles(m, _TILE) * tiles(y_bytes // m, 2 * _BANK), _BANK))
    bandwidth = chip.memory_bytes_per_second / 1e6
    dtype = layer.dtype
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
    # what a stage waits for: the last pass of the one before, its way out of PSUM, the signal of it
    hop = chip.engine_isolated_overhead_cycles / chip.vector_clock_hz
    hop += chip.tensor_latency_seconds + chip.semaphore_seconds
    return start + busy + 1e6 * hops * hop + start + min(_FIRST_BYTES, y_bytes) / bandwidth


def _is_result(layer: Layer, weight: Weight) -> bool:
    """Return whether the product with a weight gives a result, and no intermediate."""
    last = layer.layers[-1:] if layer.down.n else layer.linears
    return weight.name in {
        one.name for linear in last for one in (linear.weight, linear.low_rank.v)
    }


def _sbuf(chip: Target) -> int:
    return chip.sbuf_usable_bytes_per_partition * chip.partitions


def _blocks(layer: Layer, chip: Target) -> Iterator[int]:
    """Yield the tokens that a block may have: all, or what fits and fewer, for wider panels."""
    size = item_bytes(layer.kept_dtype)
    kept = sum(weight.k for weight in layer.weights() if not layer.of_x(weight))
    fit = int(_SHARE_OF_TOKENS * _sbuf(chip)) // (
        item_bytes(layer.x_format) * layer.k + size * kept
    )
    block = min(layer.m, fit // _TILE * _TILE or max(1, fit))
    yield block
    while block > 2 * _TILE:
        block = tiles(block, 2 * _TILE) * _TILE
        yield block


def _panel(inputs: int, tokens: int, size: float, chip: Target) -> int:
    """Return the columns of a weight that fit in SBUF beside `tokens` of what it multiplies.

    Schedules have panels of whole banks, else of one tile.
    """
    deep = tiles(inputs, _TILE) * size
    room = chip.sbuf_usable_bytes_per_partition - deep * tokens
    columns = int(room // deep)
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


def _norm_us(layer: Layer, tally: Tally, chip: Target) -> float:
    """Add the norm of x to the work; return how long the first product waits for it."""
    if layer.norm_gain and layer.m > _FEW_TOKENS:
        _broadcast(tally, layer.k, 1)
    tally.evictions.append((_NORM_PASSES * tiles(layer.m, _TILE), layer.k))
    elements = min(layer.m, _NORM_BLOCK) * layer.k / chip.partitions
    cycles = _NORM_PASSES * (elements + chip.engine_isolated_overhead_cycles)
    return 1e6 * cycles / chip.vector_clock_hz


def _move(tally: Tally, total: int, run: int, times: int = 1) -> None:
    count = tiles(total, _DMA_BYTES)
    tally.dmas.append((count * times, total // count, min(run, _RUN_BYTES), "copy"))
