"""The enumerations of `nki.isa`."""

from __future__ import annotations

from enum import Enum, IntEnum


class Member(Enum):
    """A member of an enumeration, hashed by its identity: Enum hashes by Python code."""

    __hash__ = object.__hash__


class engine(Member):  # noqa: N801  (the name NKI gives it)
    """Engines of a NeuronCore."""

    tensor, vector, scalar, gpsimd, dma, sync, unknown = 1, 5, 2, 3, 4, 6, 0


class reduce_cmd(Member):  # noqa: N801
    """What an instruction does with the accumulator registers."""

    idle, reset, reduce, reset_reduce, load_reduce = range(5)


class dge_mode(Member):  # noqa: N801
    """Who makes DMA descriptors."""

    unknown, swdge, hwdge, none = range(4)


class oob_mode(Member):  # noqa: N801
    """What an out-of-bounds runtime index does."""

    error, skip = range(2)


class matmul_perf_mode(Member):  # noqa: N801
    """TensorE performance mode."""

    none, double_row = "none", "double_row"


class nc_version(IntEnum):  # noqa: N801
    """NeuronCore generations; they compare as numbers."""

    gen2, gen3, gen4 = range(2, 5)


class dma_engine(Member):  # noqa: N801
    """DMA transfer mechanism of sendrecv."""

    dma, gpsimd_dma = range(1, 3)
