"""The enumerations of `nki.isa`."""

from __future__ import annotations

from enum import Enum, IntEnum


class Member(Enum):
    """A member of an enumeration, hashed by its identity: Enum hashes by Python code."""

    __hash__ = object.__hash__


class engine(Member):  # noqa: N801  (the name NKI gives it)
    """Engines of a NeuronCore."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Member):  # noqa: N801
    """What an instruction does with the accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Member):  # noqa: N801
    """Who makes DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Member):  # noqa: N801
    """What an out-of-bounds runtime index does."""

    error = 0
    skip = 1


class matmul_perf_mode(Member):  # noqa: N801
    """TensorE performance mode."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):  # noqa: N801
    """NeuronCore generations; they compare as numbers."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Member):  # noqa: N801
    """DMA transfer mechanism of sendrecv."""

    dma = 1
    gpsimd_dma = 2
