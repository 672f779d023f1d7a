"""How a kernel of linear layers runs: a few axes, what is legal, which schedules to try."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import CapacityError
from nmm_compiler.kernels.base import FOURS_OF_H, TILES, Family, Schedule, check_name
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.layer import Layer, Linear, Weight
from nmm_compiler.kernels.linear.specs import SPECS
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.kernels.tiling import (
    FOURS,
    LOADED,
    ORDERS,
    RUNS,
    STRIDED,
    chunk_rows,
    item_bytes,
    tiles,
    turned_loads,
    weight_bytes,
)
from nmm_compiler.kernels.work import Passes, Work
from nmm_compiler.targets import Target

FEW = 128
"""Tokens that move in one pass with others: such kernels wait for their weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSchedule(Schedule):
    """How a kernel of linear layers runs. All sizes are in elements unless named.

    x_load, w_load: how the contraction index of x, and of weights that are stored [n, k], gets onto
        the partitions: "rows" as it lies, "dma" by DMA transposes, "tensor" on TensorE, fp8 widened
        to 16 bits there. One token lies alike by rows and by columns.
    m_block: tokens in SBUF at a time. u_block, block: outputs of a panel of a first factor, and of
        every other weight.
    load_bytes: a load of a weight brings about so many to each partition.
    banks: of PSUM, for sums. down: tiles of tokens that are summed together.
    ahead: a panel of weights behind the first ones is loaded before the results of the panel
        before it are stored.
    double_row: fp8 only, TensorE takes pairs of tiles of a contraction in one pass.
    turned: results by rows, of a tile of tokens at most, are summed with their outputs on the
        partitions, and TensorE turns them.
    m_loop: the blocks of tokens are a loop on the device, and the program holds one of them.
    own_queue: stores are issued by the sync engine, so that no load waits behind them; x of few
        tokens comes by a queue without weights, and weights of short rows, or whose x a DMA turns,
        by the scalar engine's; rows of few tokens lie in parts on the partitions.
    split: how two cores share the kernel: "tokens" or "weights"; "" for one core.
    """

    x_load: str
    w_load: str = "rows"
    m_block: int
    block: int
    u_block: int = 128
    load_bytes: int = 8192
    banks: int = 8
    down: int = 1
    ahead: bool = False
    double_row: bool = False
    turned: bool = False
    m_loop: bool = False
    own_queue: bool = False
    split: str = ""

    @property
    def kind(self) -> tuple[str, int, bool, int]:
        """How two cores share the kernel, blocks of tokens, whether results are turned, and first
        factors' panels for many."""
        return (self.split, self.m_block, self.turned, self.u_block if self.m_block > FEW else 0)

    def tokens(self, layer: Layer) -> int:
        """Return the tokens of a block."""
        return min(self.m_block, layer.m)

    # its checks, its work and its kernel all ask for it
    @functools.lru_cache(maxsize=64)  # noqa: B019  (it keeps 64 schedules, small records)
    def plan(self, layer: Layer) -> Layer:
        """Return the layer with the way in which x and each weight arrives."""
        x_load = self.x_load
        if layer.fp8_x and x_load == "tensor":
            x_load = "tensor16"
        first = layer.norm != "none" or layer.m <= FEW or layer.mx
        whole = 128 * tiles(layer.k, 128)
        step = whole if layer.m <= FEW else chunk_rows(layer.k, self.tokens(layer) * 2)
        step = 512 * tiles(step, 512) if layer.mx else step
        over_x = [weight for weight in layer.weights() if layer.of_x(weight)]
        loads = {self.x_load} | {_load(weight, self.w_load) for weight in over_x}
        runs = layer.k >= 256 and loads == {"rows"}
        order = FOURS if layer.mx else ORDERS[0] if runs else STRIDED
        # NKI Beta 1, which has no queues, has no view for parts either
        most = FEW // layer.m if self.own_queue and "tensor" in x_load and layer.m <= FEW else 1
        count, rest = divmod(layer.k, 512 if layer.mx else 128)
        parts = max(p for p in range(1, most + 1) if p == 1 or not (rest or count % p))
        made = dataclasses.replace(
            layer, x_load=x_load, x_chunk=step * first, order=order, x_parts=parts
        )
        return made.each(lambda linear: self._planned(linear, made))

    def _planned(self, linear: Linear, layer: Layer) -> Linear:
        u, v, weight = (
            self._arriving(one, linear, layer) if one.k else one
            for one in (linear.low_rank.u, linear.low_rank.v, linear.weight)
        )
        made = dataclasses.replace(
            linear, weight=weight, low_rank=dataclasses.replace(linear.low_rank, u=u, v=v)
        )
        turned = self.turned and linear.rows
        # each part of v takes products of its own then, which more outputs wait for
        few = linear.n <= min(made.last.block, 1024 if made.last.parts > 1 else linear.n)
        bare = not (layer.combine or layer.residual or layer.scales or linear.bias)
        runs = turned and bare and few and layer.m == 1 and linear.n % 128 == 0
        return dataclasses.replace(made, turned=turned and not runs, runs=runs)

    def _arriving(self, weight: Weight, linear: Linear, layer: Layer) -> Weight:
        of_x, behind = layer.of_x(weight), layer.down.n > 0 and linear.place == len(layer.linears)
        first = weight.name == linear.low_rank.u.name
        gathered = linear.low_rank.groups.slots > 0 and weight is not linear.weight
        columns = min(self.u_block if first else self.block, weight.n)
        load = "gathered" if gathered else _load(weight, self.w_load)
        size = weight_bytes(layer.format_of(weight))
        rows = linear.rows and not first and not self.turned
        tokens = self.tokens(layer)
        down = min(self.down, tiles(tokens, 128))
        across = down if rows else tiles(tokens, 512)
        chunk = chunk_rows(weight.k, int(columns * size), self.load_bytes)
        fours = layer.mx and weight.name != linear.low_rank.v.name
        apart = 4 if layer.mx and layer.down.n > 0 and not (first or behind) else 1
        # plain factors beside a weight of few bits
        corrects = (
            (layer.mx or (layer.fp8 and linear.weight.k > 0))
            and not linear.low_rank.shaped
            and (not linear.low_rank.scales or linear.low_rank.u.format == FP8)
            and not layer.exchanges_down
        )
        few = (
            corrects
            and layer.m <= FEW
            and weight is not linear.weight
            and (layer.mx or linear.low_rank.u.k > 384)
        )
        chunk = weight.k if few and weight.layout in RUNS else chunk
        narrow = few and not (first or rows)
        order = FOURS if fours else layer.order if of_x else STRIDED
        # A sum takes its next product 203 ns behind the one before: of few tokens more sums fit
        # in between, and share a bank.
        most = 6 if first or not (layer.mx or layer.combine) else 2
        share = 1 if rows else min(most, max(1, 512 // tokens))
        last = weight is linear.scaled and linear.place + 1 == len(layer.layers)
        return dataclasses.replace(
            weight,
            order=order,
            load="tensor16" if layer.format_of(weight) == FP8 and load == "tensor" else load,
            # of many short rows, descriptors of the hardware take less than half of the time; and
            # weights do not wait for transposes of x
            queue="scalar"
            if load == "rows"
            and order == STRIDED
            and (of_x or (columns * size < 512 and weight.k > 512))
            and self.own_queue
            else "",
            block=128 * tiles(columns, 128),
            chunk=whole_blocks(weight, chunk) if fours else chunk,
            group=max(1, self.banks // across * share),
            down=down,
            ahead=(self.ahead or gathered) and not first,
            double_row=self.double_row and of_x,
            apart=apart,
            few_sums=few and first and not self.double_row,
            parts=parts_of(weight, columns, 128 * apart) if narrow else 1,
            pieces=4
            if last
            and layer.m <= FEW
            and columns * (weight.mx_bytes or size) >= 4096
            and weight.n % 4 == 0
            else 1,
        )

    def buffers(self, made: Layer) -> dict[str, tuple[int, int, int]]:
        """Return the first and the last stage of each buffer, and its bytes per partition."""
        tokens, kept = self.tokens(made), item_bytes(made.kept_dtype)
        down, pair, dense = made.down, made.down.low_rank, any(one.weight.k for one in made.linears)
        of_x, last = int(dense or not made.factors), 3 if down.n else 1
        of_h = 2 if pair.r and (made.mx or not down.weight.k) else 3
        rows = made.linears[-1].by_rows and not down.n
        # loaded ahead, panels of all linears are there at a time
        panels = [self._panels(one, made, rows=rows) for one in made.linears]
        firsts = [self._panel(one.u, made, rows=False) for one in made.factors]
        wide, deep = made.linears[0].last.block, max(1, 1024 // tokens)
        x_size, p_size = item_bytes(made.x_format), made.p_tiles * tokens
        held = {
            "x": (0, of_x, made.x_tiles * _pitch(tokens, made.x_aligned) * x_size),
            "p": (0, 1, p_size * kept),
            "sums": (0, 0, 8 * p_size * made.exchanges_p + 2 * p_size * kept * (made.tp > 1)),
            "vectors": (0, 3, self._vectors(made, item_bytes(made.result_dtype))),
            "turned": (0, 3, self._flat(made)),
            "u": (0, 0, max(firsts, default=0)),
            "h": (1, of_h, made.h_tiles * (1 + made.exchanges_h) * tokens * kept),
            "v": (1, 1, sum(panels) if self.ahead else max(panels)),
            "down": (2, 2, self._panel(pair.u, made, rows=False)),
            "p down": (2, 3, pair.tiles * tokens * (kept + 8 * made.exchanges_down)),
            "out": (3, 3, self._panels(down, made, rows=down.by_rows)),
        }
        if made.mx:  # data and scales of four features, and fours on their way to them
            fours = made.x_tiles // 4 * 5 * (tokens + 1) + 4 * 8 * max(512, tokens)
            held["x blocks"] = (0, of_x, fours)
            held["h blocks"] = (1, of_h, tiles(down.weight.k, 512) * 5 * (tokens + 1))
        if made.norm != "none":
            size = 4 * (4 * tokens + (2 * deep + 2) * tokens + 257)
            size += 10 * tiles(made.k, 128) * (made.norm_gain + made.norm_bias)
            held["norm"] = (0, of_x, size)
        if made.combine:
            active = tiles(tokens, 128) * wide if rows else tiles(wide, 128) * tokens
            held["active"] = (1, 1, 4 * active)
        results = self._results(made.results[0], made, item_bytes(made.result_dtype))
        held |= {name: (last, last, size) for name, size in results.items()}
        return {name: row for name, row in held.items() if row[2]}

    def _panel(self, weight: Weight, made: Layer, *, rows: bool) -> int:
        """Return bytes of a panel of a weight, and of the loads of the next one."""
        if not weight.k:
            return 0
        aligned = weight.double_row or weight.load == "dma"
        deep, few = tiles(weight.k, 128), tiles(weight.chunk, 128)
        once = weight.block <= (512 if rows else 128) * weight.group
        if weight.ahead:
            deep *= 2 if weight.block < weight.n else 1
        elif once and (not rows or tiles(self.tokens(made), 128) <= weight.down):
            deep = min(deep, 3 * few)  # one pass over the chunks takes all
        few = min(tiles(weight.k, 128), few)
        ahead = few if weight.block < weight.n and not weight.ahead else 0
        deep = 4 * tiles(deep + ahead, 4) if weight.order == FOURS else deep + ahead
        each = weight_bytes(made.format_of(weight), on_chip=True)
        return math.ceil(deep * _pitch(weight.block, aligned) * each)

    def _panels(self, linear: Linear, made: Layer, *, rows: bool) -> int:
        weights = (linear.weight, linear.low_rank.v)
        return sum(self._panel(weight, made, rows=rows) for weight in weights)

    def _results(self, linear: Linear, made: Layer, size: int) -> dict[str, int]:
        """Return bytes of two tiles of a result on its way to HBM, and of fp32 tiles before."""
        tokens, wide = self.tokens(made), linear.last.block
        patch = linear.last.down * min(wide, 512 * linear.last.group)
        each = patch if linear.by_rows else tiles(wide, 128) * tokens
        steps = bool(made.scales) + bool(linear.bias) + (linear.activation != "identity")
        held = {"y": 2 * each * size, "sum": 4 * 512 * 2 * steps if linear.by_rows else 0}
        if linear.turned:
            held["turned y"] = 2 * wide * size * (1 + made.residual)
        return held | ({"residual": 2 * each * size} if made.residual else {})

    def _vectors(self, made: Layer, size: int) -> int:
        """Return bytes of biases and scales: along the free axis, or a column per 128 outputs."""
        held = 0
        for linear in made.layers:
            along = linear.by_rows and not (made.down.n and linear is not made.down)
            spread = linear.n + min(linear.n, 8192)  # with two rows of 4,096 on their way
            bias, scale = (size * spread, 4 * spread) if along else 2 * (6 * tiles(linear.n, 128),)
            held += bias * bool(linear.bias) + scale * bool(made.scales)
            held += 12 * linear.low_rank.tiles * (bool(made.scales) + linear.low_rank.shaped)
        for pair in made.factors:
            if pair.groups.count:
                held += 4 * (pair.tiles + 5) * self.tokens(made)
            if pair.groups.slots:  # rows of u^T as they come, u turned, all of v
                size, deep = item_bytes(made.format_of(pair.u)), tiles(pair.u.k, 128)
                held += size * (2 * pair.u.k + deep * pair.r + pair.tiles * pair.v.n)
        return held

    def _flat(self, made: Layer) -> int:
        """Return bytes of rows on their way through TensorE transposes."""
        turned = [w.chunk for w in made.weights() if w.load.startswith("tensor")]
        if made.x_load.startswith("tensor"):
            turned.append(made.x_chunk or max(weight.chunk for weight in made.weights()))
        each = max(2, item_bytes(made.dtype))
        return 2 * max(turned, default=0) * each

    def sbuf_bytes(self, layer: Layer) -> dict[str, int]:
        """Return bytes per partition of each SBUF buffer, of the stage that needs most.

        A stage computes p, then the results or h, then p behind h, then the result behind h.
        """
        buffers = self.buffers(self.plan(layer)).items()
        stages = [
            {name: size for name, (first, last, size) in buffers if first <= stage <= last}
            for stage in range(4)
        ]
        return max(stages, key=lambda held: sum(held.values()))

    def check(self, spec: Any, target: Target) -> None:
        """Raise CapacityError, SpecError or UnknownNameError unless legal for spec and target."""
        layer: Layer = spec.share(self.split)
        check_name("x_load", self.x_load, tuple(x_loads(layer, target)))
        check_name("w_load", self.w_load, tuple(w_loads(layer, target)))
        have_not = f"{layer.m} tokens of {layer.x_format} on {target.name} have not, drop it"
        needs = {
            "own_queue": (target.dma_generates_descriptors, "descriptors that the device writes"),
            "double_row": (layer.fp8_x and target.fp8_double_row, "fp8 x on trn2 or trn3"),
            "turned": (layer.m <= FEW, f"{FEW} tokens at most"),
            "m_loop": (
                target.device_loops and self._can_loop(layer),
                f"loops on the device, 2 blocks of {self.m_block} tokens, no x by DMA transposes, "
                "and no sums between cores or ranks and no index inside",
            ),
        }
        self.check_axes({
            "m_block": TILES, "u_block": TILES,
            "block": FOURS_OF_H if layer.mx and layer.down.n else TILES,
            "load_bytes": (range(1, 1 << 24), "pass 1 or more"),
            **{name: ((False, there), f"{name} needs {what}; {have_not}")
               for name, (there, what) in needs.items()},
        })  # fmt: skip
        self._check_capacity(spec, layer, target)

    def _can_loop(self, layer: Layer) -> bool:
        """Return whether the blocks of tokens can be a loop on the device.

        A DMA transposes 16 rows at a time there. What crosses between cores or ranks, and an index,
        is read once a block.
        """
        crosses = layer.split == "weights" and bool(layer.factors or layer.down.n)
        chosen = any(pair.groups.count for pair in layer.factors)
        blocks = layer.m >= 2 * self.m_block and self.x_load != "dma"
        return blocks and not (crosses or chosen or layer.tp > 1)

    def _check_capacity(self, spec: Any, layer: Layer, target: Target) -> None:
        """Raise CapacityError unless PSUM holds the sums and SBUF every buffer of a stage."""
        turns = "tensor" in self.x_load or "tensor" in self.w_load or self.turned
        banks = max(self.banks, tiles(self.tokens(layer), 512), self.down) + 2 * turns
        if banks > target.psum_banks or min(self.banks, self.down) < 1:
            raise CapacityError(
                f"{spec.short()}: the sums need {banks} PSUM banks, {target.name} has "
                f"{target.psum_banks}; lower banks from {self.banks}, or m_block from "
                f"{self.m_block}"
            )
        remedy = f"lower m_block from {self.m_block} or block from {self.block}"
        self.check_sbuf(spec.short(), layer, target, remedy)

    def in_loop(self, layer: Layer, target: Target) -> LinearSchedule:
        """Return the schedule with its blocks of tokens, two at least, as a loop on the device."""
        turned = self.x_load == "dma"  # by 16 rows at a time in a loop: TensorE turns instead
        most = target.psum_banks - 2 if turned else target.psum_banks
        m_block = self.m_block
        while 2 * m_block > layer.m and m_block > 128:
            m_block = 128 * (m_block // 256)
        return dataclasses.replace(
            self, m_loop=True, x_load="tensor" if turned else self.x_load, m_block=m_block,
            banks=min(self.banks, most),
        )  # fmt: skip

    def loop_turns(self, layer: Layer) -> list[tuple[int, Layer]]:
        """Return (how often, layer of one turn) of the loop on the device, the rest last.

        Two turns do not overlap, so their times add up.
        """
        if not self.m_loop:
            return [(1, layer)]
        blocks, rest = divmod(layer.m, self.m_block)
        made = [(blocks, dataclasses.replace(layer, m=self.m_block))]
        return made + ([(1, dataclasses.replace(layer, m=rest))] if rest else [])


def _pitch(free: int, aligned: bool) -> int:
    """Return elements from one tile of a contraction to the next in SBUF."""
    return 16 * tiles(free, 16) if aligned else free


def x_loads(layer: Layer, target: Target) -> list[str]:
    """Return the ways to load x; products of MX blocks take it in no DMA's order."""
    if layer.x_layout == "col":
        return ["rows"]
    if layer.mx:
        return ["tensor"]
    return ["rows"] if layer.m == 1 else turned_loads(layer.x_format, target)


def w_loads(layer: Layer, target: Target) -> list[str]:
    """Return the ways to load weights that are stored [n, k]."""
    turned = any(weight.layout == "col" for weight in layer.weights())
    return turned_loads(layer.dtype, target) if turned else ["rows"]


def candidates(layer: Layer, target: Target) -> Iterator[LinearSchedule]:
    """Yield schedules that may be legal, about 50."""
    few = layer.m <= FEW
    x_ways = x_loads(layer, target)[: 2 if few else 1]
    widest = max(one.n for one in (*layer.linears, layer.down))
    rank = max((pair.r for pair in layer.pairs), default=128)
    loads: tuple[int, ...] = (4096, 2048, 8192) if few else (2048, 8192)
    loads = (16384,) if few and layer.mx else loads
    blocks = sizes_of_panels(widest, (1024, 2048, 4096, 512) if few else (512, 1024, 256))
    if layer.mx and layer.down.n:
        blocks = [size for size in blocks if not size % 512]
    turns = (False, True) if few and any(one.rows for one in layer.results) else (False,)
    for x_load, w_load, m_block, turned in itertools.product(
        x_ways, w_loads(layer, target), _blocks(layer, target), turns
    ):
        banks = target.psum_banks - 2 * ("tensor" in x_load or "tensor" in w_load or turned)
        ranks = _ranks(rank, max(1, banks // tiles(min(m_block, layer.m), 512)))
        downs = (1,) if few else (1, 4) if layer.down.n else (4, 1)
        for u_block, block, load_bytes, down in itertools.product(ranks, blocks, loads, downs):
            made = LinearSchedule(
                x_load=x_load, ahead=True, w_load=w_load, m_block=m_block, block=block,
                u_block=u_block, load_bytes=load_bytes, banks=banks, down=down,
                # of fewer tokens the tiles of x that are spaced for it take longer to load
                double_row=layer.fp8_x and target.fp8_double_row and layer.m >= 16, turned=turned,
                own_queue=target.dma_generates_descriptors,
            )  # fmt: skip
            fits = sum(made.sbuf_bytes(layer).values()) <= target.sbuf_usable_bytes_per_partition
            if fits:
                yield made
            if not fits or (few and layer.combine):
                yield dataclasses.replace(made, ahead=False)


def parts_of(weight: Weight, columns: int, unit: int) -> int:
    """Return how many parts of a panel of few rows lie on the partitions, each of whole units."""
    if weight.k not in (32, 64):
        return 1
    shared = math.gcd(weight.n, columns)
    return max(p for p in (1, 2, 4) if p == 1 or (p * weight.k <= 128 and not shared % (p * unit)))


def whole_blocks(weight: Weight, chunk: int) -> int:
    """Return rows a load of a weight in order "fours": of MX blocks four tiles, whose scales take
    the partitions of two DMA engines a quadrant."""
    least = 2048 if weight.mx else 512
    return min(least * tiles(chunk, least), 512 * tiles(weight.k, 512))


def _load(weight: Weight, turned: str) -> str:
    """Return how a weight is loaded, given how those stored [n, k] are."""
    return {"row": "rows", "col": turned}.get(weight.layout, "runs")


def _blocks(layer: Layer, target: Target) -> list[int]:
    """Return blocks of tokens: the largest two whose strips leave SBUF a quarter, and a tenth
    beside scales that lie along the outputs."""
    each = layer.k * item_bytes(layer.x_format) / 128
    each += (layer.p_tiles + layer.h_tiles) * item_bytes(layer.kept_dtype)
    scales = sum(4 * (one.n + min(one.n, 8192)) for one in layer.results if one.rows)
    usable = target.sbuf_usable_bytes_per_partition
    room = min(0.75 * usable, 0.9 * usable - scales * bool(layer.scales))
    steps = [step for step in (2048, 1024, 512, 256) if min(step, layer.m) * each <= room]
    return sizes_of_panels(layer.m, (*steps, 128))[: 1 if layer.m <= FEW else 2]


def sizes_of_panels(whole: int, steps: tuple[int, ...]) -> list[int]:
    """Return the steps, those above the whole as the whole in tiles of 128."""
    return list(dict.fromkeys(min(step, 128 * tiles(whole, 128)) for step in steps if whole))


def _ranks(rank: int, most: int) -> list[int]:
    """Return panels of a first factor: about equal ones of one pass each, and all of it."""
    count = tiles(rank, 128)
    return list(dict.fromkeys((128 * tiles(count, tiles(count, most)), 128 * count)))


def data_flow(layer: Layer, schedule: LinearSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    made = schedule.plan(layer)
    lines = [f"x: {LOADED[schedule.x_load]}, {schedule.tokens(layer)} tokens at a time."]
    if made.factors:
        lines.append("p^T = (x u)^T: u stationary, x^T moving, summed in PSUM, kept in SBUF.")
    if layer.combine:
        lines.append("h: the gate leaves PSUM through its activation, the other is multiplied.")
    if layer.down.n:
        lines.append(
            "h^T stays in SBUF, its features on the partitions, as the next product wants."
        )
    ways = "weights stationary, tokens moving", "tokens stationary, weights moving"
    sides = {ways[one.rows] for one in made.results}
    wide = made.results[0].last.block
    lines.append(f"results: {' or '.join(sorted(sides))}; {wide} outputs of a weight at a time.")
    return tuple(lines)


def work(layer: Layer, schedule: LinearSchedule) -> Work:
    """Return the passes, reads of PSUM and DMAs of a kernel, or of one of two cores.

    One walk over its weights. It ranks schedules before the best few are simulated, and counts the
    instructions of a program.
    """
    made, tokens = schedule.plan(layer), schedule.tokens(layer)
    m_blocks, x_size = tiles(layer.m, schedule.m_block), item_bytes(layer.x_format)
    first, total = made.weights()[0], layer.m * layer.k * x_size
    chunk, first_size = min(first.chunk, first.k), weight_bytes(layer.format_of(first))
    last = made.layers[-1].scaled
    panel = min(made.results[0].last.block, made.results[0].n)
    # by each of two cores to the other one, a partition and token
    sent = 4 * made.p_tiles * made.exchanges_p + 4 * made.down.low_rank.tiles * made.exchanges_down
    sent += item_bytes(made.kept_dtype) * made.h_tiles * made.exchanges_h
    done = Work(
        lead_bytes=int(chunk * (tokens * x_size + min(first.block, first.n) * first_size)),
        lead_passes=(4 * (layer.norm != "none"), tiles(min(layer.m, 512) * layer.k, 128)),
        tail_matmuls=(tiles(panel, 512) * tiles(min(tokens, 512), 128), min(512, panel))
        if made.results[-1].by_rows
        else (tiles(last.chunk, 128) * tiles(panel, 128 * last.pieces), tokens),
        tail_bytes=min(layer.m, 128) * panel * item_bytes(layer.result_dtype) + 128 * made.m * sent,
        hops=3
        + made.x_load.startswith("tensor")
        + bool(made.factors)
        + bool(made.down.n)
        + len(made.down_pairs),
    )
    step = made.x_chunk or first.chunk
    count = tiles(layer.k, step) * m_blocks
    deep = step // 128 if made.order == ORDERS[0] and tokens == layer.m else 1
    squares = tiles(layer.k, 128) // made.x_parts * tiles(layer.m, 128)
    flat = (squares, count * tiles(tokens, 128), step // made.x_parts * x_size)
    done.load(made.x_load, total, count, x_size * tokens * deep, flat)
    if layer.mx:
        done.evictions.append((2 * tiles(layer.k, 512) * m_blocks, 4 * tokens))
    if layer.norm != "none":
        done.evictions.append((4 * tiles(layer.k, 128) * m_blocks, tokens))
    for linear in made.layers:
        for weight in linear.products():
            shared = weight.name == linear.low_rank.u.name
            if shared and linear.place > min(
                one.place for one in made.layers if one.low_rank.u.name == weight.name
            ):
                continue
            add_loads(done, weight, weight_bytes(layer.format_of(weight)), m_blocks)
            rows = linear.by_rows and not shared and (linear is made.down or not made.down.n)
            passes, sums = _passes(weight, layer.m, rows)
            done.matmuls.append(passes)
            done.evictions.append(sums)
    for one in made.results:
        _store(done, one, made, schedule)
        wide = min(512, one.n)
        if one.turned:  # as many tiles at once as have 128 columns
            turns = tiles(tiles(one.n, 128), max(1, FEW // layer.m))
            done.matmuls.append((turns, FEW))
            done.evictions.append((tiles(turns, 4), 512))
        elif one.by_rows:  # ones times the row of scales, and of biases, for all partitions
            vectors = ((made.scales == "channel") + bool(one.bias)) * tiles(one.n, wide), wide
            done.matmuls.append(vectors)
            done.evictions.append(vectors)
    return done


def add_loads(done: Work, weight: Weight, size: float, times: int) -> None:
    """Add the loads of a weight, so many times."""
    columns = min(weight.block, weight.n)
    count = tiles(weight.k, weight.chunk) * tiles(weight.n, columns) * times
    in_run = columns == weight.n and (weight.load == "runs" or weight.order == ORDERS[0])
    deep = weight.chunk // 128 if in_run else 1
    turned = (
        tiles(weight.k, 128) * tiles(weight.n, 128) * times, count * tiles(columns, 128),
        int(min(weight.chunk, weight.k) * size),
    )  # fmt: skip
    total = int(weight.k * weight.n * size) * times
    run = columns * weight.mx_bytes if weight.mx else int(columns * size * deep)
    done.load(
        "short_rows" if weight.queue else weight.load, total, 2 * count if weight.mx else count,
        run, turned,
    )  # fmt: skip


def _passes(weight: Weight, m: int, rows: bool) -> tuple[Passes, Passes]:
    """Return the TensorE passes of a product, and the sums that leave PSUM."""
    deep = tiles(weight.k, 512 if weight.mx else 256 if weight.double_row else 128)
    if rows:
        wide = min(512, weight.block, weight.n)
        count = tiles(m, 128) * tiles(weight.n, wide)
        # a pass adds to its sum when the one before it has come through, after about 512 columns
        return (deep * count, max(wide, 512 // min(weight.down, tiles(m, 128)))), (count, wide)
    count, wide = tiles(weight.n, 128) * tiles(m, 512), min(m, 512)
    return (deep * count, wide), (count, wide)


def _store(done: Work, one: Linear, made: Layer, schedule: LinearSchedule) -> None:
    """Add the stores of a result, and the loads of a residual, which lies as it does."""
    size, tokens = item_bytes(made.result_dtype), schedule.tokens(made)
    wide = min(one.last.block, one.n, 512 * one.last.group if one.rows else one.last.block)
    if one.rows:
        stores, run = tiles(made.m, 128) * tiles(one.n, wide), wide * size
    else:
        stores, run = tiles(made.m, tokens) * tiles(one.n, wide), tokens * size
    kind = "hardware" if schedule.own_queue else "copy"  # the sync engine's queue needs no software
    for how in (kind, "copy")[: 1 + made.residual]:
        done.move(made.m * one.n * size, stores, run, how)


LINEAR = tuple(
    Family(
        spec_class=spec_class,
        schedule_class=LinearSchedule,
        candidates=candidates,
        work=work,
        data_flow=data_flow,
    )
    for spec_class in (*SPECS, CorrectedSpec, CorrectedMLPSpec)
)
"""The families of linear layers: one kernel, a name for each constructor of its record."""
