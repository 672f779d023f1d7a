"""A small hand for writing traces in tests: tensors, slices and a few instructions."""

import dataclasses
import functools
import operator
import re

import pytest

from nmm_compiler import targets
from nmm_compiler.simulator.tensors.geometry import contiguous_run, walk_pattern
from nmm_compiler.simulator.timing.profile import profile_traces
from nmm_compiler.simulator.timing.schedule import time_trace
from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e4m3fn_x4": 4,
        "int32": 4, "uint16": 2}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    storage: int
    memory: str
    shape: tuple[int, int]
    dtype: str

    def __getitem__(self, key):
        rows, columns = (range(n)[k] for k, n in zip(key, self.shape, strict=True))
        item, memory = ITEM[self.dtype], self.memory
        start, stop = columns[0] * item, (columns[-1] + 1) * item
        place, sizes, strides = (rows.start, rows.stop), (len(columns),), (columns.step,)
        if memory == "hbm":
            width, place = self.shape[1] * item, (0, 1)
            start, stop = rows[0] * width + start, rows[-1] * width + stop
            sizes, strides = (len(rows), *sizes), (self.shape[1] * rows.step, *strides)
        pattern, extent = walk_pattern(tuple(zip(sizes, strides, strict=True)), item)
        region = pattern, self.dtype, item, contiguous_run(pattern, item) >= extent
        return Access(self.storage, memory, *place, start, stop, *region)

    @property
    def all(self):
        return self[:, :]


class Builder:
    """Collects a trace; `tensor` allocates, the others append one instruction."""

    def __init__(self):
        self.trace = Trace()

    def tensor(self, memory, rows, columns, dtype="float32"):
        storage = len(self.trace.allocations) + 1
        per_row = columns * ITEM[dtype]
        size = per_row * rows if memory == "hbm" else per_row
        self.trace.allocations[storage] = Allocation(
            f"t{storage}", memory, (rows, columns), dtype, size, -1, -1, 1
        )
        return Tensor(storage, memory, (rows, columns), dtype)

    def add(self, op, engine, writes, reads=(), /, **attributes):
        index = len(self.trace.instructions)
        operands = tuple(reads), tuple(writes)
        self.trace.instructions.append(
            Instruction(op, engine, *operands, attributes, "kernel.py", index + 1)
        )
        self.trace.instructions[-1].index = index
        for access in (*writes, *reads):
            self.trace.allocations[access.storage].last_index = index
        for access in writes:
            self.trace.allocations[access.storage].last_write = index
        return index

    def matmul(self, dst, stationary, moving, **attributes):
        return self.add(
            "nc_matmul",
            "tensor",
            [dst],
            [stationary, moving],
            k=stationary.partitions,
            m=stationary.elements_per_partition,
            n=moving.elements_per_partition,
            **attributes,
        )


COMPARE = {"=": lambda a, b: a == pytest.approx(b), ">=": operator.ge, "<": operator.lt}


class Scene:
    """A trace from text, and the times of its named instructions.

    A scene declares tensors (`sbuf tile out 128x512 bfloat16`) and then lists instructions:
    engine, result, sources, `key=value` attributes, and a name where an expectation speaks of it
    (`late: vector out tile`). `at tile 0,1024` gives a tensor a manual address, `edge` ends a turn
    of a loop on the device, `in order` keeps program order, `waits late early` is `depends_on`,
    `banks 9` is the peak of PSUM that a run found.

    An expectation compares the start of an instruction with times in microseconds: `.end` is when a
    result is there, `.free` when its engine is, `.issued` when a DMA's queue is; 521/2400 is 521
    cycles at 2.4 GHz.
    """

    def __init__(self, text):
        self.builder, self.tensors, self.names = Builder(), {}, {}
        self.trace = self.builder.trace
        for line in filter(None, map(str.strip, text.splitlines())):
            self.add(line)

    def add(self, line):
        name, _, rest = line.rpartition(": ")
        kind, *words = rest.split()
        trace = self.trace
        if kind in ("hbm", "sbuf", "psum"):
            at = next(i for i, word in enumerate(words) if re.fullmatch(r"\d+x\d+", word))
            shape = map(int, words[at].split("x"))
            make = functools.partial(self.builder.tensor, kind, *shape, *words[at + 1 :])
            self.tensors.update({tensor: make() for tensor in words[:at]})
        elif kind == "at":
            place = tuple(map(int, words[1].split(",")))
            trace.allocations[self.tensors[words[0]].storage].address = place
        elif kind == "edge":
            trace.turns.append((*[len(trace.instructions)] * 2, range(0), False))
        elif kind == "banks":
            trace.psum_peak_banks = int(words[0])
        elif kind == "in":
            trace.ordered.append((0, len(trace.instructions)))
        elif kind == "waits":
            late, early = (trace.instructions[self.names[word]] for word in words)
            late.depends_on(early)
        else:
            views = [self.view(word) for word in words if "=" not in word]
            pairs = dict(word.split("=") for word in words if "=" in word)
            pairs = {key: int(v) if v.isdigit() else v for key, v in pairs.items()}
            if kind == "tensor" and "op" not in pairs:
                self.names[name] = self.builder.matmul(*views, **pairs)
                return
            op = pairs.pop("op", "dma_copy" if kind == "dma" else "tensor_copy")
            self.names[name] = self.builder.add(op, kind, views[:1], views[1:], **pairs)

    def view(self, word):
        name, _, key = word.partition("[")
        slices = [
            slice(*(int(n) if n else None for n in part.split(":")))
            for part in (key.rstrip("]") or ":,:").split(",")
        ]
        return self.tensors[name][tuple(slices)]

    def holds(self, timeline, expectation):
        left, sign, right = re.split(r" (=|>=|<) ", expectation.strip())
        sums = [sum(self.time(timeline, part) for part in side.split(" + ")) for side in
                (left, right)]  # fmt: skip
        return COMPARE[sign](*sums)

    def time(self, timeline, term):
        if re.fullmatch(r"[\d./]+", term):
            top, _, bottom = term.partition("/")
            return float(top) / float(bottom or 1)
        name, _, what = term.partition(".")
        index = self.names[name]
        if what == "issued":
            return timeline.bookings[index][0].stop
        times = {"": starts(timeline), "end": timeline.end, "free": stops(timeline)}
        return times[what][index]


TRN1, TRN2 = (targets.get(name) for name in ("trn1", "trn2"))
STEADY = dataclasses.replace(TRN2, tensor_ramp_seconds=0.0)  # trn2 without the clock ramp


def profile_trace(trace, target):
    return profile_traces([trace], target)[0]


def transfers(timeline):
    """Return {index: bookings} of the DMAs: the queue, then the DMA engines."""
    return {held[0].index: held for held in timeline.bookings if held[0].kind == "queue"}


def starts(timeline):
    """Return when each instruction starts."""
    return [first.start for first, *_ in timeline.bookings]


def stops(timeline):
    """Return when the engine of each can take the next one; of a DMA, its end."""
    times = zip(timeline.bookings, timeline.end, strict=True)
    return [end if first.kind == "queue" else first.stop for (first, *_), end in times]


def us(cycles, hz):
    return cycles / hz * 1e6


def matmuls(count, n=512, dtype="bfloat16", flags=""):
    product = f"psum out 128x{n}\ntensor out stationary moving {flags}\n"
    return Scene(
        f"sbuf stationary 128x128 {dtype}\nsbuf moving 128x{n} {dtype}\n" + product * count
    ).trace


def load(rows, columns):
    shape = f"{rows}x{columns}"
    return time_trace(Scene(f"hbm a {shape}\nsbuf tile {shape}\ndma tile a").trace, TRN2)


def touched(access):
    """Return every byte of a region, of each of its partitions, one by one."""
    return _bytes(access.byte_start, access.pattern, access.item_bytes)


@functools.lru_cache(512)
def _bytes(start, pattern, item):
    offsets = {0}
    for step, count in pattern:
        offsets = {offset + step * i for offset in offsets for i in range(count)}
    first = start - min(offsets)
    return frozenset(first + offset + byte for offset in offsets for byte in range(item))
