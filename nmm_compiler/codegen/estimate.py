"""Closed-form price of a kernel from its spec alone, without a simulation.

    estimate_us(spec, target) = closed form of the work that any good schedule of the spec has

It takes about 0.1 ms, where ranking the schedules of a large kernel takes a second, so that the
passes can ask it for every place of a graph. Every operand crosses HBM once, but weights cross once
for each block of tokens, and a block is as long as what a kernel keeps of its tokens in SBUF
allows. A product of a long intermediate, like the dense down projection of an MLP, has room for
narrow panels of weights only: its loads are short runs, and its passes wait for their sum. Against
the simulator it is 0.65 to 1.15 of its figures: small kernels are underestimated, by about the same
share whether they are low-rank or dense.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from nmm_compiler.codegen.choose import rank
from nmm_compiler.codegen.cost import closed_form_us, tensor_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.kernels.base import KernelSpec, item_bytes
from nmm_compiler.kernels.product_spec import ProductSpec
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.kernels.work import Passes, Tally
from nmm_compiler.targets import Target
from nmm_compiler.targets.collective_time import collective_alone_us

# Shares of SBUF that schedules give to the tokens of a block, and to weights that stay.
_SHARE_OF_TOKENS = 0.75
_SHARE_OF_WEIGHTS = 0.3
_DMA_BYTES = 1 << 20  # of one load: 8 KiB in each of 128 partitions
_RUN_BYTES = 8192
_TILE, _BANK = 128, 512  # rows of a tile, columns of a PSUM bank in fp32


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
    m, size = spec.m, item_bytes(spec.dtype)
    x_bytes, y_bytes = m * spec.k * size, sum(result.bytes for result in spec.outputs())
    at_once, rereads = _blocks(spec, size, chip)
    by_rows = spec.result_layouts()[0] == "row"
    tally = Tally()
    _move(tally, x_bytes, (spec.k if spec.layout_of("x") == "row" else m) * size)
    _move(tally, y_bytes, y_bytes // m)
    if spec.layout_of("x") == "row":  # TensorE turns it: tokens come first, features are summed
        squares = tiles(m, _TILE) * tiles(spec.k, _TILE)
        tally.matmuls.append((squares, _TILE))
        tally.evictions.append((tiles(squares, 4), _BANK))
    early, late = x_bytes, list[Passes]()
    first = 0
    for name, (inputs, outputs) in spec.weights().items():
        weight_bytes = inputs * outputs * size
        first = first or weight_bytes
        panel = outputs
        if spec.multiplies_kept(name):
            panel = min(outputs, _panel(inputs, at_once, size, chip))
        _move(tally, weight_bytes, panel * size, rereads)
        if panel < min(_BANK, outputs) and by_rows:
            passes = tiles(inputs, _TILE) * tiles(m, _TILE) * tiles(outputs, panel), panel
            tally.chained_matmuls.append(passes)
        else:
            passes = _passes(m, inputs, outputs, chip)
            tally.matmuls.append(passes)
            late += [passes] if spec.multiplies_kept(name) else []
        tally.evictions.append((passes[0] // tiles(inputs, _TILE), passes[1]))
        early += 0 if spec.multiplies_kept(name) else weight_bytes
    one_block = at_once == m and bool(late or tally.chained_matmuls)
    work = tally.work(
        lead_bytes=min(_DMA_BYTES, x_bytes + first),
        tail_matmuls=(2 * tiles(at_once, _TILE), min(_BANK, tiles(y_bytes, m))),
        tail_bytes=min(_DMA_BYTES, y_bytes),
        early_bytes=early if one_block else 0,
        late_matmuls=tuple(late) if one_block else (),
    )
    return closed_form_us(work, spec.dtype, chip)


def _blocks(spec: ProductSpec, size: int, chip: Target) -> tuple[int, int]:
    """Return the tokens of a block, and how often weights are read."""
    weights = spec.weights()
    kept = sum(inputs for name, (inputs, _) in weights.items() if spec.multiplies_kept(name))
    sbuf = chip.sbuf_usable_bytes_per_partition * chip.partitions
    fit = int(_SHARE_OF_TOKENS * sbuf) // (size * (spec.k + kept))
    fit = fit // _TILE * _TILE or max(1, fit)
    if fit >= spec.m:
        return spec.m, 1
    stay = size * sum(map(math.prod, weights.values())) <= _SHARE_OF_WEIGHTS * sbuf
    return fit, 1 if stay else tiles(spec.m, fit)


def _panel(inputs: int, tokens: int, size: int, chip: Target) -> int:
    """Return the columns of a weight that fit in SBUF twice beside `tokens` of what it multiplies.

    Schedules have panels of whole banks, else of one tile.
    """
    deep = tiles(inputs, _TILE) * size
    room = chip.sbuf_usable_bytes_per_partition - deep * tokens
    columns = room // (2 * deep)
    return columns // _BANK * _BANK or _TILE


def _passes(m: int, inputs: int, outputs: int, chip: Target) -> Passes:
    """Return the TensorE passes of a product, with that operand moving that takes less time."""
    depth = tiles(inputs, _TILE)
    ways = (
        (depth * tiles(outputs, _TILE) * tiles(m, _BANK), min(m, _BANK)),
        (depth * tiles(m, _TILE) * tiles(outputs, _BANK), min(outputs, _BANK)),
    )
    return min(ways, key=lambda way: tensor_us((way,), "bfloat16", chip))


def _move(tally: Tally, total: int, run: int, times: int = 1) -> None:
    count = tiles(total, _DMA_BYTES)
    tally.dmas.append((count * times, total // count, min(run, _RUN_BYTES), "copy"))
