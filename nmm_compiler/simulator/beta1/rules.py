"""The rules for the tile that an instruction of Beta 1 returns, by the names in its table.

A rule takes the bound arguments and returns the tile's shape and dtype, and which instruction of
the simulator fills it. A mask cuts an instruction to a box, and the instruction runs on that box of
all its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.beta1.index import Index, Mask, Part, box_of
from nmm_compiler.simulator.beta1.operands import (
    ISSUE,
    at_equal_partitions,
    in_float32,
    in_sbuf,
    nothing,
    operand,
    rows_of,
    tensor,
)
from nmm_compiler.simulator.beta1.pending import (
    as_number,
    read,
    result,
    session,
    stretched,
)
from nmm_compiler.simulator.beta1.products import Arguments, product_rule
from nmm_compiler.simulator.beta1.promotion import promote
from nmm_compiler.simulator.beta1.tensor import Tensor, fail, kind_of
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.language import math as language_math
from nmm_compiler.simulator.language.base import ndarray, psum, sbuf, shared_identity_matrix
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import NkiTensor

# Rules: what a call returns


def _common_shape(name: str, tiles: list[Tensor]) -> tuple[int, ...]:
    rank = max(len(t.shape) for t in tiles)
    shape = [1] * rank
    for tile in tiles:
        if len(tile.shape) != rank:
            continue
        for d, size in enumerate(tile.shape):
            if size != 1 and shape[d] not in (1, size):
                kind = "partitions (err_num_partition_mismatch)" if d == 0 else "shapes"
                raise fail(
                    TensorShapeError,
                    f"{name}: {' and '.join(map(repr, tiles))} have different {kind}",
                )
            shape[d] = max(shape[d], size)
    return tuple(shape)


def like(name: str, rule: list[str], given: Arguments, exact: bool = False) -> Tensor:
    """Return a tile of the operands' common shape and promoted dtype."""
    mask, dtype = given.pop("mask"), given.pop("dtype")
    tiles = [tensor(name, role, given[role]) for role in rule]
    shape = _common_shape(name, tiles)
    kind = tiles[0].kind
    for tile in tiles[1:]:
        kind = promote(kind, tile.kind)
    if dtype is not None:
        kind = kind_of(dtype)
    session().flush()
    box = box_of(mask, shape)
    if box is False:
        return result(shape, kind, nothing, box=False)
    for role, value in given.items():
        if role in rule:
            given[role] = stretched(value, shape, name, box)
        else:
            given[role] = operand(name, role, value, box)
    if len(rule) == 2:
        first, second = rule
        given[first], given[second] = at_equal_partitions(given[first], given[second])
    for role in ("operand0", "operand1"):
        if isinstance(given.get(role), NkiTensor) and role not in rule:
            given[role] = in_float32(given[role])
    if isinstance(given.get("scale"), NkiTensor) and name.startswith("nisa.activation"):
        given["scale"] = in_float32(given["scale"])
    issue = ISSUE[name.removeprefix("nisa.").removesuffix("_dynamic_src")]
    return result(shape, kind, lambda dst: issue(dst, **given), box=box, exact=exact)


def _moved(name: str, rule: list[str], given: Arguments) -> Tensor:
    return like(name, rule, given, exact=given["dtype"] is None)


def _reduced_shape(shape: tuple[int, ...], axis: Any, keepdims: bool) -> tuple[int, ...]:
    axes = [axis] if isinstance(axis, (int, np.integer)) else list(axis)
    axes = [int(a) + len(shape) if a < 0 else int(a) for a in axes]
    if keepdims:
        return tuple(1 if d in axes else s for d, s in enumerate(shape))
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _last(name: str, view: NkiTensor, axis: Any) -> tuple[NkiTensor, tuple[int, ...]]:
    """Return the view with the reduced free axes last, and their places there."""
    rank = len(view.shape)
    axes = sorted(a + rank if a < 0 else a for a in ([axis] if isinstance(axis, int) else axis))
    if not axes or axes[0] < 1 or axes[-1] >= rank:
        raise fail(
            TensorShapeError,
            f"{name}: axis {axis} of a tile {view.shape}; reduce free axes, 1 to {rank - 1} "
            "(partitions: nisa.tensor_partition_reduce)",
        )
    order = [d for d in range(rank) if d not in axes] + axes
    moved = view if order == list(range(rank)) else view.permute(order)
    return moved, tuple(range(rank - len(axes), rank))


def _reduced(name: str, rule: list[str], given: Arguments) -> Tensor:
    mask, dtype = given.pop("mask"), given.pop("dtype")
    data = tensor(name, "data", given["data"])
    axis = given["axis"]
    given["axis"] = axis = int(axis) if isinstance(axis, (int, np.integer)) else tuple(axis)
    shape = _reduced_shape(data.shape, axis, given["keepdims"])
    kind = data.kind if dtype is None else kind_of(dtype)
    session().flush()
    box = box_of(mask, data.shape)
    if box is False:
        return result(shape, kind, nothing, box=False)
    given["data"], given["axis"] = _last(name, read(data, box), axis)
    out: Part = True
    if isinstance(box, tuple):
        out = tuple(
            (a, b) if d < len(box) and size == data.shape[d] and d == 0 else (0, size)
            for d, (size, (a, b)) in enumerate(zip(shape, (*box, (0, 1)), strict=False))
        )
    issue = ISSUE["tensor_reduce"]
    return result(shape, kind, lambda dst: issue(dst, **given), box=out)


def _columns(name: str, rule: list[str], given: Arguments) -> Tensor:
    """Return (partitions, n): bn_stats, bn_aggr, max8, nc_find_index8."""
    mask, dtype = given.pop("mask"), given.pop("dtype")
    count, kind_name = int(rule[0]), rule[1:]
    role = "data" if "data" in given else "src"
    data = tensor(name, role, given[role])
    kind = kind_of(kind_name[0]) if kind_name else data.kind
    kind = kind if dtype is None else kind_of(dtype)
    shape = (data.shape[0], count)
    session().flush()
    box = box_of(mask, data.shape)
    if box is False:
        return result(shape, kind, nothing, box=False)
    rows = rows_of(box)
    views = {r: operand(name, r, v, box) if r != role else read(v, box) for r, v in given.items()}
    issue = ISSUE[name.removeprefix("nisa.")]
    out: Part = True if rows is None else (rows, (0, count))
    return result(shape, kind, lambda dst: issue(dst, **views), box=out)


def _row(name: str, rule: list[str], given: Arguments) -> Tensor:
    """Return (1, ...): tensor_partition_reduce."""
    no_mask(name, given)
    dtype = given.pop("dtype")
    data = tensor(name, "data", given["data"])
    kind = data.kind if dtype is None else kind_of(dtype)
    session().flush()
    view = in_sbuf(read(data))
    return result(
        (1, *data.shape[1:]), kind,
        lambda dst: ISSUE["tensor_partition_reduce"](dst, given["op"], view), only=("sbuf",),
    )  # fmt: skip


def _bounds(name: str, rule: list[str], given: Arguments) -> Tensor:
    """Return (1, 2, n): sequence_bounds."""
    dtype = given.pop("dtype")
    ids = tensor(name, "segment_ids", given["segment_ids"])
    kind = ids.kind if dtype is None else kind_of(dtype)
    session().flush()
    view = read(ids)
    return result(
        (ids.shape[0], 2, view.free_size), kind,
        lambda dst: ISSUE["sequence_bounds"](dst, view), only=("sbuf",),
    )  # fmt: skip


def _gathered(name: str, rule: list[str], given: Arguments) -> Tensor:
    """Return (partitions, indices, elements): local_gather."""
    no_mask(name, given)
    data = tensor(name, "src_buffer", given["src_buffer"])
    index = tensor(name, "index", given["index"])
    session().flush()
    views = {r: operand(name, r, v, True) for r, v in given.items()}
    count, width = given["num_valid_indices"], int(given["num_elem_per_idx"])
    if count is None:
        count = math.prod(index.shape[1:]) * 16
    shape = (data.shape[0], int(count) * width) if width == 1 else (
        data.shape[0], int(count), width)  # fmt: skip
    return result(
        shape, data.kind, lambda dst: ISSUE["local_gather"](dst, **views), only=("sbuf",),
        exact=True,
    )  # fmt: skip


def transposed(name: str, data: Tensor, where: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    """Return data [P, F] as [F, P]: in PSUM by TensorE, in SBUF by VectorE up to 32 x 32.

    mask: of data's rows and columns.
    """
    data = tensor(name, "data", data)
    session().flush()
    box = box_of(mask, data.shape)
    whole = (math.prod(data.shape[1:]), data.shape[0])
    if box is False:
        return result(whole, data.kind, nothing, box=False, only=("psum",))
    view = read(data, box)
    out = (box[1], box[0]) if isinstance(box, tuple) else True
    rows, columns = view.shape[0], view.free_size
    if len(data.shape) > 2 and data.shape[2:] != (1,) * (len(data.shape) - 2):
        raise fail(
            TensorShapeError, f"{name}: {data!r} has more than 2 dimensions "
            "(err_exceed_max_supported_dimension)",
        )  # fmt: skip
    kind = data.kind if dtype is None else kind_of(dtype)
    on_vector = where is engine.vector or (
        where is not engine.tensor and view.memory == "psum" and max(rows, columns) <= 32
    )
    if not on_vector and view.memory == "psum":
        view = in_sbuf(view)

    def issue(dst: NkiTensor) -> None:
        if dst.dtype == view.dtype:
            ISSUE["nc_transpose"](dst, view, engine.vector if on_vector else engine.tensor)
        elif on_vector:
            turned = ndarray((columns, rows), view.dtype, sbuf)
            ISSUE["nc_transpose"](turned, view, engine.vector)
            ISSUE["tensor_copy"](dst, turned)
        else:  # a product with the identity matrix, which PSUM takes in float32
            one = shared_identity_matrix(rows, view.dtype)
            wide = dst if dst.dtype == "float32" else ndarray(dst.shape, dtypes.float32, psum)
            ISSUE["nc_matmul"](wide, view, one, is_moving_onezero=True, accumulate=False)
            if wide is not dst:
                ISSUE["tensor_copy"](dst, wide)

    only = ("sbuf", "psum") if on_vector else ("psum",)
    return result(whole, kind, issue, box=out, only=only, exact=dtype is None)


def _transposed(name: str, rule: list[str], given: Arguments) -> Tensor:
    dtype = given.pop("dtype")
    if name == "nisa.nc_transpose":
        return transposed(name, given["data"], given["engine"], dtype, given["mask"])
    no_mask(name, given)
    source = given["src"]
    if not isinstance(source, Tensor):
        tensor(name, "src", source)
    session().flush()
    view = source.tile()
    axes = given["axes"]
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(len(view.shape), (1, 0))
    shape = tuple(view.shape[a] for a in order)
    kind = source.kind if dtype is None else kind_of(dtype)

    def issue(dst: NkiTensor) -> None:
        turned = dst if dst.dtype == view.dtype else ndarray(shape, view.dtype, sbuf)
        ISSUE["dma_transpose"](turned, view, axes if axes is None else tuple(axes))
        if turned is not dst:
            ISSUE["tensor_copy"](dst, turned)

    return result(shape, kind, issue, only=("sbuf",), exact=dtype is None)


def affine(expression: Index, shape: tuple[int, ...]) -> tuple[list[list[int]], int, int]:
    """Return (pattern, offset, channel multiplier) of an index over a tile of `shape`."""
    sizes, steps = expression.aligned(len(shape))
    if any(s not in (1, t) for s, t in zip(sizes, shape, strict=True)):
        raise fail(TensorShapeError, f"an index of shape {expression.shape} for a tile of {shape}")
    pattern = [[step, size] for step, size in zip(steps[1:], shape[1:], strict=True)]
    return pattern, expression.const, steps[0]


def _selected(name: str, rule: list[str], given: Arguments) -> Tensor:
    mask, dtype = given["mask"], given["dtype"]
    tile = tensor(name, "on_true_tile", given["on_true_tile"])
    predicate = given["pred"]
    if not isinstance(predicate, Mask) or len(predicate.terms) != 1:
        raise fail(
            UnsupportedInstructionError,
            f"{name}: pred is {type(predicate).__name__}; pass one comparison of index expressions",
        )
    ((expression, op),) = predicate.terms
    kind = tile.kind if dtype is None else kind_of(dtype)
    shape = tile.shape
    rank = max(len(shape), len(expression.shape))
    if expression.aligned(rank)[0] != (1,) * (rank - len(shape)) + shape:
        raise fail(
            TensorShapeError,
            f"{name}: pred has shape {expression.shape}, on_true_tile {shape}; they must have the "
            "same shape, so let pred name every axis: + 0 * nl.arange(n)[None, :]",
        )
    session().flush()
    box = box_of(mask, shape)
    if box is False:
        return result(shape, kind, nothing, box=False)
    view = in_sbuf(stretched(tile, shape, name, box))
    if isinstance(box, tuple):
        sizes, steps = expression.aligned(len(shape))
        start = expression.const + sum(a * c for (a, _), c in zip(box, steps, strict=True))
        cut = tuple(1 if s == 1 else b - a for s, (a, b) in zip(sizes, box, strict=True))
        expression = Index(cut, start, steps)
    pattern, offset, multiplier = affine(expression, view.shape)
    compare = language_math.FUNCTIONS[op]
    fill = as_number(given["on_false_value"])
    return result(
        shape, kind,
        lambda dst: ISSUE["affine_select"](
            dst, pattern, multiplier, view, fill, cmp_op=compare, offset=offset
        ),
        box=box, only=("sbuf",),
    )  # fmt: skip


def _expression(name: str, rule: list[str], given: Arguments) -> Tensor:
    """Return the values of an index expression: iota."""
    no_mask(name, given)
    expression, kind = given["expr"], kind_of(given["dtype"])
    number = as_number(expression)
    if number is not None:
        expression = Index((1, 1), int(number), (0, 0))
    if not isinstance(expression, Index) or len(expression.shape) < 2:
        raise fail(
            TensorShapeError,
            f"{name}: expr is {expression!r}; pass an index expression of two or more axes",
        )
    pattern, offset, multiplier = affine(expression, expression.shape)
    return result(
        expression.shape, kind,
        lambda dst: ISSUE["iota"](dst, pattern, offset, multiplier), only=("sbuf",),
    )  # fmt: skip


def _filled(name: str, rule: list[str], given: Arguments) -> Tensor:
    no_mask(name, given)
    kind, value = kind_of(given["dtype"]), as_number(given["value"])
    shape = tuple(int(s) for s in given["shape"])
    shape = shape if len(shape) > 1 else (*shape, 1)
    where = given["engine"]
    value = int(value) if kind.kind != "float" else value
    return result(shape, kind, lambda dst: ISSUE["memset"](dst, value, where))


def no_mask(name: str, given: Arguments) -> None:
    """Refuse a mask that the instruction does not support."""
    mask = given.pop("mask")
    if mask is not None and mask is not True:
        raise fail(UnsupportedInstructionError, f"{name} with a mask; index the part that is meant")


RULES: dict[str, Callable[[str, list[str], Arguments], Tensor]] = {
    "like": like, "moved": _moved, "reduced": _reduced, "columns": _columns, "row": _row,
    "bounds": _bounds, "gathered": _gathered, "product": product_rule, "transposed": _transposed,
    "selected": _selected, "expression": _expression, "filled": _filled,
}  # fmt: skip
