"""How the gated MLP kernels run: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import OUTPUTS, WEIGHTS, Family
from nmm_compiler.kernels.gated_mlp.added_products import (
    added_bytes,
    added_out_bytes,
    check_added,
    tally_added,
    with_added_products,
)
from nmm_compiler.kernels.gated_mlp.spec import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.moving_tokens import described, moving_bytes, tally_moving
from nmm_compiler.kernels.number_formats import (
    check_widened,
    passes,
    pitch,
    row_modes,
    scale_bytes,
    x_pitch,
)
from nmm_compiler.kernels.schedule import LoopedSchedule, Operand
from nmm_compiler.kernels.tiling import (
    LOADED,
    bias_bytes,
    blocks,
    by_tensor,
    chunk_order,
    chunk_rows,
    flat_bytes,
    free_banks,
    item_bytes,
    moves,
    normed_bytes,
    result_elements,
    result_tiles,
    tally_normed,
    tiles,
    turned_loads,
    turning,
    x_loads,
    x_rows,
)
from nmm_compiler.kernels.work import Tally, Work
from nmm_compiler.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPSchedule(LoopedSchedule):
    """How a gated MLP kernel runs.

    u: how gate_u and up_u arrive; v: the weights that make h; down: down_u; out: the weights that
        make y. All weights are loaded in the same way.
    m_block: tokens whose h^T (or intermediates) stay in SBUF.
    n_segment: rows of down_u summed in PSUM at a time, as k_segment for gate_u and up_u, 0 for all
        of n. Of several segments of h^T one is in SBUF at a time.
    v_added: few tokens move past stationary weights, and their products are added in SBUF.
    """

    u: Operand
    v: Operand
    down: Operand
    out: Operand
    n_segment: int = 0
    v_added: bool = False
    may_aside: ClassVar[tuple[str, ...]] = ("x", "v", "out")
    remedies: ClassVar[Mapping[str, str]] = {
        "x": "m_block", "p": "m_block", "h": "m_block", "p_down": "m_block", "u": "u.block",
        "v": "v.block", "down": "down.block", "out": "out.block",
    }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; v_added only where products are added."""
        return {name: at for name, at in super().to_dict().items() if at or name != "v_added"}

    def sizes(self, spec: GatedMLPUpSpec) -> dict[str, int]:
        """Return field -> the size that it divides."""
        rank = max(1, _rank(spec))
        made = {
            "m_block": spec.m, "u.chunk": spec.k, "x.chunk": spec.k, "u.block": rank,
            "v.block": spec.n, "v.chunk": max(rank, spec.k),
        }  # fmt: skip
        if spec.down:
            down = spec.rank("down") or spec.n
            made |= {"down.block": down, "down.chunk": spec.n, "out.block": spec.k}
            made["out.chunk"] = down
        return made

    def over_k(self, spec: GatedMLPUpSpec) -> tuple[str, ...]:
        """Return how x and the weights are loaded."""
        return (self.x.load, self.v.load)

    def kind(self) -> tuple[Any, ...]:
        """Return the token block and the blocks of u and v."""
        return (self.m_block, self.u.block, self.v.block, self.v_added)

    def settled(self, spec: Any) -> GatedMLPSchedule:
        """Return the schedule as the kernel of `spec` reads it."""
        return dataclasses.replace(super().settled(spec), n_segment=self.segments(spec)[1])

    def segments(self, spec: GatedMLPUpSpec) -> tuple[int, int]:
        """Return rows of u, and of down_u, summed in PSUM at a time."""
        return self.segment(spec), min(self.n_segment or spec.n, spec.n)

    def by_rows(self, spec: GatedMLPUpSpec) -> list[tuple[int, int]]:
        """Return (contraction, outputs) of the last product if its tokens may move instead."""
        if not spec.down or spec.out_layout != "row" or spec.fp8 or spec.down_bias:
            return []
        features = spec.k // 2 if self.split == OUTPUTS else spec.k
        return [(spec.rank("down") or spec.n, features)] if features % 128 == 0 else []

    def sbuf_bytes(self, spec: GatedMLPUpSpec) -> dict[str, int]:
        """Return bytes per partition of each buffer, one copy each."""
        size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
        kept_size = item_bytes(spec.intermediate_dtype)
        wide_size = kept_size if spec.wide else size  # weights that multiply an intermediate
        pairs, kept = self.double_row, self.double_row and spec.requantized
        k_tiles = tiles(spec.k, 128)
        tokens, panel = min(self.m_block, spec.m), min(self.v.block, spec.n)
        kept_row = pitch(tokens, kept) * kept_size
        rank = _rank(spec)
        rows = spec.out_layout == "row"
        k_segment, n_segment = self.segments(spec)
        turned = self.v.load == "dma"
        x_row = x_pitch(tokens, pairs, self.x.load) * item_bytes(spec.x_format)
        held = {"x": k_tiles * x_row, "active": 4 * 512}
        if spec.down or not rows:
            held["active"] = result_elements(panel, tokens, rows=False) * 4
        if rank:
            deep = tiles(self.u.chunk if self.u.stream else k_segment, 128)
            held["u"] = deep * pitch(min(self.u.block, rank), pairs or turned) * size
            held["p"] = sum(tiles(spec.rank(b), 128) for b in ("gate", "up")) * kept_row
        if k_segment < spec.k:
            held["parts"] = tiles(rank, 128) * tokens * 4
        held["v"] = sum(
            tiles(spec.rank(b), 128) * pitch(panel, kept or turned) * wide_size
            if spec.rank(b)
            else k_tiles * pitch(panel, pairs or turned) * size
            for b in ("gate", "up")
        )
        if self.v_added:
            held |= added_bytes(self, spec, pitch(panel, turned) * size)
        out_panel = panel
        if spec.down:
            rank = spec.rank("down")
            out_panel = min(self.out.block, spec.k)
            held["h"] = tiles(n_segment, 128) * kept_row
            if rank:
                deep = tiles(self.down.chunk if self.down.stream else n_segment, 128)
                down_row = pitch(min(self.down.block, rank), kept or turned) * wide_size
                held["down"] = deep * down_row
                held["p_down"] = tiles(rank, 128) * kept_row
                if n_segment < spec.n:
                    held["parts_down"] = tiles(rank, 128) * tokens * 4
            held["out"] = tiles(rank or spec.n, 128) * pitch(out_panel, kept or turned) * wide_size
            if self.v_added:
                held |= added_out_bytes(self, spec, pitch(out_panel, turned) * size)
        if self.split == OUTPUTS and spec.down:
            held["h"] *= 2  # both halves
            held["out"] = 2 * tiles(spec.n, 128) * pitch(out_panel, kept or turned) * wide_size
        if self.split == WEIGHTS:
            strips = sum(tiles(spec.rank(branch), 128) for branch in spec.branches)
            held["halves"] = 2 * strips * tokens * 4
        held["y"] = result_elements(out_panel, tokens, rows=rows) * y_size
        held |= moving_bytes(self.moving_tokens(spec), out_panel, y_size)
        held |= self._epilogue_bytes(spec, y_size) | normed_bytes(spec, tokens, out_panel, y_size)
        if by_tensor(self.x.load, self.v.load):
            chunks = (self.u.chunk, self.x.chunk, self.v.chunk, self.down.chunk, self.out.chunk)
            flat = flat_bytes(spec.x_format, self.x.load)
            flat = max(flat, flat_bytes(spec.dtype, self.x.load, self.v.load))
            held["flat"] = max(chunks) * flat
        return held

    @staticmethod
    def _epilogue_bytes(spec: GatedMLPUpSpec, y_size: int) -> dict[str, int]:
        """Return bytes per partition of biases, scales, and fp32 tiles on the way to a result."""
        held: dict[str, int] = {}
        steps = int(spec.fp8)  # a tile of the up branch; of biased or scaled rows one more
        for branch in spec.branches:
            features, along = spec.ends(branch)[1], spec.out_layout == "row"
            along = along and (branch == "down" or not spec.down)
            if getattr(spec, f"{branch}_bias"):
                held[f"{branch} bias"] = bias_bytes(features, y_size, rows=along)
                steps += 1
            if spec.fp8:
                held[f"{branch} scale"] = scale_bytes(features, spec.scales, down=not along)
                held[f"{branch} scale"] += scale_bytes(spec.rank(branch), spec.scales, down=True)
                steps += spec.scales == "channel" and along
        if spec.requantized:
            steps += 2
        return held | {"sum": 4 * 512 * steps} if steps else held

    def overlapped_bytes(self, spec: GatedMLPUpSpec) -> int:
        """Return bytes per partition with a second copy of what streams, so that loads overlap.

        The most of three times: x u is made, then h, then what h is multiplied with. The next
        block's x may arrive in all of them.
        """
        held = self.sbuf_bytes(spec)
        kept = ("h",) if self.segments(spec)[1] == spec.n else ("h", "h")
        twice = ("v", "down", "active", "sum")
        dense = () if (spec.rank("gate") and spec.rank("up")) or spec.m > self.m_block else ("x",)
        times = (
            ("x", "u", "u", "p", "parts", "norm"),
            (*dense, "p", "p_down", "parts_down", *kept, *twice, *twice),
            ("h", "p_down", "out", "out", "residual", "residual"),
        )
        last = 2 if spec.down else 1
        always = [name for name in held if name.endswith("bias")] + ["flat", "flat"]
        if spec.m > self.m_block:
            always.append("x")
        return max(
            sum(
                held.get(name, 0) for name in (*names, *always, *(["y", "y"] if at == last else []))
            )
            for at, names in enumerate(times)
        )

    def psum_banks(self, spec: GatedMLPUpSpec) -> dict[str, int]:
        """Return PSUM banks in use for each group of sums."""
        m_tiles = tiles(min(self.m_block, spec.m), 512)
        rows = spec.out_layout == "row"
        more = turning(self.v.load)
        banks = {
            "u.group": self.u.group * m_tiles + more,
            "v.group": 2 * self.v.group * (1 if rows and not spec.down else m_tiles) + more,
        }
        if spec.down:
            banks["down.group"] = self.down.group * m_tiles + more
            banks["out.group"] = self.out.group * (1 if rows else m_tiles) + more
        return banks

    def check_own(self, spec: GatedMLPUpSpec, target: Target) -> None:
        """Raise SpecError for the rules that only gated MLPs have."""
        super().check_own(spec, target)
        if len({self.u.load, self.v.load, self.down.load, self.out.load}) > 1:
            raise SpecError("schedule: all weights of a gated MLP are loaded alike")
        if any(operand.resident for operand in self.operands().values()):
            raise SpecError(
                "schedule: a gated MLP loads its weights for each block of tokens; drop resident"
            )
        if spec.intermediates():
            check_widened("v.load", self.v.load, spec)
        if self.v_added:
            check_added(self, spec, target)
        self._check_segments(spec)

    def _check_segments(self, spec: GatedMLPUpSpec) -> None:
        """Raise SpecError unless segments hold whole chunks, and panels of h whole segments."""
        self.check_multiple("k_segment", "u.chunk", spec.k)
        if self.m_loop and (self.split == WEIGHTS or (self.split == OUTPUTS and spec.down)):
            raise SpecError(
                f"schedule: split {self.split!r} exchanges values between the cores, which no loop "
                "on the device does; drop m_loop, or split 'tokens'"
            )
        if self.segments(spec)[1] == spec.n:
            return
        if not spec.rank("down"):
            raise SpecError("schedule: n_segment is for a down projection of two factors")
        for name in ("v.block", "down.chunk"):
            self.check_multiple("n_segment", name, spec.n)

    def short(self) -> str:
        """Return the blocks."""
        streams = self.uses("u", "down") + (" double-row" if self.double_row else "")
        cut = self.k_segment or self.n_segment
        segments = f" s{self.k_segment}-{self.n_segment}" if cut else ""
        return (
            f"m{self.m_block}{' loop' if self.m_loop else ''} u{self.u.block} v{self.v.block} "
            f"down{self.down.block} out{self.out.block} k{self.u.chunk} {self.k_order}{segments}"
            f"{streams}{' added' * self.v_added}{f' {self.split}-split' if self.split else ''}"
        )


def _rank(spec: GatedMLPUpSpec) -> int:
    """Return the larger rank of gate and up, 0 when both are dense."""
    return max(spec.rank("gate"), spec.rank("up"))


def candidates(spec: GatedMLPUpSpec, target: Target) -> Iterator[GatedMLPSchedule]:
    """Yield schedules that may be legal, in no order."""
    for plain in _plain(spec, target):
        yield plain
        yield from _segmented(spec, plain, target)
        yield from with_added_products(spec, plain, target)


def _segmented(
    spec: GatedMLPUpSpec, plain: GatedMLPSchedule, target: Target
) -> Iterator[GatedMLPSchedule]:
    """Yield variants of a schedule that sum over segments: of u for few tokens, of h for many."""
    rank = _rank(spec)
    m_tiles = tiles(min(plain.m_block, spec.m), 512)
    banks = free_banks(target, plain.x.load, plain.v.load) // 2  # two groups take turns
    if m_tiles > banks:
        return
    group = max(1, banks // m_tiles)
    twins = [plain]
    if rank > 1024 and spec.m <= 128 and plain.u.block >= rank:
        chunk = tiles(plain.u.chunk, 128)
        segment = 128 * chunk * max(1, 8 // chunk)
        if segment < spec.k:
            twins.append(
                dataclasses.replace(
                    plain,
                    k_segment=segment,
                    u=dataclasses.replace(plain.u, group=group, stream=False),
                )
            )
            yield twins[-1]
    if not spec.rank("down"):
        return
    for twin, wanted in itertools.product(twins, (512, 1024, 2048)):
        block = min(twin.v.block, spec.n)
        if wanted < spec.n and wanted % block == 0 and twin.down.block in (512, 1024):
            yield dataclasses.replace(
                twin,
                n_segment=wanted,
                down=dataclasses.replace(
                    twin.down,
                    chunk=chunk_rows(wanted, twin.down.block * item_bytes(spec.dtype)),
                    group=group,
                    stream=twin.down.block <= 128 * group,
                ),
            )


def _uneven(n_tiles: int) -> list[int]:
    """Return panels of which the last is small, so that little work is left after its load."""
    return [128 * ((n_tiles - 2) // count) for count in (2, 3, 4, 5) if n_tiles >= 4 * count]


def _plain(spec: GatedMLPUpSpec, target: Target) -> Iterator[GatedMLPSchedule]:
    """Yield schedules whose sums stay in PSUM over the whole contraction."""
    size = item_bytes(spec.dtype)
    w_loads = ["rows"] if spec.weight_layout == "row" else turned_loads(spec.dtype, target)
    if spec.wide and spec.intermediates() and w_loads != ["rows"]:
        w_loads = ["tensor"]
    kept = 4 if spec.wide else size
    x_ways = x_loads(spec.m, spec.x_layout, spec.x_format, target)
    rank, down = max(1, _rank(spec)), spec.down
    down_rank = spec.rank("down") or 1
    rows = spec.out_layout == "row"
    uneven = _uneven(tiles(spec.n, 128)) if spec.m <= 128 else []
    for x_load, w_load, m_block in itertools.product(
        x_ways, w_loads, blocks(spec.m, (128, 256, 512, 1024))
    ):
        banks = free_banks(target, w_load)
        m_tiles = tiles(min(m_block, spec.m), 512)
        if 2 * m_tiles > banks:
            continue
        n_tiles_at_once = 1 if rows and not down else m_tiles
        for double_row, u_block, v_block, down_block, out_block in itertools.product(
            row_modes(spec.x_format, target),
            blocks(rank, (256, 512, 1024)),
            blocks(spec.n, (128, 256, 512, 1024, 2048)) + uneven,
            blocks(down_rank, (256, 512, 1024)) if down else [128],
            blocks(spec.k, (128, 512, 1024, 2048)) if down else [128],
        ):
            r_group = min(banks // m_tiles, tiles(u_block, 128))
            down_group = min(banks // m_tiles, tiles(down_block, 128))
            k_chunk = chunk_rows(spec.k, min(u_block, rank) * size)
            yield GatedMLPSchedule(
                x=Operand(load=x_load, chunk=x_rows(spec.m, spec.k, k_chunk)),
                u=Operand(
                    load=w_load, block=u_block, chunk=k_chunk, group=r_group,
                    stream=u_block <= 128 * r_group,
                ),
                v=Operand(
                    load=w_load,
                    block=v_block,
                    chunk=chunk_rows(rank if rank > 1 else spec.k, min(v_block, spec.n) * kept),
                    group=max(
                        1, min(2 if rows and not down else 4, (banks // 2) // n_tiles_at_once)
                    ),
                ),
                down=Operand(  # two loads at least: TensorE begins with the first
                    load=w_load, block=down_block, group=down_group,
                    chunk=min(chunk_rows(spec.n, down_block * kept), 128 * tiles(spec.n, 256)),
                    stream=down_block <= 128 * down_group,
                ),
                out=Operand(
                    load=w_load,
                    block=out_block,
                    chunk=chunk_rows(down_rank if down_rank > 1 else spec.n, out_block * kept),
                    group=4 if rows else max(1, 4 // m_tiles),
                ),
                k_order=chunk_order(spec.k, (x_load, w_load)),
                m_block=m_block,
                double_row=double_row,
            )  # fmt: skip


def data_flow(spec: GatedMLPUpSpec, schedule: GatedMLPSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    tokens = min(schedule.m_block, spec.m)
    factors = [b for b in ("gate", "up") if spec.rank(b)]
    lines = [
        f"x: {LOADED[schedule.x.load]}, read once, {tokens} tokens at a time.",
        f"{' and '.join(factors)}: (x u)^T summed in PSUM over all of k, kept in SBUF."
        if factors
        else "gate and up: dense, x is used as it lies.",
        f"h: gate through {spec.activation} and up through the multiplication, both out of PSUM.",
    ]
    if spec.down:
        lines.append(
            "h^T stays in SBUF, its features on the partitions, as the next product wants."
        )
        how = "(h u)^T, then v" if spec.rank("down") else "one dense weight"
        lines.append(f"down: {how}; y leaves PSUM {spec.out_layout}.")
    else:
        lines.append(f"h leaves for HBM {spec.out_layout}.")
    return (*lines, *described(schedule.moving_tokens(spec)))


def work(spec: GatedMLPUpSpec, schedule: GatedMLPSchedule, target: Target) -> Work:
    """Count the work of the engines; see `Work`."""
    size, y_size = item_bytes(spec.dtype), item_bytes(spec.result_dtype)
    x_size = item_bytes(spec.x_format)
    pairs, kept = schedule.double_row, schedule.double_row and spec.requantized
    m, moving = spec.m, moves(spec.m)[1]
    m_blocks, m_moves = tiles(m, schedule.m_block), tiles(m, 512)
    tokens = min(schedule.m_block, m)
    tally = Tally()
    x_count = tiles(spec.k, schedule.x.chunk) * m_blocks
    x_how = "dma" if schedule.x.load == "dma" else "rows"
    tally.load(x_how, m * spec.k * x_size, x_count, tokens * x_size, (0, 0, 0))

    def weight(rows: int, columns: int, operand: Operand, of_kept: bool) -> None:
        count = tiles(rows, operand.chunk) * tiles(columns, operand.block) * m_blocks
        # a load that widens writes four bytes an element
        moved = 4 if spec.wide and of_kept and schedule.v.load == "rows" else size
        run = min(operand.block, columns) * moved
        squares = tiles(rows, 128) * tiles(columns, 128) * m_blocks
        total = rows * columns * moved * m_blocks
        tally.load(schedule.v.load, total, count, run, (squares, count, run))

    def product(
        rows: int, chunk: int, count: int, columns: int, of_kept: bool, chained: bool = False
    ) -> None:
        if spec.wide and of_kept:
            tally.wide_matmuls.append((tiles(rows, 128) * count, columns))
        else:
            each = passes(rows, chunk, kept if of_kept else pairs)
            into = tally.chained_matmuls if chained else tally.matmuls
            into.append((each * count, columns))

    rows = spec.out_layout == "row"
    for branch in spec.branches:
        rank, (first, last) = spec.rank(branch), spec.ends(branch)
        into_out = branch == "down"
        if rank:
            u = schedule.down if into_out else schedule.u
            weight(first, rank, u, into_out)
            count = tiles(rank, 128) * m_moves
            product(first, u.chunk, count, moving, into_out)
            # sums that are added in SBUF leave PSUM through VectorE alone
            segments = tiles(first, schedule.segments(spec)[into_out])
            tally.evictions.append((count * (2 * segments - 1), moving))
        v = schedule.out if into_out else schedule.v
        of_kept = into_out or bool(rank)
        weight(rank or first, last, v, of_kept)
        by_rows = rows and (into_out or not spec.down)
        moving = schedule.moving_tokens(spec) if by_rows else 0
        tally_moving(tally, moving, tiles(rank or first, 128), last)
        count, columns = result_tiles(m - moving, last, rows=by_rows, panel=v.block)
        # results by rows are summed one at a time; short passes wait for the sum
        if schedule.v_added:
            tally_added(tally, m, first, last, v.block)
            continue
        product(rank or first, v.chunk, count, columns, of_kept, by_rows and columns < 512)
        tally.evictions.append((count, columns))
    features = spec.out_features
    panel = min(schedule.out.block if spec.down else schedule.v.block, features)
    stores = tiles(features, panel) * (tiles(m, 128) if rows else m_blocks)
    store_run = (panel if rows else tokens) * y_size
    tally.store(m * features * y_size, stores, store_run)
    tally_normed(tally, spec, tokens, m_blocks, (stores, store_run))
    return tally.work(
        lead_bytes=tokens * spec.k * x_size,
        tail_matmuls=(tiles(panel, 512), moving),
        tail_bytes=min(m, 128) * panel * y_size,
    )


GATED_MLP_UP = Family(
    spec_class=GatedMLPUpSpec,
    schedule_class=GatedMLPSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
GATED_MLP = dataclasses.replace(GATED_MLP_UP, spec_class=GatedMLPSpec)
