"""`neuronxcc.nki.isa`: each function issues the current instruction of the same name.

The instruction's row says which operands there are and how their sizes depend on each other. Beta 1
differs in that the instruction returns its first destination, so that the row also gives the shape
and the memories of the result; and in masks, which cut an instruction to a box of all its operands.
`table.py` has the parameters, and what the row cannot say.

The compiler of that version copied what an engine could not read as it lay. Here that is a PSUM
tile for an engine that reads SBUF, a vector of another dtype, one of two tiles that do not start at
the same partition, and a tile of more dimensions than an instruction walks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import KernelArgumentError, OperandError, UnsupportedInstructionError
from nmm_compiler.simulator.beta1.index import (
    Index,
    Mask,
    Part,
    Shape,
    affine,
    box_of,
    carried,
    common_part,
    fail,
    need,
    whole_box,
)
from nmm_compiler.simulator.beta1.table import ISA_ENUMS, ISA_VALUES, REFUSED, UNDOCUMENTED, beta_1
from nmm_compiler.simulator.beta1.tensor import (
    Tensor,
    as_number,
    in_kind,
    result,
    session,
    stretched,
    write,
    written,
)
from nmm_compiler.simulator.isa import names as current_isa
from nmm_compiler.simulator.isa.dma import TURNED
from nmm_compiler.simulator.isa.enums import engine as engines, matmul_perf_mode
from nmm_compiler.simulator.language.base import ndarray, psum, sbuf, shared_identity_matrix
from nmm_compiler.simulator.language.functions import NAMES as LANGUAGE, reduced_shape, result_of
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.signatures import Function
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.geometry import MAX_FREE_DIMS, out_of_reach
from nmm_compiler.simulator.tensors.tensor import NkiTensor, kind_of

Arguments = dict[str, Any]
Body = Callable[..., Any]
ISSUE: dict[str, Body] = {
    **current_isa.NAMES,
    "tensor_copy_dynamic_src": current_isa.NAMES["tensor_copy"],
}

# Dtypes of results: the type promotion table of the NKI documentation (aws-neuron-sdk 2.26,
# `nki.api.shared`). A float wins over an integer, the wider of two floats or integers wins, and a
# pair of which neither holds the other becomes a wider dtype. A Python number counts as the widest
# of its kind.

_WIDENED = {
    frozenset(("float16", "bfloat16")): dtypes.float32,
    frozenset(("float8_e4m3", "float8_e5m2")): dtypes.bfloat16,
    frozenset(("int32", "uint32")): dtypes.float32,
}
_FLOAT_RANK = {"float32": 4, "tfloat32": 3, "bfloat16": 2, "float16": 2}


def promote(first: DType, second: DType) -> DType:
    """Return the dtype of an operation on both."""
    if first == second:
        return first
    widened = _WIDENED.get(frozenset((str(first), str(second))))
    if widened is not None:
        return widened
    a, b = (dtypes.uint8 if kind.kind == "bool" else kind for kind in (first, second))
    if "float" in (a.kind, b.kind):
        return max(a, b, key=lambda kind: _FLOAT_RANK.get(kind, int(kind.kind == "float")))
    return dtypes.find(np.promote_types(a.numpy, b.numpy)) or dtypes.float32


def kind_of_number(value: Any) -> DType:
    """Return the dtype of a number: its own for NumPy scalars, the widest for Python's."""
    if isinstance(value, np.generic):
        return dtypes.find(value.dtype) or dtypes.float32
    if isinstance(value, bool):
        return dtypes.uint8
    return dtypes.int32 if isinstance(value, int) else dtypes.float32


# Operands


def tensor(name: str, role: str, value: Any) -> Tensor:
    """Return `value` as a tensor on chip; raise OperandError when it is none."""
    value = tensor_anywhere(name, role, value)
    need(
        value.memory != "hbm",
        f"{name}: {role} {value!r} is in HBM (err_unsupported_memory); nl.load it first",
    )
    return value


def tensor_anywhere(name: str, role: str, value: Any) -> Tensor:
    """Return `value` as a tensor in any memory."""
    match value:
        case Tensor(part=None):
            return value
        case Tensor():
            what = (
                "a tile with an operand mask, which nisa.nc_matmul and "
                "nl.matmul(transpose_x=True) alone take (NKI API Masking); pass mask="
            )
        case Index() | Mask():
            what = "an index expression; make a tile of it with nisa.iota(expr, dtype)"
        case _:
            what = (
                f"{type(value).__name__}; pass a tile, of a NumPy array by "
                "nl.load(nl.shared_constant(...))"
            )
    raise fail(OperandError, f"{name}: {role} is {what}")


def copied(view: NkiTensor, kind: DType | None = None) -> NkiTensor:
    """Return a copy in SBUF."""
    return result_of(ISSUE["tensor_copy"], view, view, dtype=kind)


def in_sbuf(view: NkiTensor) -> NkiTensor:
    """Return the view, or a copy in SBUF of one in PSUM."""
    return copied(view) if view.memory == "psum" else view


def rows_of(box: Part, tile: Tensor) -> Part:
    """Return the part of a tile in the partitions of a box, all of it if it has fewer."""
    if not box or tile.shape[0] < box[0].stop:
        return None
    return (box[0], *whole_box(tile.shape[1:]))


def _in_parts(issue: Body, dst: NkiTensor, **given: Any) -> None:
    """Issue an elementwise instruction, or one for each index of an outer free dimension.

    Tiles of nki.language may have any number of dimensions, an instruction's access pattern four.
    """
    views = {role: value for role, value in given.items() if isinstance(value, NkiTensor)}
    if not any(
        len(tile.shape) > 1 + MAX_FREE_DIMS and out_of_reach(tile.shape[1:], tile.strides[1:])
        for tile in (dst, *views.values())
    ):
        issue(dst, **given)
        return
    for at in range(dst.shape[1]):
        parts = {role: view[:, min(at, view.shape[1] - 1)] for role, view in views.items()}
        _in_parts(issue, dst[:, at], **{**given, **parts})


# Instructions whose row says all


def _result_shape(row: Any, role: str, data: Shape) -> Shape:
    """Return the shape of the destination of a row for the shape of an operand."""
    terms = row.terms
    (partitions, free), (to, into) = terms[role], terms[row.first]
    first = data[0] if to == partitions else to[2]
    if into == free:
        return (first, *data[1:])
    times, letter, plus = into
    return (first, times, math.prod(data[1:])) if letter else (first, plus)


def _views(name: str, row: Any, given: Arguments, like: str, shape: Shape, box: Part) -> Arguments:
    """Return arguments of the current instruction: whole operands cut to the box, or to its rows.

    like, shape: an operand and its shape, to which those of its sizes stretch.
    """
    terms = row.terms
    wide = {role for role in row.roles if terms.get(role) == terms[like]}
    views: Arguments = {}
    for role, value in given.items():
        if not isinstance(value, Tensor):
            number = as_number(value)
            views[role] = value if number is None else number
            continue
        tile = tensor(name, role, value)
        if role in row.writes:
            views[role] = written(tile, box if tile.shape == shape else rows_of(box, tile))
        elif role in wide:
            views[role] = stretched(tile, shape, name, box)
        else:
            views[role] = tile.tile(rows_of(box, tile))
            narrow = tile.kind not in _WIDE
            if narrow and role in row.numbers and role in _IN_FLOAT32:
                views[role] = copied(views[role], dtypes.float32)
        if "psum" not in row.reads.get(role, ("psum",)):
            views[role] = in_sbuf(views[role])
    # no document of Beta 1 has a rule for where two inputs start; the hardware has one
    pair = {role: views[role] for role in row.pair if isinstance(views.get(role), NkiTensor)}
    starts = {r: v.access().partition_start for r, v in pair.items() if v.memory == "sbuf"}
    for role, start in starts.items():
        if start and len(set(starts.values())) > 1:
            views[role] = copied(views[role])
    return views


_IN_FLOAT32 = ("operand0", "operand1", "scale")
"""Operands that an engine reads as one number per partition, from a dtype of _WIDE."""
_WIDE = ("float32", "tfloat32", "int32", "uint32")


def elementwise(name: str, short: str, **given: Any) -> Tensor:
    """Return the result of a function of nki.language that is one instruction."""
    return by_row(name, ISSUE[short], functools.partial(_in_parts, ISSUE[short]), "", given)


def by_row(name: str, row: Any, issue: Body, rule: str, given: Arguments) -> Any:
    """Issue an instruction that has a destination, or return the tile that is its destination.

    rule: "exact" for one that does not round, else the dtype of the result, or "".
    """
    mask, dtype = given.pop("mask", None), given.pop("dtype", None)
    if row.first in given:
        session().flush()
        dst = tensor(name, row.first, given.pop(row.first))
        box = box_of(mask, dst.shape)
        like = row.first, dst.shape
        write(dst, box, lambda view: issue(view, **_views(name, row, given, *like, box)))
        return None
    terms = row.terms
    role = next(r for r in row.reads if len(terms.get(r, ())) == 2)  # with partitions and elements
    tiles = [
        tensor(name, r, given[r]) for r in row.reads
        if r in given and terms.get(r) == terms[role] and (r == role or r not in row.constants)
    ]  # fmt: skip
    rank = max(len(tile.shape) for tile in tiles)
    over = tuple(map(max, *(t.shape for t in tiles if len(t.shape) == rank), (1,) * rank))
    shape = _result_shape(row, role, over)
    kind = functools.reduce(promote, [tile.kind for tile in tiles])
    if rule not in ("", "exact"):
        kind = kind_of(rule)

    box = box_of(mask, over)
    return result(
        shape, kind_of(dtype, kind),
        lambda dst: issue(dst, **_views(name, row, given, role, over, box)),
        carried(box, over, shape), only=row.writes[row.first],
        exact=rule == "exact" and dtype is None,
    )  # fmt: skip


# Instructions whose arguments or results differ


_NO_MASK = " with a mask; index the part that is meant"


def _reduced(
    name: str, data: Any, axis: Any, keepdims: bool, mask: Any, dtype: Any, **given: Any
) -> Tensor:
    data = tensor(name, "data", data)
    rank = len(data.shape)
    listed = np.atleast_1d(axis).tolist()
    axes = sorted(a % rank for a in listed if -rank < a < rank and a != 0)
    need(
        len(axes) >= max(1, len(listed)),
        f"{name}: axis {listed} of a tile {data.shape}; reduce free axes, 1 to {rank - 1} "
        "(partitions: nisa.tensor_partition_reduce)",
    )
    shape, box = reduced_shape(data.shape, axes, keepdims), box_of(mask, data.shape)

    def issue(dst: NkiTensor) -> None:
        """An instruction reduces the last axes of its operand."""
        view = data.tile(box).permute([*(d for d in range(rank) if d not in axes), *axes])
        places = tuple(range(rank - len(axes), rank))
        ISSUE["tensor_reduce"](dst, data=view, axis=places, keepdims=keepdims, **given)

    return result(shape, kind_of(dtype, data.kind), issue, carried(box, data.shape, shape))


def _gathered(
    name: str, src_buffer: Any, index: Any, num_elem_per_idx: Any, num_valid_indices: Any, mask: Any
) -> Tensor:
    """Return (partitions, indices, elements): local_gather."""
    data, places = tensor(name, "src_buffer", src_buffer), tensor(name, "index", index)
    need(box_of(mask, data.shape) is None, f"{name}{_NO_MASK}", UnsupportedInstructionError)
    width, count = int(num_elem_per_idx), num_valid_indices
    count = math.prod(places.shape[1:]) * 16 if count is None else int(count)
    shape = (data.shape[0], count) if width == 1 else (data.shape[0], count, width)
    return result(
        shape, data.kind,
        lambda dst: ISSUE["local_gather"](
            dst, data.tile(), places.tile(), num_elem_per_idx, num_valid_indices
        ),
        only=("sbuf",), exact=True,
    )  # fmt: skip


def product(
    name: str,
    stationary: Any,
    moving: Any,
    mask: Any = None,
    *,
    perf_mode: str | None = None,
    turned: bool = False,
    **flags: Any,
) -> Tensor:
    """Return stationary.T @ moving in PSUM, float32.

    turned: it is that of an `nl.matmul` that transposes; the trace notes its moving tile.
    mask: of the result. An operand may have one of its own: of the rows that are summed over and
    of its part of the result.
    """
    need(
        perf_mode in (None, "double_row_gen3"),
        f"{name}: perf_mode {perf_mode!r}; the simulator has 'double_row_gen3'",
        UnsupportedInstructionError,
    )
    first = 1  # of the free dimensions; before it, rows
    if perf_mode is not None:
        first, flags["perf_mode"] = 2, matmul_perf_mode.double_row
    for role, operand in (("stationary", stationary), ("moving", moving)):
        if not isinstance(operand, Tensor) or operand.part is None:
            tensor(name, role, operand)
    left, right = stationary, moving
    shape = (math.prod(left.shape[first:]), *right.shape[first:])
    kind = left.kind if flags.get("is_transpose") else dtypes.float32
    left_part, right_part, box = _matmul_parts(left, right, box_of(mask, shape), first)
    machine = current()

    def add(dst: NkiTensor, **how: Any) -> None:
        a, b = in_sbuf(left.tile(left_part)), in_sbuf(right.tile(right_part))
        if turned:
            machine.trace.awaited.add(b.storage.identity)
        ISSUE["nc_matmul"](dst, a, b, **flags, **how)

    def sum_into(dst: NkiTensor) -> None:
        if machine.data and dst.missing() is not None:
            machine.warn(
                f"{dst.name!r} += nc_matmul: nothing has written the sum, which nl.ndarray leaves "
                "undefined; begin with nl.zeros, or with ="
            )
        add(dst)

    issue = functools.partial(add, accumulate=False)
    return result(shape, kind, issue, box, only=("psum",), exact=True, update=sum_into)


def _matmul_parts(left: Tensor, right: Tensor, box: Part, first: int) -> tuple[Part, Part, Part]:
    """Return the parts of stationary and moving, and that of the result, that masks leave."""
    parts = left.part, right.part, box
    if parts == (None, None, None):
        return parts
    need(
        len(left.shape) == first + 1,
        f"a mask over the columns of {left!r}; index it with {first + 1} dimensions",
    )
    a, b = (m.part or whole_box(m.shape) for m in (left, right))
    rows, columns = common_part(a[:first], b[:first]), common_part((*a[first:], *b[first:]), box)
    if () in parts or not rows or not columns:
        return (), (), ()
    return (*rows, columns[0]), (*rows, *columns[1:]), columns


def transposed(name: str, data: Any, engine: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    """Return data [P, F] as [F, P]: in PSUM by TensorE, in SBUF by VectorE up to 32 x 32.

    mask: of data's rows and columns.
    """
    data = tensor(name, "data", data)
    need(
        math.prod(data.shape[2:]) == 1,
        f"{name}: {data!r} has more than 2 dimensions (err_exceed_max_supported_dimension)",
    )
    box = box_of(mask, data.shape)
    cut = tuple(map(len, box)) if box else data.shape
    on_vector = engine is engines.vector or (
        engine is not engines.tensor and data.memory == "psum" and max(cut) <= 32
    )

    def issue(dst: NkiTensor) -> None:
        view = data.tile(box) if on_vector else in_sbuf(data.tile(box))
        if on_vector:
            through(dst, view.dtype, sbuf, ISSUE["nc_transpose"], view, engines.vector)
        elif dst.dtype == view.dtype:
            ISSUE["nc_transpose"](dst, view, engines.tensor)
        else:  # a product with the identity matrix, which PSUM takes in float32
            one = shared_identity_matrix(view.shape[0], view.dtype)
            issue_product = functools.partial(
                ISSUE["nc_matmul"], is_moving_onezero=True, accumulate=False
            )
            through(dst, dtypes.float32, psum, issue_product, view, one)

    return result(
        (math.prod(data.shape[1:]), data.shape[0]), kind_of(dtype, data.kind), issue,
        box and box[1::-1], only=("sbuf", "psum") if on_vector else ("psum",), exact=dtype is None,
    )  # fmt: skip


def through(dst: NkiTensor, kind: DType, region: Any, issue: Body, *operands: Any) -> None:
    """Issue an instruction that writes one dtype, through a tile of its own if dst has another."""
    made = dst if dst.dtype == kind else ndarray(dst.shape, kind, region)
    issue(made, *operands)
    if made is not dst:
        ISSUE["tensor_copy"](dst, made)


def turned_by_dma(dst: NkiTensor, view: NkiTensor, axes: Any) -> None:
    """Write the transpose of a view by DMA, which converts no dtype."""
    through(dst, view.dtype, sbuf, ISSUE["dma_transpose"], view, axes)


def _dma_transposed(name: str, src: Any, axes: Any, dtype: Any, mask: Any) -> Tensor:
    source = tensor_anywhere(name, "src", src)
    need(box_of(mask, source.shape) is None, f"{name}{_NO_MASK}", UnsupportedInstructionError)
    order = TURNED.get(len(source.shape), (1, 0))
    axes = axes if axes is None else tuple(axes)
    return result(
        tuple(source.shape[a] for a in order), kind_of(dtype, source.kind),
        lambda dst: turned_by_dma(dst, source.tile(), axes),
        only=("sbuf",), exact=dtype is None,
    )  # fmt: skip


def dma_copied(
    name: str, dst: Any, src: Any, dst_rmw_op: Any = None, mask: Any = None, **given: Any
) -> None:
    """Issue dma_copy, or dma_compute for what a copy updates."""
    session().flush()
    target, origin = tensor_anywhere(name, "dst", dst), tensor_anywhere(name, "src", src)
    box = box_of(mask, target.shape)

    def issue(view: NkiTensor) -> None:
        source = in_sbuf(origin.tile(box))
        if dst_rmw_op is not None:
            ISSUE["dma_compute"](view, [view, source], dst_rmw_op)
        else:
            ISSUE["dma_copy"](view, source, **given)

    write(target, box, issue)


def _pattern(index: np.ndarray, box: Part) -> tuple[list[list[int]], int, int]:
    """Return (pattern, offset, channel multiplier) of an affine index inside a mask."""
    index = index[np.ix_(*box)] if box else index
    const, (rows, *steps) = affine(index)
    pattern = [[step, size] for step, size in zip(steps, index.shape[1:], strict=True)]
    return pattern, const, rows


def _selected(
    name: str, pred: Any, on_true_tile: Any, on_false_value: Any, mask: Any, dtype: Any
) -> Tensor:
    tile = tensor(name, "on_true_tile", on_true_tile)
    need(
        isinstance(pred, Mask) and len(pred.terms) == 1,
        f"{name}: pred is {type(pred).__name__}; pass one comparison of index expressions",
        UnsupportedInstructionError,
    )
    ((op, left, right),) = pred.terms
    rank = max(len(tile.shape), pred.ndim)
    over, wanted = ((1,) * (rank - len(shape)) + shape for shape in (pred.shape, tile.shape))
    need(
        over == wanted,
        f"{name}: pred has shape {pred.shape}, on_true_tile {tile.shape}; they must have "
        "the same shape, so let pred name every axis: + 0 * nl.arange(n)[None, :]",
    )
    line = np.asarray(left - right).reshape(tile.shape)
    fill, box = as_number(on_false_value), box_of(mask, tile.shape)

    def issue(dst: NkiTensor) -> None:
        view = in_sbuf(tile.tile(box))
        pattern, offset, multiplier = _pattern(line, box)
        ISSUE["affine_select"](
            dst, pattern, multiplier, view, fill, cmp_op=LANGUAGE[op], offset=offset
        )

    return result(tile.shape, kind_of(dtype, tile.kind), issue, box, only=("sbuf",))


def _expression(name: str, expr: Any, dtype: Any, mask: Any) -> Tensor:
    """Return the values of an index expression: iota."""
    number = as_number(expr)
    need(
        number is not None or (isinstance(expr, Index) and expr.ndim > 1),
        f"{name}: expr is {expr!r}; pass an index expression of two or more axes",
    )
    line = np.asarray(expr) if number is None else np.full((1, 1), int(number))
    box = box_of(mask, line.shape)
    return result(
        line.shape, kind_of(dtype), lambda dst: ISSUE["iota"](dst, *_pattern(line, box)), box,
        only=("sbuf",),
    )  # fmt: skip


def filled(name: str, shape: Any, value: Any, dtype: Any, mask: Any = None, **given: Any) -> Tensor:
    """Return a tile of a constant: memset."""
    kind, sizes = kind_of(dtype), tuple(map(int, shape))
    sizes = sizes if len(sizes) > 1 else (*sizes, 1)
    return result(
        sizes, kind, lambda dst: ISSUE["memset"](dst, in_kind(as_number(value), kind), **given),
        box_of(mask, sizes),
    )  # fmt: skip


_OWN: dict[str, Body] = {
    "tensor_reduce": _reduced, "local_gather": _gathered, "nc_matmul": product,
    "nc_transpose": transposed, "dma_transpose": _dma_transposed, "dma_copy": dma_copied,
    "affine_select": _selected, "iota": _expression, "memset": filled,
    "activation_reduce": lambda name, **given: by_row(
        name, ISSUE["activation"], ISSUE["activation_reduce"], "", given
    ),
}  # fmt: skip


# The functions of the module


_DEFAULTS = {**current_isa.CONSTANTS, **LANGUAGE, "bool": dtypes.bool_}
"""The names in the table's defaults of parameters."""


def _default(text: str | None) -> Any:
    if text is None:
        return inspect.Parameter.empty
    owner, *members = text.split(".")
    if owner in _DEFAULTS:
        return functools.reduce(getattr, members, _DEFAULTS[owner])
    return ast.literal_eval(text)


def documented(name: str, function: Function, body: Body) -> Body:
    """Return a function of the table that passes its arguments by name, with their defaults."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([
        inspect.Parameter(p, kind, default=_default(d)) for p, d in function.parameters.items()
    ])  # fmt: skip

    def call(*args: Any, **kwargs: Any) -> Any:
        for undocumented in UNDOCUMENTED if "buffer" in signature.parameters else ():
            kwargs.pop(undocumented, None)
        try:
            found = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise fail(KernelArgumentError, f"{name}{signature}: {error}") from None
        found.apply_defaults()
        return body(name, **found.arguments)

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def functions_of(
    module: str, short: str, body_of: Callable[[str, Function], Any]
) -> dict[str, Body]:
    """Return the functions of a module of the table; those of REFUSED refuse their calls.

    body_of: takes a name and what the table says, and returns a function of the full name and the
        arguments, or None.
    """
    prefix, made = f"nki.{module}.", {}
    for full, function in beta_1().functions.items():
        name = full.removeprefix(prefix)
        body = _refused if full in REFUSED else body_of(name, function)
        if full.startswith(prefix) and body is not None:
            made[name] = documented(f"{short}.{name}", function, body)
    return made


def _refused(name: str, **given: Any) -> Any:
    instead = REFUSED[name.replace("nl.", "nki.language.").replace("nisa.", "nki.isa.")]
    raise fail(
        UnsupportedInstructionError,
        f"{name} has no documented semantics that the simulator could follow; use {instead}",
    )


def _body(short: str, function: Function) -> Body:
    if short in _OWN:
        return _OWN[short]
    return lambda name, **given: by_row(name, ISSUE[short], ISSUE[short], function.result, given)


NAMES: dict[str, Any] = functions_of("isa", "nisa", _body)
for _name in (*ISA_ENUMS, *ISA_VALUES.split(), "get_nc_version"):
    NAMES[_name] = current_isa.NAMES[_name]
NAMES["dma_engine"] = engines.dma
