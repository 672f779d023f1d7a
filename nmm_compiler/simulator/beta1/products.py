"""Matrix products of Beta 1: `nisa.nc_matmul` and `nl.matmul`, with masks of their operands."""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.errors import TensorShapeError, UnsupportedInstructionError
from nmm_compiler.simulator.beta1.index import Box, Part, box_of, common_part
from nmm_compiler.simulator.beta1.operands import ISSUE, in_sbuf, nothing, tensor
from nmm_compiler.simulator.beta1.pending import read, result, session
from nmm_compiler.simulator.beta1.tensor import Masked, Tensor, fail
from nmm_compiler.simulator.isa.enums import matmul_perf_mode
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import NkiTensor

Arguments = dict[str, Any]


def _operand(name: str, role: str, value: Any) -> tuple[Tensor, Part]:
    """Return an operand of a matmul, and the part of it that its own mask leaves."""
    if isinstance(value, Masked):
        return value.tile, value.part
    return tensor(name, role, value), True


def product(
    name: str,
    stationary: Any,
    moving: Any,
    mask: Any = None,
    *,
    turned: bool = False,
    **flags: Any,
) -> Tensor:
    """Return stationary.T @ moving in PSUM, float32.

    turned: it is that of an `nl.matmul` that transposes; the trace notes its moving tile.
    mask: of the result. An operand may have one of its own: of the rows that are summed over and
    of its part of the result.
    """
    left, left_part = _operand(name, "stationary", stationary)
    right, right_part = _operand(name, "moving", moving)
    session().flush()
    first = 2 if "perf_mode" in flags else 1  # of the free dimensions; before it, rows
    shape = (math.prod(left.shape[first:]), *right.shape[first:])
    box = box_of(mask, shape)
    kind = left.kind if flags.get("is_transpose") else dtypes.float32
    if box is not True or left_part is not True or right_part is not True:
        parts = _matmul_parts(left, left_part, right, right_part, box, first)
        if parts is None:
            return result(
                shape, kind, nothing, box=False, only=("psum",), exact=True, accumulate=nothing
            )
        left_part, right_part = parts
        out = (left_part[first], *right_part[first:])
        box = True if out == tuple((0, size) for size in shape) else out
    a, b = in_sbuf(read(left, left_part)), in_sbuf(read(right, right_part))
    if turned:
        session().machine.trace.awaited.add(b.storage.identity)

    def issue(dst: NkiTensor) -> None:
        ISSUE["nc_matmul"](dst, a, b, accumulate=False, **flags)

    def add(dst: NkiTensor) -> None:
        ISSUE["nc_matmul"](dst, a, b, **flags)

    return result(shape, kind, issue, box=box, only=("psum",), exact=True, accumulate=add)


def _matmul_parts(
    left: Tensor, left_part: Part, right: Tensor, right_part: Part, box: Part, first: int
) -> tuple[Box, Box] | None:  # fmt: skip
    """Return the parts of stationary and moving that give the part of the result; None for none."""
    if False in (left_part, right_part, box):
        return None
    if len(left.shape) != first + 1:
        raise fail(
            TensorShapeError,
            f"a mask over the columns of {left!r}; index it with {first + 1} dimensions",
        )
    a = left_part if isinstance(left_part, tuple) else tuple((0, size) for size in left.shape)
    b = right_part if isinstance(right_part, tuple) else tuple((0, size) for size in right.shape)
    rows, columns = common_part(a[:first], b[:first]), common_part((*a[first:], *b[first:]), box)
    if not isinstance(rows, tuple) or not isinstance(columns, tuple):
        return None
    return (*rows, columns[0]), (*rows, *columns[1:])


def product_rule(name: str, rule: list[str], given: Arguments) -> Tensor:
    """Return what `nisa.nc_matmul` returns."""
    if given["perf_mode"] is None:
        del given["perf_mode"]
    elif given["perf_mode"] == "double_row_gen3":
        given["perf_mode"] = matmul_perf_mode.double_row
    else:
        raise fail(
            UnsupportedInstructionError,
            f"{name}: perf_mode {given['perf_mode']!r}; the simulator has 'double_row_gen3'",
        )
    return product(name, **given)
