"""A small hand for writing traces in tests: tensors, slices and a few instructions."""

import dataclasses

from nmm_compiler import targets
from nmm_compiler.simulator.timing.timeline import time_trace
from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int32": 4,
        "uint16": 2}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    storage: int
    memory: str
    shape: tuple[int, int]
    dtype: str

    def __getitem__(self, key):
        rows, columns = (k.indices(n) for k, n in zip(key, self.shape, strict=True))
        return region(self, rows, columns)

    @property
    def all(self):
        return self[:, :]


def region(tensor, rows, columns):
    item = ITEM[tensor.dtype]
    (r0, r1, rs), (c0, c1, cs) = rows, columns
    count_r, count_c = len(range(r0, r1, rs)), len(range(c0, c1, cs))
    width = tensor.shape[1] * item
    last_column = c0 + (count_c - 1) * cs
    if tensor.memory == "hbm":
        start = r0 * width + c0 * item
        stop = (r0 + (count_r - 1) * rs) * width + (last_column + 1) * item
        pattern = ((width * rs, count_r), (item * cs, count_c))
        return Access(tensor.storage, "hbm", 0, 1, start, stop, pattern, tensor.dtype, item)
    return Access(
        tensor.storage,
        tensor.memory,
        r0,
        r1,
        c0 * item,
        (last_column + 1) * item,
        ((item * cs, count_c),),
        tensor.dtype,
        item,
    )


class Builder:
    """Collects a trace; `tensor` allocates, the others append one instruction."""

    def __init__(self):
        self.trace = Trace()

    def tensor(self, memory, rows, columns, dtype="float32"):
        storage = len(self.trace.allocations) + 1
        per_row = columns * ITEM[dtype]
        size = per_row * rows if memory == "hbm" else per_row
        self.trace.allocations[storage] = Allocation(
            storage, f"t{storage}", memory, (rows, columns), dtype, size, -1, -1, 1
        )
        return Tensor(storage, memory, (rows, columns), dtype)

    def add(self, op, engine, writes, reads=(), /, **attributes):
        index = len(self.trace.instructions)
        operands = tuple(reads), tuple(writes)
        self.trace.instructions.append(
            Instruction(op, engine, *operands, attributes, "kernel.py", index + 1)
        )
        for access in (*writes, *reads):
            self.trace.allocations[access.storage].last_index = index
        for access in writes:
            self.trace.allocations[access.storage].last_write = index
        return index

    def dma(self, dst, src, **attributes):
        return self.add("dma_copy", "dma", [dst], [src], **attributes)

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

    def copy(self, dst, src, engine="vector"):
        return self.add("tensor_copy", engine, [dst], [src])


TRN1, TRN2, TRN3 = (targets.get(name) for name in ("trn1", "trn2", "trn3"))
STEADY = dataclasses.replace(TRN2, tensor_ramp_seconds=0.0)  # trn2 without the clock ramp


def us(cycles, hz):
    return cycles / hz * 1e6


def matmuls(count, n=512, dtype="bfloat16", m=128, **attributes):
    builder = Builder()
    stationary = builder.tensor("sbuf", 128, m, dtype)
    moving = builder.tensor("sbuf", 128, n, dtype)
    for _ in range(count):
        out = builder.tensor("psum", m, n)
        builder.matmul(out.all, stationary.all, moving.all, **attributes)
    return builder.trace


def load(rows, columns, dtype="float32", target=TRN2, **attributes):
    builder = Builder()
    source = builder.tensor("hbm", rows, columns, dtype)
    tile = builder.tensor("sbuf", rows, columns, dtype)
    builder.dma(tile.all, source.all, **attributes)
    return time_trace(builder.trace, target)
