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
_PACKED = (32, 64)  # head sizes at which a block of partitions may start


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSchedule(Schedule):
    """How an attention kernel runs: TensorE turns keys in rows, for which a DMA takes as long.

    loop: the groups of heads are a loop on the device.
    split: how two cores share the kernel: "heads" or "query_heads"; "" for one core.
    own_queue: stores are issued by the sync engine, so that no load waits behind them.
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
        return [(spec.groups, self.so_many_turns(spec, 1))]

    def so_many_turns(self, spec: AttentionSpec, count: int) -> AttentionSpec:
        """Return the spec of so many groups of heads, each as a sequence of its own."""
        return dataclasses.replace(spec, batch=count, heads=spec.group, kv_heads=1)

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
                "scores": keys * columns * 4,
                "weights": keys * columns * size,
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
        takes = f"decode kernels of {spec.keys} keys in rows, of d {spec.d}, take {packed(spec)}"
        self.check_axes({
            "loop": ((False, target.device_loops), f"{target.name} has no loops, drop loop"),
            "pack": ((1, packed(spec)), takes),
        })  # fmt: skip
        scores = tiles(min(spec.section, spec.context), _BANK)
        banks = {"scores": 2 * scores, "weights": 2, "sums": 2}
        if spec.decode:
            banks = {"scores": 1, "turned": 1, "maxima": 2, "sums": 4}
        if sum(banks.values()) > target.psum_banks:
            raise CapacityError(
                f"{spec.short()}: {sum(banks.values())} PSUM banks are in use ({banks}), "
                f"{target.name} has {target.psum_banks}"
            )
        remedy = "keys and values of a head stay in SBUF: split the context"
        self.check_sbuf(spec.short(), spec, target, remedy)


def packed(spec: AttentionSpec) -> int:
    """Return how many tiles of keys fill TensorE's rows, 1 where a cache has not as many."""
    packs = spec.decode and spec.k_layout == "row" and spec.d in _PACKED
    return 128 // spec.d if packs and spec.keys * spec.d >= 128 * 128 else 1


def candidates(spec: AttentionSpec, target: Target) -> Iterator[AttentionSchedule]:
    """Yield the one schedule that may be legal."""
    queue = target.dma_generates_descriptors
    # the one dialect of targets without generated descriptors has no views for packs
    yield AttentionSchedule(own_queue=queue, pack=packed(spec) if queue else 1)


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
    """Count the work of the engines; see `Work`."""
    size, parts, groups = item_bytes(spec.dtype), spec.parts, spec.groups
    if not spec.decode:
        return _prefill_work(spec, size, parts, groups)
    keys = spec.cache_tiles
    chunk = min(_CHUNK, keys)
    loads = groups * tiles(keys, chunk) // (1 if schedule.loop else spec.together)
    per_chunk = 128 * chunk * spec.d * size * (1 if schedule.loop else spec.together)
    each = spec.columns * spec.d * size
    made = Work(lead_bytes=per_chunk, tail_matmuls=(chunk * parts, 64), tail_bytes=each)
    passes = tiles(keys, schedule.pack)
    made.matmuls.append((2 * groups * passes * parts, schedule.pack * spec.columns))
    made.evictions.append((groups * tiles(keys * spec.columns, _BANK) * 4, _BANK))
    made.evictions.append((groups * 18, 64))  # maxima, sums, the result
    runs = {"row": chunk * spec.d * size, "col": 128 * chunk * size}
    for layout in (spec.k_layout, "row"):
        made.move(loads * per_chunk, loads, runs[layout])
    if spec.k_layout == "row":
        made.matmuls.append((groups * passes * parts, 128))
        made.evictions.append((groups * parts * tiles(passes, 8), _BANK))
    made.move(2 * groups * each, 2 * groups, spec.d * size)
    return made


def _prefill_work(spec: AttentionSpec, size: int, parts: int, groups: int) -> Work:
    heads, q_tiles, keys = groups * spec.group, tiles(spec.m, 128), tiles(spec.context, 128)
    # tiles of 128 queries by 128 keys: half of the diagonal ones, and of the window's first, is
    # computed in vain
    seen = min(q_tiles * keys, tiles(spec.pairs, 128 * 128) + q_tiles * (2 if spec.window else 1))
    made = Work(
        lead_bytes=(min(spec.context, _BANK) + 128) * spec.d * size,
        tail_matmuls=(2 * spec.bank_tiles, 128),
        tail_bytes=min(spec.m, 128) * spec.d * size,
    )
    made.matmuls.append((heads * seen * (1 + parts), 128))
    made.matmuls.append((heads * seen, spec.d + 1))
    passes = 5 if spec.soft_cap else 3
    made.evictions.append((heads * tiles(seen * 128, spec.section) * passes, spec.section))
    how = "tensor" if spec.k_layout == "row" else "rows"
    for load, count, each in (
        ("tensor", heads * q_tiles, 128),
        (how, groups * tiles(spec.context, _BANK), min(_BANK, spec.context)),
    ):
        turned = count * parts * tiles(each, 128), count, spec.d * size
        made.load(load, count * each * spec.d * size, count, spec.d * size, turned)
    v_bytes = groups * spec.context * spec.d * size
    made.move(v_bytes, groups * tiles(spec.context, _BANK), spec.d * size)
    made.move(heads * spec.m * spec.d * size, heads * q_tiles, spec.d * size)
    return made


ATTENTION = Family(
    spec_class=AttentionSpec,
    schedule_class=AttentionSchedule,
    candidates=candidates,
    work=work,
    data_flow=data_flow,
)
