"""Arithmetic of tiles and blocks that all families share, and the checks of a schedule's fields."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import check_name, item_bytes
from nmm_compiler.targets import Target

LOADS = ("rows", "strided", "dma", "tensor")
# One long run per partition, or what transposes produce.
ORDERS = ("consecutive_rows", "strided_rows")

# What each way of loading does, for headers.
LOADED = {
    "rows": "as it lies",
    "strided": "in short runs",
    "dma": "through DMA transposes",
    "tensor": "through TensorE transposes",
}


def tiles(size: int, tile: int) -> int:
    """Return how many tiles cover `size`."""
    return -(-size // tile)


def lay(shape: tuple[int, int], layout: str) -> tuple[int, int]:
    """Return the shape as passed: turned when the layout is "col"."""
    return shape if layout == "row" else (shape[1], shape[0])


def blocks(size: int, steps: tuple[int, ...]) -> list[int]:
    """Return the steps below `size`, then `size` itself rounded up to whole tiles."""
    return [step for step in steps if step < size] + [128 * tiles(size, 128)]


def chunk_rows(rows: int, row_bytes: int, wanted_bytes: int = 8192) -> int:
    """Return contraction rows per load, in whole tiles of 128.

    Each partition gets about `wanted_bytes` at once; the chunks come out equal where they can.
    """
    total = tiles(rows, 128)
    most = max(1, min(16, wanted_bytes // max(row_bytes, 1), total))
    return 128 * tiles(total, tiles(total, most))


def x_rows(m: int, contraction: int, k_chunk: int) -> int:
    """Return contraction rows per load of x: all at once for few tokens, else as the weight's."""
    return 128 * tiles(contraction, 128) if m <= 128 else k_chunk


def turned_loads(dtype: str, target: Target) -> list[str]:
    """Return how an operand can be loaded whose contraction index is the inner one in HBM."""
    if item_bytes(dtype) == 2 and target.dma_transposes:
        return ["dma", "tensor"]
    return ["tensor"]


def x_loads(m: int, layout: str, dtype: str, target: Target) -> list[str]:
    """Return the ways to load x; few tokens come in short runs without a transpose."""
    if layout == "col":
        return ["rows"]
    if m <= 4:
        return ["strided"]
    return (["strided"] if m <= 32 else []) + turned_loads(dtype, target)


def check_blocks(schedule: Any, sizes: Mapping[str, int], groups: tuple[str, ...]) -> None:
    """Raise SpecError unless each block is a multiple of 128 or covers its whole size.

    sizes: field of the schedule -> the size that it divides. groups: fields of at least 1.
    """
    for name, whole in sizes.items():
        value = attrgetter(name)(schedule)
        if value < 1 or (value % 128 and value < whole):
            raise SpecError(
                f"schedule: {name} is {value}; pass a multiple of 128, or at least the whole "
                f"{whole}"
            )
    for name in groups:
        if attrgetter(name)(schedule) < 1:
            value = attrgetter(name)(schedule)
            raise SpecError(f"schedule: {name} is {value}; pass at least 1")


def check_load(
    name: str, how: str, lies_right: bool, dtype: str, target: Target, *, strided: bool = False
) -> None:
    """Raise SpecError unless `how` can load an operand.

    lies_right: its contraction index is already the outer one in HBM. strided: short runs allowed.
    """
    check_name(name, how, LOADS)
    allowed = ["rows"] if lies_right else turned_loads(dtype, target)
    if strided and not lies_right:
        allowed.append("strided")
    if how not in allowed:
        why = "as the operand lies" if lies_right else f"for {dtype} on {target.name}"
        raise SpecError(f"schedule: {name} is {how!r}; {why} it can be {' or '.join(allowed)}")


def chunk_order(contraction: int, loads: tuple[str, ...]) -> str:
    """Return the order with long runs, where the loads allow it and it makes a difference."""
    runs = contraction >= 256 and set(loads) <= {"rows", "strided"}
    return ORDERS[0] if runs else ORDERS[1]


def check_multiple(name: str, value: int, of: str, base: int, whole: int) -> None:
    """Raise SpecError unless `value` is a multiple of `base`, or covers `whole`."""
    if value % base and value < whole:
        raise SpecError(
            f"schedule: {name} is {value}; pass a multiple of {of} = {base}, or at least {whole}"
        )


def check_order(order: str, loads: tuple[str, ...]) -> None:
    """Raise SpecError if the rows of a chunk cannot lie in this order with these loads."""
    check_name("k_order", order, ORDERS)
    if order == ORDERS[0] and not set(loads) <= {"rows", "strided"}:
        raise SpecError(f"schedule: transposes give k_order {ORDERS[1]!r}; use it for both factors")


def check_loop(schedule: Any, m: int, resident: tuple[bool, ...]) -> None:
    """Raise SpecError unless the blocks of tokens can be a loop on the device.

    It needs two whole blocks, and each turn loads what it uses.
    """
    if schedule.m_loop and (m < 2 * schedule.m_block or any(resident)):
        raise SpecError(
            f"schedule: m_loop needs at least two whole blocks of {schedule.m_block} tokens, got "
            f"{m} tokens, and no resident weights; lower m_block or drop what is resident"
        )
