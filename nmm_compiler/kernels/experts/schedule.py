"""How a kernel of experts runs: which groups it goes through, and in which panels they come."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from nmm_compiler.errors import CapacityError, SpecError
from nmm_compiler.kernels.base import GROUPS, WEIGHTS, Family, Schedule, check_name
from nmm_compiler.kernels.experts.spec import FEW, TOKENS, ExpertsSpec
from nmm_compiler.kernels.linear.layer import OPS, Weight
from nmm_compiler.kernels.tiling import (
    ORDERS,
    chunk_rows,
    item_bytes,
    tiles,
)
from nmm_compiler.kernels.work import Tally, Work
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

NOTHING = Weight()
WAYS = ("picks", "distinct", "all", "blocks")
AT_ONCE = (1, 2, 4, 8)
BLOCKS = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsPlan(Record):
    """What the kernel's function reads: sizes of one core, and how each weight arrives.

    way, at_once: of the schedule, of all groups or picks where there is no loop. stack: groups that
    are computed as one, 1 where they are wide. tokens, blocks: of a block, and the most blocks
    there can be, in whole turns. width: features of h of all cores. up, down: the weights; of
    gate_up the outputs of a half are `step` apart, and those of up begin at up_first. down_bias:
    one row of weights, none without a bias.
    """

    m: int
    k: int
    n: int
    width: int
    count: int
    top_k: int
    way: str
    at_once: int
    stack: int
    tokens: int
    blocks: int
    up: Weight
    down: Weight
    down_bias: Weight
    has_up_bias: bool
    step: int
    up_first: int
    activation: str
    op: str
    limit: float
    slope: float
    plus: float
    split: str
    nothing: Weight = NOTHING

    @property
    def one_load(self) -> bool:
        """Whether a load brings whole rows of gate and up."""
        return self.step == 1 and self.up.block >= self.n and self.split != WEIGHTS

    @property
    def cores(self) -> int:
        """Cores that take turns of the loop."""
        return 2 if self.split == GROUPS else 1

    @property
    def has_down_bias(self) -> bool:
        """Whether each group adds a bias to y."""
        return self.down_bias.k > 0

    @property
    def clamped(self) -> bool:
        """Whether gate and up are clamped before they are multiplied."""
        return self.limit > 0

    @property
    def token_tiles(self) -> int:
        """Tiles of the tokens of a block."""
        return tiles(self.tokens, 128)

    @property
    def token_bits(self) -> int:
        """The power of two that the tokens of a block are."""
        return self.tokens.bit_length() - 1

    @property
    def turn_bits(self) -> int:
        """The power of two that the groups, or blocks, of a turn of all cores are."""
        return (self.at_once * self.cores).bit_length() - 1

    @property
    def up_panels(self) -> int:
        """Panels of gate and up."""
        return tiles(self.n, self.up.block)

    @property
    def down_panels(self) -> int:
        """Panels of down."""
        return tiles(self.k, self.down.block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSchedule(Schedule):
    """How a kernel of experts runs. Sizes are in elements unless named.

    way: "picks", those of the only token; "distinct", the groups that tokens chose, in a loop on
        the device; "all", every group; "blocks", tokens sorted into blocks of one group each, in a
        loop. at_once: groups, or blocks, a turn of the loop. tokens: of a block.
    w_load: how the contraction index of weights stored [outputs, inputs] gets onto the partitions.
    block, down_block: outputs of a panel of gate and up, and of down. load_bytes: of a load, for
        each partition. banks: of PSUM, for sums.
    split: how two cores share the kernel: "groups", half of the groups or blocks each, or
        "weights", half of the features of h each.
    """

    way: str
    at_once: int = 1
    tokens: int = 0
    w_load: str = "rows"
    block: int
    down_block: int
    load_bytes: int = 8192
    banks: int = 6
    split: str = ""

    def plan(self, spec: ExpertsSpec) -> ExpertsPlan:
        """Return what the kernel reads of a core's share."""
        width = spec.n * (2 if self.split == WEIGHTS else 1)
        interleaved = spec.halves == "interleaved"
        both = interleaved or self.block >= spec.n
        slots = {"picks": spec.top_k, "all": spec.groups // self.cores}.get(self.way, self.at_once)
        down = min(tiles(self.tokens, 128), self.banks)
        w_load = "rows" if spec.weight_layout == "row" else self.w_load

        def weight(k: int, n: int, block: int, halves: int, order: str, down: int = 1) -> Weight:
            columns = min(block, 128 * tiles(n, 128))
            row_bytes = columns * item_bytes(spec.dtype) * halves
            return Weight(
                k=k, n=n, layout=spec.weight_layout, ahead=True, order=order,
                load=w_load, block=columns, group=self.banks // down, down=down,
                chunk=chunk_rows(k, row_bytes, self.load_bytes),
            )  # fmt: skip

        return ExpertsPlan(
            m=spec.m, k=spec.k, n=spec.n, width=width, count=spec.groups, top_k=spec.top_k,
            way=self.way, at_once=slots, stack=self.stack(spec, slots),
            tokens=self.tokens, blocks=self.most_blocks(spec),
            up=weight(spec.k, spec.n, self.block, 2 if both else 1, ORDERS[w_load != "rows"]),
            down=weight(spec.n, spec.k, self.down_block, 1, ORDERS[1], max(1, down)),
            down_bias=Weight(k=1 if spec.down_bias else 0, ahead=True),
            has_up_bias=spec.gate_up_bias,
            step=2 if interleaved else 1, up_first=0 if interleaved else width,
            activation=spec.activation, op=OPS[spec.activation], split=self.split,
            limit=spec.limit, slope=spec.slope, plus=spec.plus,
        )  # fmt: skip

    @property
    def cores(self) -> int:
        """Cores that take turns of the loop."""
        return 2 if self.split == GROUPS else 1

    def stack(self, spec: ExpertsSpec, slots: int) -> int:
        """Return how many groups of a turn are computed as one of at most 128 features."""
        plain = not (spec.limit or spec.gate_up_bias or spec.down_bias)
        if self.way == "blocks" or self.split == WEIGHTS or not plain:
            return 1
        if spec.halves != "joined" or spec.weight_layout != "row" or spec.activation == "identity":
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
        deep, wide = tiles(spec.k, 128), tiles(spec.n, 128)
        up = deep * 2 * made.up.block * size
        down = wide * made.down.block * size
        more = 2 * up if made.up_panels > 1 else up
        behind = 2 * down if made.down_panels > 1 else down
        if made.stack > 1:
            more = made.at_once * deep * 2 * spec.n * size
            behind = made.at_once // made.stack * spec.k * size
            up = down = 0
            more += behind
        held = {
            "panels": max(more, up + down, behind),
            "h": 2 * wide * m * size,
            "products": 4 * m * (4 * tiles(made.up.block, 128) + 2 * tiles(made.down.block, 128)),
            "biases": 2 * (4 * (2 * wide + deep) + 1024) * (spec.gate_up_bias or spec.down_bias),
        }  # fmt: skip
        if self.way != "blocks":
            return held | {
                "x": (deep * m + spec.k) * size, "y": 4 * deep * m * (2 if self.split else 1),
                "rows": spec.k * size,
                "picks": 4 * m * spec.top_k * 6 + 8 * spec.groups + 8 * m,
            }  # fmt: skip
        picks, groups = min(spec.m, TOKENS) * spec.top_k, tiles(spec.groups, 128)
        held |= {
            "x": 2 * (deep * m + made.token_tiles * spec.k) * size,
            "rows": 2 * size * min(made.down.block, 512 * made.down.group) * made.down.down,
            "bias row": 2 * (made.down.block + m) * size * spec.down_bias,
        }  # fmt: skip
        sorting = {
            "picks": 4 * (8 * picks + tiles(spec.m, 128) * spec.top_k + 16 * groups),
            "blocks": 4 * (made.blocks * (4 + made.token_tiles) + 2 * m),
            "sums": (4 + 3 * size) * spec.k,
        }  # fmt: skip
        stages = {"sorted": 4 * made.blocks * made.token_tiles} | held, sorting
        return max(stages, key=lambda held: sum(held.values()))

    def check(self, spec: ExpertsSpec, target: Target) -> None:
        """Raise CapacityError or SpecError, with numbers, unless legal for spec and target."""
        part = spec.share(self.split)
        check_name("way", self.way, WAYS)
        check_name("w_load", self.w_load, ("tensor" if spec.weight_layout == "col" else "rows",))
        if (self.way == "picks") != (spec.m == 1) or self.at_once not in AT_ONCE:
            raise SpecError(
                f"schedule: way {self.way!r}, {self.at_once} at once, for {spec.m} tokens; one "
                "token has 'picks', several 'distinct' groups, 'all' or 'blocks', 1, 2, 4 or 8 at "
                "once"
            )
        if self.way != "blocks" and (self.tokens or spec.m > TOKENS):
            raise SpecError(
                f"schedule: way {self.way!r}, blocks of {self.tokens}, for {spec.m} tokens; more "
                f"than {TOKENS} tokens have 'blocks', and no other way has tokens of a block"
            )
        if self.way == "blocks":
            self._check_blocks(part, target)
        if self.way == "all" and spec.groups % self.cores:
            raise SpecError(f"{spec.short()}: two cores cannot share {spec.groups} groups evenly")
        for name in ("block", "down_block"):
            if getattr(self, name) < 1 or getattr(self, name) % 128:
                raise SpecError(f"schedule: {name} is {getattr(self, name)}; pass multiples of 128")
        if not 1 <= self.banks <= target.psum_banks - 2:
            raise CapacityError(
                f"{spec.short()}: {self.banks} PSUM banks for sums, and two for what TensorE "
                f"turns; {target.name} has {target.psum_banks}, lower banks"
            )
        self.check_sbuf(spec.short(), part, target, f"lower block from {self.block}")

    def _check_blocks(self, spec: ExpertsSpec, target: Target) -> None:
        """Raise CapacityError or SpecError unless the lists of all blocks fit into PSUM."""
        if self.tokens not in BLOCKS or spec.m <= FEW:
            raise SpecError(
                f"schedule: blocks of {self.tokens} for {spec.m} tokens; pass tokens as one of "
                f"{BLOCKS}, for more than {FEW} tokens"
            )
        banks = tiles(self.tokens, 128) * tiles(self.most_blocks(spec), 512)
        if banks > target.psum_banks - 2:
            raise CapacityError(
                f"{spec.short()}: the tokens of {self.most_blocks(spec)} blocks of {self.tokens} "
                f"take {banks} PSUM banks, and {target.name} has {target.psum_banks - 2} for them; "
                "split the tokens"
            )

    def turns(self, spec: ExpertsSpec) -> int | None:
        """Return the expected turns of the loop whose bound the device computes."""
        turn = self.at_once * self.cores
        if self.way == "blocks":
            return tiles(round(self.expected_blocks(spec)), turn)
        return tiles(round(spec.expected), turn) if self.way == "distinct" else None

    def expected_blocks(self, spec: ExpertsSpec) -> float:
        """Return the blocks that tokens are expected to need: half of a last block is empty."""
        each = spec.m * spec.top_k / spec.expected
        return spec.expected * max(1.0, each / self.tokens + 0.5)

    def short(self) -> str:
        """Return the axes in a few words, for tables."""
        blocks = f" of {self.tokens}" if self.tokens else ""
        words = [f"{self.way}{self.at_once}{blocks} n{self.block} k{self.down_block}"]
        words += [f"{self.load_bytes}B", f"w-{self.w_load}", self.split]
        return " ".join(word for word in words if word)


def candidates(spec: ExpertsSpec, target: Target) -> Iterator[ExpertsSchedule]:
    """Yield schedules that may be legal, about 60."""
    ways = _ways(spec)
    col = spec.weight_layout == "col"
    w_load = "tensor" if col else "rows"  # an address of the device has no DMA transpose for it
    blocks, downs = _sizes(spec.n, (2048, 1024, 512)), _sizes(spec.k, (4096, 2048, 1024, 512))
    for (way, at_once, tokens), block, down_block, load_bytes in itertools.product(
        ways, blocks, downs, (8192, 4096)
    ):
        if way == "distinct" and load_bytes < 8192:
            continue  # sizes of panels, and groups a turn, matter more
        yield ExpertsSchedule(
            way=way, at_once=at_once, tokens=tokens, w_load=w_load, block=block,
            down_block=down_block, load_bytes=load_bytes, banks=target.psum_banks - 2,
        )  # fmt: skip


def _ways(spec: ExpertsSpec) -> list[tuple[str, int, int]]:
    """Return ways, what they take a turn, and the tokens of their blocks."""
    if spec.m == 1:
        return [("picks", 1, 0)]
    picks = spec.m * spec.top_k
    ways = []
    if spec.m <= TOKENS:
        ways.append(("all", 1, 0))
        if picks < 3 * spec.groups or spec.groups % 2:
            ways += [("distinct", at_once, 0) for at_once in (4, 2, 1, 8)]
    if spec.m > FEW:
        each = picks / spec.expected
        sizes = [size for size in BLOCKS if size >= each / 2][:3] or BLOCKS[-1:]
        ways += [("blocks", at_once, size) for size in sizes for at_once in (4, 2, 1, 8)]
    return ways


def _sizes(whole: int, steps: tuple[int, ...]) -> list[int]:
    """Return the steps, those above the whole as the whole in tiles of 128."""
    return list(dict.fromkeys(min(step, 128 * tiles(whole, 128)) for step in steps))


def work(spec: ExpertsSpec, schedule: ExpertsSchedule) -> Work:
    """Return the passes, reads of PSUM and DMAs of a kernel, or of one of two cores."""
    made, tally, size = schedule.plan(spec), Tally(), item_bytes(spec.dtype)
    expected = (schedule.turns(spec) or 1) * schedule.at_once
    groups = expected if schedule.turns(spec) else made.at_once
    few = schedule.tokens or spec.m
    for weight, count in ((made.up, 2), (made.down, 1)):
        columns = min(weight.block, weight.n)
        loads = groups * count * tiles(weight.k, weight.chunk) * tiles(weight.n, columns)
        squares = groups * count * tiles(weight.k, 128) * tiles(weight.n, 128) // made.stack
        total = groups * count * weight.k * weight.n * size
        turned = squares, loads * tiles(columns, 128), min(weight.chunk, weight.k) * size
        tally.load(weight.load, total, loads, columns * size, turned)
        tally.matmuls.append((squares, max(64, few)))
        tally.evictions.append((groups * count * tiles(weight.n, 128), few))
    if schedule.way == "blocks":
        _sorting(tally, spec, made, groups)
    edges = schedule.turns(spec) or 0
    tally.dmas.append((1 + edges, 2 * made.up.block, made.up.block, "copy"))
    tally.store(spec.m * spec.k * size, 1, spec.k * size)
    last = tiles(made.down.block, 128) * tiles(spec.n, 128)
    return tally.work(
        lead_bytes=made.up.chunk * made.up.block * size * (1 + 8 * edges),
        # no load hides the last panel of down in a turn of the loop
        tail_matmuls=(last * (1 + edges), max(64, few)),
        tail_bytes=spec.m * spec.k * size,
    )


def _sorting(tally: Tally, spec: ExpertsSpec, made: ExpertsPlan, blocks: int) -> None:
    """Add what sorting, gathering, and adding the rows of all picks take."""
    picks, size = tiles(spec.m, 128) * spec.top_k, item_bytes(spec.dtype)
    tally.wide_matmuls.append((picks * made.token_tiles * tiles(made.blocks, 512), made.blocks))
    tally.evictions.append((2 * picks, made.blocks))
    rows = blocks * made.tokens
    tally.store(rows * spec.k * size, blocks * made.token_tiles, spec.k * size)
    tally.store(rows * spec.k * size, blocks * made.token_tiles, spec.k * size)
    tally.store(picks * 128 * spec.k * size, picks, spec.k * size)
    tally.evictions.append((picks * tiles(spec.k, 512), 512))


def data_flow(spec: ExpertsSpec, schedule: ExpertsSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    which = {
        "picks": "the picks of the token, one after another",
        "all": "every group, one after another",
        "distinct": f"the groups that tokens chose, {schedule.at_once} a turn of a loop",
        "blocks": f"blocks of {schedule.tokens} tokens, {schedule.at_once} a turn of a loop",
    }[schedule.way]
    takes = "sorted by group" if schedule.tokens else "each takes all tokens, gates of 0 leave out"
    stack = schedule.plan(spec).stack
    weights = (
        f"{schedule.block} outputs of gate and up, then {schedule.down_block} of down at a time, "
        "each loaded before the products of the panel before it"
    )
    if stack > 1:
        weights = f"all of a turn's groups first; {stack} groups are one product of all features"
    return (
        f"groups: {which}; {takes}.",
        "x^T, h^T and y^T have features on the partitions: weights stationary, tokens moving.",
        f"weights: {weights}.",
    )


EXPERTS = Family(
    spec_class=ExpertsSpec,
    schedule_class=ExpertsSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
