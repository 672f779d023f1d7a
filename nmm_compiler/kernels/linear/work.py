"""The work of the engines for a layer and a schedule: one walk over its weights.

It ranks schedules before the best few are simulated, and counts the instructions of a program.
"""

from __future__ import annotations

from nmm_compiler.kernels.linear.layer import Layer, Linear, Weight
from nmm_compiler.kernels.linear.schedule import LinearSchedule
from nmm_compiler.kernels.tiling import item_bytes, tiles, weight_bytes
from nmm_compiler.kernels.work import Passes, Tally, Work


def work(layer: Layer, schedule: LinearSchedule) -> Work:
    """Return the passes, reads of PSUM and DMAs of a kernel, or of one of two cores."""
    made, tally = schedule.plan(layer), Tally()
    m_blocks, tokens = tiles(layer.m, schedule.m_block), schedule.tokens(layer)
    x_size = item_bytes(layer.x_format)
    first = made.weights()[0]
    step = made.x_chunk or first.chunk
    count = tiles(layer.k, step) * m_blocks
    deep = step // 128 if schedule.order == "consecutive_rows" and tokens == layer.m else 1
    # short runs arrive at elements that are apart, but for one token
    run = x_size * tokens * deep
    if made.x_load == "strided":
        run = x_size * deep if tokens == 1 else x_size
    squares = tiles(layer.k, 128) * tiles(layer.m, 128)
    total = layer.m * layer.k * x_size
    tally.load(made.x_load, total, count, run, (squares, count * tiles(tokens, 128), step * x_size))
    if layer.mx:
        tally.evictions.append((2 * tiles(layer.k, 512) * m_blocks, 4 * tokens))
    if layer.norm != "none":
        tally.evictions.append((4 * tiles(layer.k, 128) * m_blocks, tokens))
    late: list[Passes] = []
    early = total
    for linear in made.layers:
        for weight in linear.products():
            shared = weight.name == linear.low_rank.u.name
            if shared and linear.place > min(
                one.place for one in made.layers if one.low_rank.u.name == weight.name
            ):
                continue
            size = weight_bytes(layer.format_of(weight))
            _move(tally, weight, size, m_blocks)
            rows = linear.by_rows and not shared and (linear is made.down or not made.down.n)
            passes, sums = _passes(weight, layer.m, rows)
            # short passes of one tile of outputs wait for the sum that the pass before adds to
            chained = rows and passes[1] < 512
            (tally.chained_matmuls if chained else tally.matmuls).append(passes)
            tally.evictions.append(sums)
            if made.of_x(weight):
                early += int(weight.k * weight.n * size)
            else:
                late.append(passes)
    for one in made.results:
        _store(tally, one, made, schedule)
        wide = min(512, one.n)
        if one.turned:
            tally.matmuls.append((tiles(one.n, 128), layer.m))
            tally.evictions.append((tiles(one.n, wide), wide))
        elif one.rows:  # ones times the row of scales, and of biases, for all partitions
            scales = int(made.scales == "channel")
            tally.wide_matmuls.append((scales * tiles(one.n, wide), wide))
            tally.matmuls.append((bool(one.bias) * tiles(one.n, wide), wide))
            tally.evictions.append(((scales + bool(one.bias)) * tiles(one.n, wide), wide))
    panel = min(made.results[0].last.block, made.results[0].n)
    once = m_blocks == 1 and bool(late)
    chunk, first_size = min(first.chunk, first.k), weight_bytes(layer.format_of(first))
    return tally.work(
        lead_bytes=int(chunk * (tokens * x_size + min(first.block, first.n) * first_size)),
        tail_matmuls=(tiles(panel, 512) * tiles(min(tokens, 512), 128), min(512, panel)),
        tail_bytes=min(layer.m, 128) * panel * item_bytes(layer.result_dtype),
        early_bytes=early if once else 0,
        late_matmuls=tuple(late) if once else (),
    )


def _move(tally: Tally, weight: Weight, size: float, times: int) -> None:
    """Add the loads of a weight: once for each block of tokens."""
    columns = min(weight.block, weight.n)
    count = tiles(weight.k, weight.chunk) * tiles(weight.n, columns) * times
    deep = weight.chunk // 128 if weight.order == "consecutive_rows" and columns == weight.n else 1
    squares = tiles(weight.k, 128) * tiles(weight.n, 128) * times
    turned = squares, count * tiles(columns, 128), int(min(weight.chunk, weight.k) * size)
    total = int(weight.k * weight.n * size) * times
    run = columns * weight.mx_bytes if weight.mx else int(columns * size * deep)
    tally.load(weight.load, total, 5 * count if weight.mx else count, run, turned)


def _passes(weight: Weight, m: int, rows: bool) -> tuple[Passes, Passes]:
    """Return the TensorE passes of a product, and the sums that leave PSUM."""
    deep = tiles(weight.k, 512 if weight.mx else 256 if weight.double_row else 128)
    if rows:
        wide = min(512, weight.block, weight.n)
        count = tiles(m, 128) * tiles(weight.n, wide)
        return (deep * count, wide), (count, wide)
    count, wide = tiles(weight.n, 128) * tiles(m, 512), min(m, 512)
    return (deep * count, wide), (count, wide)


def _store(tally: Tally, one: Linear, made: Layer, schedule: LinearSchedule) -> None:
    """Add the stores of a result, and the loads of a residual, which lies as it does."""
    size, tokens = item_bytes(made.result_dtype), schedule.tokens(made)
    wide = min(one.last.block, one.n, 512 * one.last.group if one.rows else one.last.block)
    if one.rows:
        stores, run = tiles(made.m, 128) * tiles(one.n, wide), wide * size
    else:
        stores, run = tiles(made.m, tokens) * tiles(one.n, wide), tokens * size
    for _ in range(1 + made.residual):
        tally.store(made.m * one.n * size, stores, run)
