"""Loads and stores of Beta 1: `nl.load`, `nl.store`, `nl.load_transpose2d` and kin, with masks."""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.errors import (
    EngineRuleError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.beta1 import math as functions
from nmm_compiler.simulator.beta1.index import box_of
from nmm_compiler.simulator.beta1.operands import ISSUE, in_sbuf, tensor
from nmm_compiler.simulator.beta1.pending import (
    Session,
    as_number,
    check_mutable,
    nothing_pending,
    read,
    result,
    session,
    stretched,
)
from nmm_compiler.simulator.beta1.tensor import (
    Tensor,
    fail,
    kind_of,
)
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.language import base
from nmm_compiler.simulator.language.base import (
    psum,
    sbuf,
    tile_size,
)
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def load(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Return a tile in SBUF with the values of an HBM tensor; the masked part is left out."""
    source = _hbm("nl.load", "src", src)
    shape = source.tile_shape()
    if shape[0] > tile_size.pmax:
        raise fail(
            TensorShapeError,
            f"nl.load of {source!r} takes {shape[0]} partitions, the memory has {tile_size.pmax} "
            "(err_num_partition_exceed_arch_limit); load 128 rows at a time",
        )
    kind = source.kind if dtype is None else kind_of(dtype)
    session().flush()
    box = box_of(mask, shape)
    if box is False:
        return result(shape, kind, lambda dst: None, box=False)
    view = source.tile(box) if len(source.shape) > 1 or box is True else source.reshape(
        shape
    ).tile(box)  # fmt: skip
    return result(
        shape, kind, lambda dst: ISSUE["dma_copy"](dst, view), box=box, only=("sbuf",),
        exact=dtype is None,
    )  # fmt: skip


def _hbm(name: str, role: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        tensor(name, role, value)
    if value.memory != "hbm":
        raise fail(
            EngineRuleError,
            f"{name}: {role} {value!r} is in {value.memory.upper()}, it must be in HBM "
            "(err_unsupported_memory); nl.copy copies on chip",
        )
    return value


def store(dst: Any, value: Any, *, mask: Any = None) -> None:
    """Write a tile, or a number, to an HBM tensor; the masked part is left out."""
    target = _hbm("nl.store", "dst", dst)
    with nothing_pending() as now:
        check_mutable(target)
        shape = target.tile_shape()
        box = box_of(mask, shape)
        if box is False:
            return
        view = target.tile(box) if len(target.shape) > 1 or box is True else target.reshape(
            shape
        ).tile(box)  # fmt: skip
        if view.shape[:1] > (tile_size.pmax,) and not isinstance(value, Tensor):
            raise fail(TensorShapeError, f"nl.store of {view.shape[0]} partitions; store 128 rows")
        ISSUE["dma_copy"](view, _stored(now, target, value, shape, box, view))


def _stored(
    now: Session, target: Tensor, value: Any, shape: tuple[int, ...], box: Any, view: NkiTensor
) -> NkiTensor:
    number = as_number(value)
    if number is not None:
        tile = base.ndarray(view.shape if len(view.shape) > 1 else shape, target.kind, sbuf)
        ISSUE["memset"](tile, int(number) if target.kind.kind != "float" else number)
        return tile
    source = tensor("nl.store", "value", value)
    if source.shape != shape and math.prod(source.shape) == math.prod(shape) and box is True:
        return in_sbuf(read(source))
    return in_sbuf(stretched(source, shape, "nl.store", box))


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Return a tile in SBUF with the transpose of a 2-D HBM tensor.

    2-byte data is turned by the DMA engines where they can do it; everything else is loaded 128
    rows at a time and turned by TensorE.
    """
    source = _hbm("nl.load_transpose2d", "src", src)
    if len(source.shape) != 2 or source.choice is not None:
        raise fail(
            TensorShapeError,
            f"nl.load_transpose2d of {source!r}; it takes 2-D tensors without run-time indices",
        )
    rows, columns = source.shape
    kind = source.kind if dtype is None else kind_of(dtype)
    now = session()
    now.flush()
    box = box_of(mask, source.shape)
    if box is False:
        return result((columns, rows), kind, lambda dst: None, box=False)
    view = source.tile(box)
    by_dma = now.machine.target.dma_transposes and source.kind.item_bytes == 2

    def issue(dst: NkiTensor) -> None:
        if by_dma:
            turned = dst if dst.dtype == view.dtype else base.ndarray(dst.shape, view.dtype, sbuf)
            ISSUE["dma_transpose"](turned, view, (1, 0))
            if turned is not dst:
                ISSUE["tensor_copy"](dst, turned)
            return
        flat = dst.reshape((dst.shape[0], dst.free_size)) if len(dst.shape) != 2 else dst
        for start in range(0, view.shape[0], tile_size.pmax):
            stop = min(start + tile_size.pmax, view.shape[0])
            block = base.ndarray((stop - start, view.shape[1]), view.dtype, sbuf)
            ISSUE["dma_copy"](block, view[start:stop, :])
            turned = base.ndarray((view.shape[1], stop - start), view.dtype, psum)
            ISSUE["nc_transpose"](turned, block, engine.tensor)
            ISSUE["tensor_copy"](flat[:, start:stop], turned)

    out = box if box is True else (box[1], box[0])
    return result((columns, rows), kind, issue, box=out, only=("sbuf",), exact=dtype is None)


def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None) -> None:
    """Add a tile to rows of an HBM tensor that run-time indices choose."""
    target = _hbm("nl.atomic_rmw", "dst", dst)
    if getattr(op, "__name__", "") != "add" or mask is not None:
        raise fail(UnsupportedInstructionError, "nl.atomic_rmw takes op=np.add and no mask")
    with nothing_pending():
        check_mutable(target)
        view = target.tile()
        source = in_sbuf(stretched(tensor("nl.atomic_rmw", "value", value), target.shape, "value"))
        ISSUE["dma_compute"](view, [view, source], functions.NAMES["add"])


def device_print(prefix: str, x: Any, *, mask: Any = None) -> None:
    """Print a tile's values at this point of the run."""
    with nothing_pending():
        base.device_print(prefix, x.tile() if isinstance(x, Tensor) else x)


def broadcast_to(src: Any, *, shape: Any) -> Tensor:
    """Return `src` broadcast to `shape`."""
    return functions.broadcast(src, tuple(shape))


def expand_dims(data: Any, axis: Any) -> Any:
    """Return a view with dimensions of size 1 at `axis`."""
    return data.expand_dims(axis)
