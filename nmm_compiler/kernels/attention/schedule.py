"""How an attention kernel runs: schedule axes, legality, candidates and their work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nmm_compiler.errors import CapacityError
from nmm_compiler.kernels.attention.spec import AttentionSpec
from nmm_compiler.kernels.base import Family, Schedule
from nmm_compiler.kernels.tiling import item_bytes, tiles
from nmm_compiler.kernels.work import Work
from nmm_compiler.targets import Target

_BANK = 512  # fp32 columns of a PSUM bank
_CHUNK = 32  # tiles of keys per load of a decode kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSchedule(Schedule):
    """How an attention kernel runs: TensorE turns keys in rows, for which a DMA takes as long.

    loop: the groups of heads are a loop on the device.
    split: how two cores share the kernel: "heads" or "query_heads"; "" for one core.
    own_queue: stores are issued by the sync engine, so that no load waits behind them, and loads of
        a decode step's keys and values in rows by the scalar engine.
    pack: tiles of keys that one pass of a decode kernel takes, whose heads are 1 / pack of
        TensorE's rows.
    """

    loop: bool = False
    own_queue: bool = False
    pack: int = 1
    split: str = ""

    def in_loop(self, spec: AttentionSpec, target: Target) -> AttentionSchedule:
        """Return the schedule with the groups of heads as a loop on the device."""
        return dataclasses.replace(self, loop=True)

    def loop_turns(self, spec: AttentionSpec) -> list[tuple[int, AttentionSpec]]:
        """Return (how often, spec of one turn) of the loop on the device, if there is one."""
        if not self.loop:
            return [(1, spec)]
        group = dataclasses.replace(spec, batch=1, heads=spec.group, kv_heads=1)
        return [(spec.groups, group)]

    def sbuf_bytes(self, spec: AttentionSpec) -> dict[str, int]:
        """Return bytes per partition of each SBUF buffer, one copy each."""
        size, parts = item_bytes(spec.dtype), spec.parts
        keys = tiles(spec.context, 128)
        if spec.decode:
            chunk = min(_CHUNK, keys)
            turned = chunk * parts * 128 * size if spec.k_layout == "row" else 0
            columns = spec.columns * (1 if self.loop else spec.at_once)
            loaded = chunk * (1 if self.loop else spec.together) * spec.d * size
            queries = (1 + self.pack) * spec.d + parts * self.pack * spec.columns
            return {
                "k": loaded + turned,
                "v": loaded,
                "scores": spec.score_tiles * columns * 4,
                "weights": spec.score_tiles * columns * size,
                "q": queries * size + 512 + 256,  # with ones and identity
                "y": 4 * 4 * spec.d,
            }
        section = min(spec.section, 128 * keys)
        return {
            "k": parts * spec.context * size,
            "v": keys * (spec.d + 1) * size,
            "q": 2 * spec.group * (parts * 128 + spec.d) * size,
            "weights": 4 * section * size + (2 * 4 * section if spec.soft_cap else 0),
            "y": 4 * 4 * (spec.d + 1),
        }

    def check(self, spec: AttentionSpec, target: Target) -> None:
        """Raise CapacityError or SpecError, with numbers, unless legal for spec and target."""
        spec = spec.share(self.split)
        takes = f"decode kernels of {spec.keys} keys in rows, of d {spec.d}, take {spec.pack}"
        self.check_axes({
            "loop": ((False, target.device_loops), f"{target.name} has no loops, drop loop"),
            "pack": ((1, spec.pack), takes),
        })  # fmt: skip
        scores = tiles(min(spec.section, spec.context), _BANK)
        banks = {"scores": 2 * scores, "weights": 2, "sums": 2}
        if spec.decode:
            banks = {"scores": 1, "turned": 1, "maxima": 2, "sums": 2}
        if sum(banks.values()) > target.psum_banks:
            raise CapacityError(
                f"{spec.short()}: {sum(banks.values())} PSUM banks are in use ({banks}), "
                f"{target.name} has {target.psum_banks}"
            )
        remedy = "keys and values of a head stay in SBUF: split the context"
        self.check_sbuf(spec.short(), spec, target, remedy)


def candidates(spec: AttentionSpec, target: Target) -> Iterator[AttentionSchedule]:
    """Yield the one schedule that may be legal."""
    queue = target.dma_generates_descriptors
    # the one dialect of targets without generated descriptors has no views for packs
    yield AttentionSchedule(own_queue=queue, pack=spec.pack if queue else 1)


def data_flow(spec: AttentionSpec, schedule: AttentionSchedule) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    if spec.decode:
        return (
            f"k, v: {128 * _CHUNK} keys at a time, neighbours on a partition.",
            "scores^T: tiles of k stationary, the queries of a group move; all of them in SBUF.",
            "weights^T: exp of scores less their exact maximum.",
            "y^T: tiles of v stationary, weights^T move; turned, divided by the sum of weights.",
        )
    return (
        "q^T, k^T: head size on the partitions, v: keys; loaded once for the heads of a group.",
        f"scores: q stationary, k^T moving; 128 queries x {spec.section} keys in PSUM.",
        "weights: exp while leaving PSUM, under a running maximum; turned on TensorE.",
        "y: weights stationary, v and ones moving; divided by the sum of the weights.",
    )


def work(spec: AttentionSpec, schedule: AttentionSchedule) -> Work:
    """Count the work of the engines; see `Work`. A tile of 128 keys meets the columns of a pass."""
    size, heads, keys = item_bytes(spec.dtype), spec.groups * spec.group, tiles(spec.keys, 128)
    if spec.decode:
        keys, of_set = spec.cache_tiles, 1 if schedule.loop else spec.at_once
        met, columns = spec.groups * tiles(keys, schedule.pack), schedule.pack * spec.columns
        chunk, queries = min(_CHUNK, keys), spec.groups // of_set
        loads = spec.groups * tiles(keys, chunk) // min(of_set, spec.together)
    else:
        rows, columns = tiles(spec.m, 128), 128
        # half of the diagonal ones, and of the window's first, is computed in vain
        seen = tiles(spec.pairs, 128 * 128) + rows * (2 if spec.window else 1)
        met, queries = heads * min(rows * keys, seen), heads * rows
        chunk, loads = 1, spec.groups * tiles(keys, 4)
    row, held = spec.d * size, spec.keys * spec.d * size
    made = Work(
        lead_bytes=min(held, 128 * 4 * chunk * row), tail_matmuls=(2 * spec.parts, columns),
        tail_bytes=columns * row,
    )  # fmt: skip
    # scores, and weighted values; the keys in rows, or the weights, that TensorE turns
    turned = met * spec.parts if spec.k_layout == "row" or not spec.decode else 0
    made.matmuls += [(2 * met * spec.parts, columns), (turned, 128)]
    passes = tiles(met * columns, _BANK) * (6 if spec.soft_cap else 4)
    made.evictions += [
        (passes, _BANK),
        (18 * (loads if spec.decode else spec.groups), 64),
    ]  # maxima, sums, the result
    made.move(2 * spec.groups * held, 2 * loads, chunk * row)
    made.move(2 * heads * spec.m * row, 2 * queries, row)
    return made


ATTENTION = Family(
    spec_class=AttentionSpec,
    schedule_class=AttentionSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
