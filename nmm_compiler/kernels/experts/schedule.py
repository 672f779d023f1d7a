"""How a kernel of experts runs: which groups it goes through, and in which panels they come."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import CapacityError
from nmm_compiler.kernels.base import (
    FOURS_OF_H,
    GROUPS,
    TILES,
    WEIGHTS,
    Family,
    Schedule,
)
from nmm_compiler.kernels.experts.spec import FEW, NOTHING, TOKENS, ExpertsSpec
from nmm_compiler.kernels.linear.layer import OPS, Weight
from nmm_compiler.kernels.linear.schedule import (
    add_loads,
    parts_of,
    sizes_of_panels,
    whole_blocks,
)
from nmm_compiler.kernels.tiling import (
    FOURS,
    ORDERS,
    chunk_rows,
    item_bytes,
    tiles,
    weight_bytes,
)
from nmm_compiler.kernels.work import Work
from nmm_compiler.targets import Target

_FIELDS = {
    "up": "gate_up", "up_u": "gate_up_u", "up_v": "gate_up_v",
    "down": "down", "down_u": "down_u", "down_v": "down_v",
}  # fmt: skip
"""The fields of a plan that are weights, and the operands that they are of."""
AT_ONCE = (1, 2, 4, 8)
BLOCKS = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsPlan(ExpertsSpec):
    """What the kernel's function reads: the share of one core, and how each weight arrives.

    way, at_once: of the schedule, of all picks where there is no loop. stack: groups that
    are computed as one, 1 where they are wide. tokens, blocks: of a block, and the most blocks
    there can be, in whole turns. up, down: the weights; of gate_up the outputs of a half are `step`
    apart, and those of up begin at up_first. up_u .. down_v: the factors. up_block, down_block:
    outputs of a panel.

    cores: that take turns of the loop. one_load: a load brings whole rows of gate and up. scales:
    of the sums, as an epilogue has it. order: which features of x share a partition. x_tiles,
    h_tiles, token_tiles: of x^T, of h^T, of the tokens of a block. token_bits, turn_bits: the
    powers of two that the tokens of a block, and the groups or blocks of a turn of all cores, are.
    up_panels, down_panels: of gate and up, of down.
    """

    way: str
    at_once: int
    stack: int
    tokens: int
    blocks: int
    up: Weight
    down: Weight
    up_u: Weight
    up_v: Weight
    down_u: Weight
    down_v: Weight
    up_block: int
    down_block: int
    group: int
    patch: int
    step: int
    up_first: int
    op: str
    split: str
    cores: int
    one_load: bool
    scales: str
    order: str
    x_tiles: int
    h_tiles: int
    token_tiles: int
    token_bits: int
    turn_bits: int
    up_panels: int
    down_panels: int
    nothing: Weight = NOTHING


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSchedule(Schedule):
    """How a kernel of experts runs. Sizes are in elements unless named.

    way: "picks", those of the only token; "distinct", the groups that tokens chose, in a loop on
        the device; "blocks", tokens sorted into blocks of one group each, in a loop. at_once:
        groups, or blocks, a turn of the loop. tokens: of a block.
    block, down_block: outputs of a panel of gate and up, and of down. banks: of PSUM, for sums.
    split: how two cores share the kernel: "groups", half of the groups or blocks each, or
        "weights", half of the features of h each.
    """

    way: str
    at_once: int = 1
    tokens: int = 0
    block: int
    down_block: int
    banks: int = 6
    split: str = ""

    @property
    def kind(self) -> tuple[str, int, int]:
        """How two cores share the kernel, the tokens of a block, and its panels or the groups."""
        return (self.split, self.tokens, self.block if self.tokens else self.at_once)

    def plan(self, spec: ExpertsSpec) -> ExpertsPlan:
        """Return what the kernel reads of a core's share."""
        n = spec.features
        width = n * (2 if self.split == WEIGHTS else 1)
        interleaved = spec.halves == "interleaved"
        slots = spec.top_k if self.way == "picks" else self.at_once
        patch = max(1, min(tiles(self.tokens, 128), self.banks))
        # more sums of few tokens fit between two MX products
        few = spec.mx and (self.tokens or spec.m) < 64
        up_block = min(self.block, 128 * tiles(n, 128))
        down_block = min(self.down_block, 128 * tiles(spec.k, 128))
        group = max(1, self.banks // patch * (2 if few else 1))
        stored = spec.stored()
        arriving: dict[str, Any] = {
            field: self._arriving(stored.get(name, NOTHING), spec, patch, group)
            for field, name in _FIELDS.items()
        }
        up = arriving["up"]
        first = up if up.k else arriving["up_u"]
        return ExpertsPlan(
            **vars(spec), **arriving, way=self.way, split=self.split, tokens=self.tokens,
            at_once=slots, stack=self.stack(spec, slots), blocks=self.most_blocks(spec),
            up_block=up_block, down_block=down_block, group=group, patch=patch,
            step=2 if interleaved else 1, up_first=0 if interleaved else width,
            op=OPS[spec.activation], cores=self.cores,
            one_load=not interleaved and up_block >= n and self.split != WEIGHTS,
            scales="channel" if spec.weight == "fp8" else "", order=first.order,
            token_tiles=tiles(self.tokens, 128),
            x_tiles=4 * tiles(up.k, 512) if spec.mx else tiles(spec.k, 128),
            h_tiles=4 * tiles(spec.n, 512) if spec.mx else tiles(spec.n, 128),
            token_bits=self.tokens.bit_length() - 1,
            turn_bits=(slots * self.cores).bit_length() - 1,
            up_panels=tiles(n, up_block), down_panels=tiles(spec.k, down_block),
        )  # fmt: skip

    def _arriving(self, one: Weight, spec: ExpertsSpec, patch: int, group: int) -> Weight:
        """Return a weight and how it arrives; gate_up with the outputs of one half."""
        if not one.k:
            return one
        up, base = one.name.startswith("gate_up"), one.name in ("gate_up", "down")
        first = one.name.endswith("_u")
        halved = up and not first
        n = one.n // 2 if halved else one.n
        columns = min(one.n if first else self.block if up else self.down_block, n)
        columns = 128 * tiles(columns, 128)
        layout = spec.weight_layout if base else "row"
        both = halved and (spec.halves == "interleaved" or self.block >= n)
        size = weight_bytes(one.format)
        chunk = chunk_rows(one.k, int(columns * size * (1 + both)))
        fours = spec.mx and (base or first)
        runs = up and (base or first) and spec.weight_layout == "row"
        order = ORDERS[0] if runs else ORDERS[1]
        few = (self.tokens or spec.m) <= FEW and (spec.k if up else spec.features) > 384
        behind = self.way != "blocks" and not (base or first or up)
        return dataclasses.replace(
            one, n=n, layout=layout, ahead=True, order=FOURS if fours else order,
            # an address of the device has no DMA transpose for it
            load="rows" if layout == "row" else "tensor", block=columns, group=group, down=patch,
            chunk=whole_blocks(one, chunk) if fours else chunk,
            apart=4 if spec.mx and halved else 1,
            few_sums=few and first, parts=parts_of(one, columns, 128) if few and behind else 1,
        )  # fmt: skip

    @property
    def cores(self) -> int:
        """Cores that take turns of the loop."""
        return 2 if self.split == GROUPS else 1

    def stack(self, spec: ExpertsSpec, slots: int) -> int:
        """Return how many groups of a turn are computed as one of at most 128 features."""
        joined = spec.halves == "joined" and spec.weight_layout == "row"
        more = spec.limit or spec.gate_up_bias or spec.down_bias or spec.weight or any(spec.ranks)
        shared = joined and not more and spec.activation != "identity"
        if not shared or self.way == "blocks" or self.split == WEIGHTS:
            return 1
        return max(some for some in range(1, slots + 1) if not slots % some and
                   (some == 1 or some * spec.n <= 128))  # fmt: skip

    def most_blocks(self, spec: ExpertsSpec) -> int:
        """Return the most blocks that tokens can need, in whole turns; 0 where there are none."""
        if self.way != "blocks":
            return 0
        picks = spec.m * spec.top_k
        groups = min(spec.groups, picks)
        most = groups + (picks - groups) // self.tokens
        turn = self.at_once * self.cores
        return turn * tiles(most, turn)

    def sbuf_bytes(self, spec: ExpertsSpec) -> dict[str, int]:
        """Return bytes per partition of each SBUF buffer: two panels of each weight at most."""
        made, size, m = self.plan(spec), item_bytes(spec.dtype), self.tokens or spec.m
        deep, wide = made.x_tiles, made.h_tiles
        up = 2 * self._panel(made.up) + 2 * self._panel(made.up_v)
        down = self._panel(made.down) + self._panel(made.down_v)
        more = 2 * up if made.up_panels > 1 else up
        behind = 2 * down if made.down_panels > 1 else down
        if made.stack > 1:
            more = made.at_once * deep * 2 * spec.n * size
            behind = made.at_once // made.stack * spec.k * size
            up = down = 0
            more += behind
        firsts = self._panel(made.up_u) + self._panel(made.down_u)
        numbers = spec.gate_up_bias + spec.down_bias + 2 * (spec.weight == "fp8")
        held = {
            "panels": max(more, up + down, behind) + firsts,
            "h": 2 * wide * m * size,
            "products": 4 * m * (4 * tiles(made.up_block, 128) + 2 * tiles(made.down_block, 128)),
            "biases": 2 * (4 * (2 * wide + deep) + 1024) * min(2, numbers),
        }  # fmt: skip
        if any(spec.ranks):
            held["p"] = 2 * sum(tiles(rank, 128) for rank in spec.ranks) * m * size
        if spec.mx:  # data and scales of four features, and fours on their way to them
            held["blocks"] = 5 * (deep + wide) // 4 * (m + 1) * 2 + 4 * 8 * max(512, m)
        if self.way != "blocks":
            return held | {
                "x": (deep * m + spec.k) * size, "y": 4 * deep * m * (2 if self.split else 1),
                "rows": spec.k * size,
                "picks": 4 * m * spec.top_k * 6 + 8 * spec.groups + 8 * m,
            }  # fmt: skip
        picks, groups = min(spec.m, TOKENS) * spec.top_k, tiles(spec.groups, 128)
        held |= {
            "x": 2 * (deep * m + made.token_tiles * spec.k) * size,
            "rows": 2 * size * min(made.down_block, 512 * made.group) * made.patch,
            # on every partition, and what is between sums and rows
            "spread": ((spec.weight == "fp8") + spec.down_bias) * 8 * made.down_block + 4 * 512 * 2,
        }  # fmt: skip
        sorting = {
            "picks": 4 * (8 * picks + tiles(spec.m, 128) * spec.top_k + 16 * groups),
            "blocks": 4 * (made.blocks * (4 + made.token_tiles) + 2 * m),
            "sums": (4 + 3 * size) * spec.k,
        }  # fmt: skip
        stages = {"sorted": 4 * made.blocks * made.token_tiles} | held, sorting
        return max(stages, key=lambda held: sum(held.values()))

    def _panel(self, one: Weight) -> int:
        """Return the bytes of a panel of a weight."""
        if not one.k:
            return 0
        fours = one.order == FOURS
        deep = 4 * tiles(one.k, 512) if fours else tiles(one.k, 128)
        return int(deep * one.block * weight_bytes(one.format, on_chip=True))

    def check(self, spec: ExpertsSpec, target: Target) -> None:
        """Raise CapacityError or SpecError, with numbers, unless legal for spec and target."""
        part = spec.share(self.split)
        ways = ["distinct"] * (spec.m <= TOKENS) + ["blocks"] * (spec.m > FEW)
        if spec.m == 1:  # two cores have half of the picks
            ways = ["picks"] if self.split else ["picks", "distinct"]
        self.check_axes({
            "way": (ways, f"pass one of {ways} for {spec.m} tokens"),
            "at_once": (AT_ONCE, f"pass one of {AT_ONCE}"),
            "tokens": (
                BLOCKS if self.way == "blocks" else (0,),
                f"pass tokens as one of {BLOCKS} with way 'blocks', else 0",
            ),
            "block": FOURS_OF_H if spec.mx and self.block < part.features else TILES,
            "down_block": TILES,
            "banks": (
                range(1, target.psum_banks - 1),
                f"pass 1 to {target.psum_banks - 2}: two more are for what TensorE turns",
            ),
        })  # fmt: skip
        banks = tiles(self.tokens, 128) * tiles(self.most_blocks(part), 512)
        if banks > target.psum_banks - 2:
            raise CapacityError(
                f"{spec.short()}: the tokens of {self.most_blocks(part)} blocks of {self.tokens} "
                f"take {banks} PSUM banks, and {target.name} has {target.psum_banks - 2} for them; "
                "split the tokens"
            )
        self.check_sbuf(spec.short(), part, target, f"lower block from {self.block}")

    def turns(self, spec: ExpertsSpec) -> int | None:
        """Return the expected turns of the loop, whose bound the device computes."""
        turn = self.at_once * self.cores
        if self.way == "blocks":
            each = spec.m * spec.top_k / spec.expected  # half of a group's last block is empty
            return tiles(round(spec.expected * max(1.0, each / self.tokens + 0.5)), turn)
        return tiles(round(spec.expected), turn) if self.way == "distinct" else None


def candidates(spec: ExpertsSpec, target: Target) -> Iterator[ExpertsSchedule]:
    """Yield schedules that may be legal: panels of which SBUF holds two, if there are more."""
    room = target.sbuf_usable_bytes_per_partition

    def panels(name: str, outputs: int, matrices: int) -> list[int]:
        one = spec.stored().get(name) or spec.stored()[f"{name}_v"]
        each = matrices * tiles(one.k, 128) * weight_bytes(one.format, on_chip=True)
        sizes = sizes_of_panels(outputs, (4096, 2048, 1024, 512, 256, 128))
        return [size for size in sizes if (1 + (size < outputs)) * size * each <= room] or [128]

    for (way, at_once, tokens), block, down_block in itertools.product(
        _ways(spec, room), panels("gate_up", spec.n, 2), panels("down", spec.k, 1)
    ):
        yield ExpertsSchedule(
            way=way, at_once=at_once, tokens=tokens, block=block, down_block=down_block,
            banks=target.psum_banks - 2,
        )  # fmt: skip


def _ways(spec: ExpertsSpec, room: int) -> list[tuple[str, int, int]]:
    """Return ways, what they take a turn, and the tokens of their blocks.

    x and h of a block take half of the room at most.
    """
    if spec.m == 1:  # where most picks are on other devices, those that are here
        here = [("distinct", at_once, 0) for at_once in (1, 2) if 2 * spec.expected <= spec.top_k]
        return [("picks", 1, 0), *here]
    ways = [("distinct", at_once, 0) for at_once in (4, 2, 1, 8) if spec.m <= TOKENS]
    if spec.m > FEW:
        token = (2 * tiles(spec.k, 128) + tiles(spec.n, 128)) * item_bytes(spec.dtype)
        fits = [size for size in BLOCKS if size * token <= room / 4] or [BLOCKS[0]]
        half = spec.m * spec.top_k / spec.expected / 2
        sizes = fits[min(bisect.bisect_left(fits, half), max(0, len(fits) - 2)) :][:3]
        ways += [("blocks", at_once, size) for size in sizes for at_once in (4, 2, 1, 8)]
    return ways


def work(spec: ExpertsSpec, schedule: ExpertsSchedule) -> Work:
    """Return the passes, reads of PSUM and DMAs of a kernel, or of one of two cores."""
    made, size = schedule.plan(spec), item_bytes(spec.dtype)
    few, edges = schedule.tokens or spec.m, schedule.turns(spec) or 0
    groups = (edges or 1) * made.at_once
    last = tiles(made.down_block, 128) * tiles(spec.n, 512 if spec.mx else 128)
    first = made.up if made.up.k else made.up_v
    done = Work(
        lead_bytes=int(first.chunk * made.up_block * weight_bytes(first.format)) * (1 + 8 * edges),
        # no load hides the last panel of down in a turn of the loop
        tail_matmuls=(last * (1 + edges), max(64, few)),
        tail_bytes=spec.m * spec.k * size,
    )
    weights = [getattr(made, field) for field in _FIELDS]
    for weight in (one for one in weights if one.k):
        count = 2 if weight.name in ("gate_up", "gate_up_v") else 1
        add_loads(done, weight, weight_bytes(weight.format), groups * count)
        sums = groups * count * tiles(weight.n, 128)
        # y of a block has tokens on the partitions: its weights move, as if all 128 were there
        moving = 128 * made.token_tiles * (weight.name in ("down", "down_v"))
        done.matmuls.append(
            (sums * tiles(weight.k, 512 if weight.mx else 128) // made.stack, max(64, few, moving))
        )
        done.evictions.append((sums, few))
    if made.blocks:  # of each block the rows of its tokens come, and those of its picks leave
        rows, times = 2 * made.blocks * made.tokens, 2 * made.blocks * made.token_tiles
        done.move(rows * spec.k * size, times, spec.k * size)
    done.dmas.append((1 + edges, 2 * made.up_block, made.up_block, "copy"))
    done.move(spec.m * spec.k * size, 1, spec.k * size)
    return done


def data_flow(spec: ExpertsSpec, schedule: ExpertsSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    which = {
        "picks": "the picks of the token, one after another",
        "distinct": f"the groups that tokens chose, {schedule.at_once} a turn of a loop",
        "blocks": f"blocks of {schedule.tokens} tokens, {schedule.at_once} a turn of a loop",
    }[schedule.way]
    takes = "sorted by group" if schedule.tokens else "each takes all tokens, gates of 0 leave out"
    stack = schedule.plan(spec).stack
    factors = "x u first of every group, then x w + (x u) v; " * any(spec.ranks)
    weights = (
        f"{schedule.block} outputs of gate and up, then {schedule.down_block} of down at a time, "
        "each loaded before the products of the panel before it"
    )
    if stack > 1:
        weights = f"all of a turn's groups first; {stack} groups are one product of all features"
    return (
        f"groups: {which}; {takes}.",
        "x^T, h^T and y^T have features on the partitions: weights stationary, tokens moving.",
        f"weights: {factors}{weights}.",
    )


EXPERTS = Family(
    spec_class=ExpertsSpec,
    schedule_class=ExpertsSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
