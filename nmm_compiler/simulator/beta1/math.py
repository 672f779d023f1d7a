"""`neuronxcc.nki.language` functions that compute: elementwise, reductions, and their compounds.

Elementwise functions and reductions are one pending instruction each. Those that take several
instructions (softmax, rms_norm, var, ...) call the current language's functions and return a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import TensorShapeError
from nmm_compiler.nki_api.beta1_api import beta_1
from nmm_compiler.nki_api.beta1_table import REFUSED
from nmm_compiler.simulator.beta1 import instructions
from nmm_compiler.simulator.beta1.index import Index, box_of
from nmm_compiler.simulator.beta1.instructions import bound, refuse, signature_of
from nmm_compiler.simulator.beta1.operands import (
    ISSUE,
    at_equal_partitions,
    in_float32,
    in_sbuf,
    issued,
    tensor,
)
from nmm_compiler.simulator.beta1.pending import (
    Session,
    as_number,
    leave_undefined,
    no_broadcast,
    read,
    result,
    session,
    stretched,
    written,
)
from nmm_compiler.simulator.beta1.products import product
from nmm_compiler.simulator.beta1.promotion import kind_of_number, promote
from nmm_compiler.simulator.beta1.rules import transposed
from nmm_compiler.simulator.beta1.tensor import OPERATIONS, Shifted, Tensor, fail, kind_of
from nmm_compiler.simulator.isa import operators
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.language import names as current_language
from nmm_compiler.simulator.language.base import ndarray, sbuf
from nmm_compiler.simulator.language.partition_broadcast import EXACT_DTYPES, spread_by_product
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import NkiTensor

CURRENT: dict[str, Any] = current_language.NAMES
NAMES: dict[str, Any] = {}


def enter(short: str, function: Callable[..., Any]) -> None:
    """Enter a function under its name; it serves as the operator of that name too."""
    full = f"nki.language.{short}"
    name = f"nl.{short}"
    signature = signature_of(full, current_language.NAMES | {"None": None, "bool": dtypes.bool_})

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(name, **bound(name, signature, args, kwargs))

    call.__name__ = call.__qualname__ = short
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.nki_op = operators.BY_NAME.get(short)  # type: ignore[attr-defined]
    NAMES[short] = call


def _binary(short: str) -> Callable[..., Any]:
    op = CURRENT[short]

    def function(name: str, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> Any:
        tile, other, reverse = (x, y, False) if isinstance(x, Tensor) else (y, x, True)
        tensor(name, "x", tile)
        number = as_number(other)
        if number is not None:
            kind = promote(tile.kind, kind_of_number(other))
            return _with_number(name, tile, number, reverse, kind, dtype, mask)
        if isinstance(other, Index) and short == "add" and math.prod(tile.shape) == 1:
            return Shifted(tile, other)
        if isinstance(other, np.ndarray):
            raise fail(TensorShapeError, f"{name}: a NumPy array; load it with nl.shared_constant")
        tensor(name, "y", other)
        return _with_tile(name, x, y, dtype, mask)

    def chosen(kind: Any, dtype: Any) -> Any:
        return kind if dtype is None else kind_of(dtype)

    def _with_number(
        name: str, tile: Tensor, number: Any, reverse: bool, kind: Any, dtype: Any, mask: Any
    ) -> Tensor:
        session().flush()
        box = box_of(mask, tile.shape)
        view = None if box is False else read(tile, box)
        return result(
            tile.shape, chosen(kind, dtype),
            lambda dst: issued("tensor_scalar", dst, view, op, number, reverse0=reverse),
            box=box,
        )  # fmt: skip

    def _with_tile(name: str, x: Tensor, y: Tensor, dtype: Any, mask: Any) -> Tensor:
        kind = chosen(promote(x.kind, y.kind), dtype)
        shape = _together(name, x, y)
        session().flush()
        box = box_of(mask, shape)
        if box is False:
            return result(shape, kind, lambda dst: None, box=False)
        arithmetic = op.nki_op.kind == "arith" and short != "power"
        for tile, other, reverse in ((x, y, False), (y, x, True)):
            one_each = other.shape == (shape[0],) + (1,) * (len(shape) - 1)
            if one_each and arithmetic and tile.shape == shape and math.prod(shape[1:]) > 1:
                rows = True if box is True else (box[0], *((0, 1),) * (len(shape) - 1))
                left, vector = read(tile, box), in_float32(read(other, rows))
                return result(
                    shape, kind,
                    lambda dst, left=left, vector=vector, reverse=reverse: issued(  # type: ignore[misc]
                        "tensor_scalar", dst, left, op, vector, reverse0=reverse
                    ),
                    box=box,
                )  # fmt: skip
        a, b = at_equal_partitions(stretched(x, shape, name, box), stretched(y, shape, name, box))
        return result(shape, kind, lambda dst: issued("tensor_tensor", dst, a, b, op), box=box)

    return function


def _together(name: str, x: Tensor, y: Tensor) -> tuple[int, ...]:
    """Return the shape that two tiles broadcast to; free dimensions of size 1 repeat."""
    if len(x.shape) != len(y.shape):
        if x.shape[0] == y.shape[0] and math.prod(x.shape) == math.prod(y.shape):
            return x.shape
        raise no_broadcast(y, x.shape, name)
    for a, b in zip(x.shape, y.shape, strict=True):
        if a != b and 1 not in (a, b):
            raise no_broadcast(y, x.shape, name)
    return tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))


def _unary(short: str) -> Callable[..., Any]:
    op = CURRENT[short]
    on_scalar = op.nki_op.activation is not None

    def function(name: str, x: Any, dtype: Any = None, mask: Any = None) -> Tensor:
        tile = tensor(name, "x", x)
        kind = tile.kind if dtype is None else kind_of(dtype)
        session().flush()
        box = box_of(mask, tile.shape)
        view = None if box is False else read(tile, box)
        if on_scalar:
            return result(
                tile.shape, kind, lambda dst: issued("activation", dst, op, view), box=box
            )
        return result(
            tile.shape, kind, lambda dst: issued("tensor_scalar", dst, view, op, 0), box=box
        )

    return function


def _reduction(short: str, op: Any) -> Callable[..., Any]:
    def function(
        name: str, x: Any, axis: Any, dtype: Any = None, keepdims: bool = False, mask: Any = None
    ) -> Tensor:
        return instructions.NAMES["tensor_reduce"](
            op, x, axis, keepdims=keepdims, dtype=dtype, mask=mask
        )

    return function


def _copy(name: str, src: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    return instructions.NAMES["tensor_copy"](src, dtype=dtype, mask=mask)


def _reciprocal(name: str, x: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    return instructions.NAMES["reciprocal"](x, dtype=dtype, mask=mask)


def _transpose(name: str, x: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    return transposed(name, x, engine.unknown, dtype, mask)


def _matmul(name: str, x: Any, y: Any, transpose_x: bool = False, mask: Any = None) -> Tensor:
    if not transpose_x:
        turned = transposed(name, tensor(name, "x", x), engine.unknown)
        x = _copy(name, turned)
    return product(name, x, y, mask, turned=not transpose_x)


def _composite(short: str) -> Callable[..., Any]:
    """Return a function that runs the current language's, over whole tiles."""
    current_function = CURRENT[short]

    def function(name: str, mask: Any = None, **given: Any) -> Tensor:
        session().flush()
        shape = next(v.shape for v in given.values() if isinstance(v, Tensor))
        box = box_of(mask, shape)
        if box is False:
            return result(shape, dtypes.float32, lambda dst: None, box=False)
        views = {}
        for role, value in given.items():
            if isinstance(value, Tensor):
                views[role] = read(value, box if value.shape == shape else True)
            elif value is not None or role in ("x", "y"):
                views[role] = value
        if short == "softmax" and "compute_dtype" in views:
            del views["compute_dtype"]
        made = Tensor.of(current_function(**views))
        if box is True or made.shape != tuple(b - a for a, b in box):
            return made
        return _placed(made, shape, box)

    return function


def _placed(part: Tensor, shape: tuple[int, ...], box: Any) -> Tensor:
    """Return a tile of `shape` with `part` in its box; the rest is undefined."""
    view = part.tile()
    return result(
        shape, part.kind, lambda dst: ISSUE["tensor_copy"](dst, view), box=box, exact=True
    )


def _loop_reduce(
    name: str, x: Any, op: Any, loop_indices: Any, dtype: Any = None, mask: Any = None
) -> Tensor:
    """Return dst <op> x for the tile that it is assigned to; an unwritten tile takes x alone."""
    tile = tensor(name, "x", x)
    now = session()
    now.flush()
    box = box_of(mask, tile.shape)
    kind = tile.kind if dtype is None else kind_of(dtype)
    if box is False:
        return result(tile.shape, kind, lambda dst: None, box=False)
    view = read(tile, box)

    def issue(dst: NkiTensor) -> None:
        if _untouched(now, dst):
            ISSUE["tensor_copy"](dst, view)
        else:
            ISSUE["tensor_tensor"](dst, dst, view, op)

    made = result(tile.shape, kind, issue, box=box, exact=True)
    made.pending.updates = True
    return made


def _untouched(now: Session, dst: NkiTensor) -> bool:
    """Return whether nothing has written dst; without data, whether no reduction has."""
    if now.machine.data:
        missing = dst.unwritten_view()
        return missing is not None and bool(missing.all())
    place = (dst.storage.identity, dst.offset, dst.shape)
    started = now.reductions
    before = place in started or (dst.storage.allocation.first_index >= 0 and not any(
        known[0] == place[0] for known in started
    ))  # fmt: skip
    started.add(place)
    return not before


def _static_cast(name: str, input_data: Any, dtype: Any) -> Any:
    if isinstance(input_data, Tensor):
        return _copy(name, input_data, dtype)
    return np.asarray(input_data).astype(kind_of(dtype).numpy)[()]


def broadcast(tile: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view of `shape`; one partition becomes many by a product with ones, or by DMA."""
    if tile.shape == shape:
        return tile
    if tile.memory == "hbm":
        return _hbm_broadcast(tile, shape)
    tensor("broadcast_to", "src", tile)
    if len(tile.shape) < len(shape):
        tile = tile.reshape((1,) * (len(shape) - len(tile.shape)) + tile.shape) \
            if tile.shape[0] == 1 else tile  # fmt: skip
    if len(tile.shape) != len(shape):
        raise no_broadcast(tile, shape, "broadcast_to")
    if tile.shape[0] != shape[0]:
        if tile.shape[0] != 1:
            raise no_broadcast(tile, shape, "broadcast_to")
        session().flush()
        tile = _spread(tile, shape[0])
    view = stretched(tile, shape, "broadcast_to")
    return Tensor.of(view)


def _spread(tile: Tensor, partitions: int) -> Tensor:
    view = in_sbuf(read(tile))
    machine = session().machine
    if view.dtype not in EXACT_DTYPES or view.access().partition_start:
        copied = ndarray(view.shape, dtypes.float32, sbuf)
        ISSUE["tensor_copy"](copied, view)
        view = copied
    wide = ndarray((partitions, *view.shape[1:]), view.dtype, sbuf)
    spread_by_product(machine, wide, view, CURRENT["copy"])
    if wide.dtype == tile.kind:
        return Tensor.of(wide)
    narrow = ndarray(wide.shape, tile.kind, sbuf)
    ISSUE["tensor_copy"](narrow, wide)
    return Tensor.of(narrow)


def _hbm_broadcast(tile: Tensor, shape: tuple[int, ...]) -> Tensor:
    view = tile.tile()
    lead = len(shape) - len(view.shape)
    have = (1,) * lead + view.shape
    if lead < 0 or any(h not in (1, w) for h, w in zip(have, shape, strict=True)):
        raise no_broadcast(tile, shape, "broadcast_to")
    strides = tuple(
        s if h == w else 0 for s, h, w in zip((0,) * lead + view.strides, have, shape, strict=True)
    )
    return Tensor.of(NkiTensor(view.storage, shape, strides, view.offset, view.dtype))


def update(dst: Tensor, short: str, value: Any) -> Tensor:
    """Do `dst += value` and kin in place; a product onto PSUM is one accumulation there."""
    now = session()
    pending = value.pending if isinstance(value, Tensor) and now.pending is value else None
    adds = short == "add" and dst.memory == "psum"
    if adds and pending is not None and pending.accumulate is not None:
        if dst.shape != value.shape and math.prod(dst.shape) != math.prod(value.shape):
            raise no_broadcast(value, dst.shape, "+=")
        now.pending = value.pending = None
        if pending.box is not False:
            pending.accumulate(written(dst, pending.box))
        if pending.box is not True:
            leave_undefined(dst)
        return dst
    now.flush()
    if dst.memory == "hbm":
        raise fail(TensorShapeError, f"{short} in place on {dst!r} in HBM; load, compute, store")
    made = NAMES[short](dst, value, dtype=dst.kind)
    now.pending = None
    if made.shape != dst.shape:
        raise no_broadcast(dst, made.shape, f"{short} in place")
    view = read(dst)
    made.pending.issue(written(dst))
    made.settle_in(view)
    return dst


_REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}
_COMPOSITES = [
    "sin",
    "cos",
    "tan",
    "ceil",
    "floor",
    "trunc",
    "mean",
    "var",
    "all",
    "softmax",
    "rms_norm",
    "where",
    "dropout",
    "gather_flattened",
]
_OWN: dict[str, Callable[..., Any]] = {
    "copy": _copy, "reciprocal": _reciprocal, "transpose": _transpose, "matmul": _matmul,
    "static_cast": _static_cast,
    "loop_reduce": _loop_reduce,
}  # fmt: skip


def _enter_all() -> None:
    api = beta_1()
    for full, function in api.functions.items():
        module, _, short = full.rpartition(".")
        if module != "nki.language":
            continue
        if full in REFUSED:
            NAMES[short] = refuse(f"nl.{short}", full)
        elif short in _OWN:
            enter(short, _OWN[short])
        elif short in _REDUCTIONS:
            enter(short, _reduction(short, CURRENT[_REDUCTIONS[short]]))
        elif short in _COMPOSITES:
            enter(short, _composite(short))
        elif [p.name for p in function.parameters][:2] == ["x", "y"]:
            enter(short, _binary(short))
        elif [p.name for p in function.parameters] == ["x", "dtype", "mask"]:
            enter(short, _unary(short))


_enter_all()
OPERATIONS.update(NAMES)
OPERATIONS["broadcast"] = broadcast
OPERATIONS["update"] = update


def _invert(x: Tensor) -> Tensor:
    return NAMES["logical_not" if x.kind == "bool" else "invert"](x)


OPERATIONS["invert"] = _invert
