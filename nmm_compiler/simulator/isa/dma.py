"""DMA instructions: dma_copy, dma_transpose, dma_compute."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nmm_compiler.errors import UnsupportedInstructionError
from nmm_compiler.simulator.isa.enums import dge_mode, engine, oob_mode
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import (
    DMA_MEMORIES,
    SBUF,
    Call,
    check_conversion,
    require,
)
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32, put
from nmm_compiler.simulator.tensors.elements import read
from nmm_compiler.simulator.tensors.tensor import NkiTensor

TURNED = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
"""The order of dimensions that nisa.dma_transpose leaves, by their number."""
_UNKNOWN, _SKIP = engine.unknown, oob_mode.skip


def _issue(call: Call, mode: Any, given: Any, same_dtype: bool) -> tuple[str, str]:
    """Return (issuing engine, DGE mode) after their rules."""
    name = mode.name
    if name == "hwdge":
        require(call, f"{call.op}(dge_mode=hwdge)", lambda t: t.dma_generates_descriptors)
        call.need(same_dtype, "hwdge cannot convert dtypes; make them equal or drop dge_mode")
    if given is _UNKNOWN:
        return ("gpsimd" if name == "swdge" else "sync"), name
    call.need(
        name != "hwdge" or given in (engine.sync, engine.scalar),
        "hwdge descriptors come from the sync or scalar engine",
    )
    call.should(name == "hwdge", "only hwdge takes an engine; unset it or pass dge_mode.hwdge")
    return given.name, name


def _check_dynamic(call: Call, views: tuple[NkiTensor, ...], mode: str) -> None:
    """Refuse a runtime address where descriptors are made before the run."""
    for view in views:
        if view.indirection is not None:
            call.need(mode != "none", "dge_mode.none takes no runtime address; leave it unset")
        if _chooses_rows(view):
            call.need(
                view.memory == "hbm" and mode != "hwdge",
                "a tensor with a vector_offset must be in HBM, and takes no hwdge; leave dge_mode "
                "unset",
            )


@instruction(
    engines="dma",
    operands="src[N] -> dst[N]",
    memory=DMA_MEMORIES,
    streams="src",
    packed=True,
)
def dma_copy(
    call: Call,
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = dge_mode.unknown,
    engine: Any = _UNKNOWN,
) -> Steps:
    """dst = src between HBM and SBUF, with a dtype conversion through float32."""
    same = dst.dtype == src.dtype
    if not same:
        check_conversion(call, dst, src)
    issuer, mode = _issue(call, dge_mode, engine, same)
    _check_dynamic(call, (dst, src), mode)
    chosen_rows = _chooses_rows(dst) or _chooses_rows(src)
    if chosen_rows:
        issuer = "gpsimd"
    yield {"issuer": issuer, "dge_mode": mode, "indirect": chosen_rows}
    values, valid = read(src, skip=oob_mode is _SKIP)
    if not same:
        values = values.astype(F32)
    # rows whose index was out of bounds keep what they had
    where = None if valid is None else np.repeat(valid, values.size // src.shape[0])
    put(dst, values, exact=same, where=where, skip=oob_mode is _SKIP)


def _chooses_rows(view: NkiTensor) -> bool:
    """Return whether an index tensor chooses rows of the view."""
    return view.indirection is not None and view.indirection.kind == "vector"


@instruction(
    engines="dma",
    operands="src -> dst",
    memory=DMA_MEMORIES,
    memories={"dst": SBUF},
    same_dtype="dst src",
    packed=True,
)
def dma_transpose(
    call: Call,
    dst: Any,
    src: Any,
    axes: Any = None,
    priority: Any = None,
    dge_mode: Any = dge_mode.unknown,
    oob_mode: Any = oob_mode.error,
) -> Steps:
    """dst = src with its first and last dimensions swapped, by DMA, into SBUF."""
    require(call, "dma_transpose", lambda t: t.dma_transposes, "use nisa.nc_transpose")
    rank = len(src.shape)
    order = TURNED.get(rank, ())
    call.need(
        order and (axes is None or (isinstance(axes, (tuple, list)) and tuple(axes) == order)),
        "axes of 2, 3 or 4 dimensions are (1, 0), (2, 1, 0) or (3, 1, 2, 0)",
    )
    expected = tuple(src.shape[a] for a in order)
    call.need(dst.shape == expected, f"the shape of dst must be {expected}")
    mode = dge_mode.name
    indirect = _chooses_rows(src)
    call.need(dst.indirection is None, "dst has a runtime address; copy it later")
    call.need(
        src.indirection is not None or oob_mode is not _SKIP,
        "oob_mode.skip without a runtime index; unset it",
    )
    _check_dynamic(call, (src,), mode if indirect else "unknown")
    _check_transpose_mode(call, src, mode, indirect)
    issuer = "gpsimd" if indirect else "sync"
    yield {"issuer": issuer, "dge_mode": mode, "transpose": True, "indirect": indirect}
    values, valid = read(src, skip=oob_mode is _SKIP)
    if valid is not None:
        rows = valid.reshape((-1,) + (1,) * (rank - 1))
        values = np.where(rows, values, np.zeros((), values.dtype))
    call.move = lambda elements: elements.transpose(order)
    put(dst, call.move(values), exact=True)


def _check_transpose_mode(call: Call, src: NkiTensor, mode: str, indirect: bool) -> None:
    shape, direct = src.shape, src.indirection is None
    first, rank = shape[0], len(shape)
    two_bytes = src.dtype.item_bytes == 2 and shape[-1] <= 128
    if indirect:
        middle = rank < 4 or 1 in shape[1:3]
        call.need(
            mode in ("unknown", "swdge") and two_bytes and first % 16 == 0 and middle,
            "row indices take no dge_mode but swdge, a 2-byte dtype, rows in steps of 16, a last "
            "dimension up to 128, and a 4-D src whose second or third dimension is 1",
        )
        index = src.indirection.index
        sides: tuple[int, ...] = getattr(index, "shape", ())
        walked = len(sides) == 2 and sides[0] in range(16, 129, 16)
        call.need(
            walked
            and (sides[1] == 1 or sides[0] == 128)
            and index.dtype == "uint32"
            and index.size >= first,
            "the index is a 2-D uint32 tensor in SBUF of 16 to 128 rows in steps of 16, 128 when "
            "it has more than one column, with an index for each row",
        )
        return
    if mode == "none" and direct:
        call.machine.warn(
            f"{call.name}: dge_mode none; its reference lets a direct transpose take unknown "
            "or hwdge, the guide of DMA descriptors (nki-dge) and nki-library none too"
        )
    else:
        call.need(mode in ("unknown", "hwdge"), "a direct transpose takes dge_mode.hwdge or none")
    # descriptors made beforehand take no runtime address: the hardware makes them then (nki-dge)
    if mode != "hwdge" and direct:
        return
    rows = first == 16
    if rank > 2:
        rows = first in (1, 2, 4, 8, 16) and (first * shape[-2]) % 16 == 0
    call.need(
        two_bytes and rows,
        "hwdge, which dge_mode or a runtime address asks for, takes a 2-byte dtype, a last "
        "dimension up to 128, and 16 rows (2-D) or 1, 2, 4, 8 or 16 with rows * shape[-2] a "
        "multiple of 16 (3-D, 4-D)",
    )


def _check_read_modify_write(call: Call, dst: NkiTensor, srcs: list[NkiTensor]) -> None:
    """Check dma_compute with row indices: dst[i] += SBUF data, or SBUF dst += src[i]."""
    plain, *rows = sorted(srcs, key=_chooses_rows)
    of_dst, in_sbuf = (rows[0], plain) if rows and _chooses_rows(dst) else (plain, dst)
    call.need(
        [_chooses_rows(s) for s in rows] == [True]
        and not _chooses_rows(plain)
        and of_dst.storage is dst.storage
        and in_sbuf.memory == "sbuf",
        "with row indices it takes two sources: one has the indices and storage of dst and the "
        "other is in SBUF, or the one without indices is dst in SBUF",
    )


@instruction(
    engines="dma",
    operands="srcs -> dst",
    lists="srcs",
    memory=DMA_MEMORIES,
    streams="srcs",
    operators={"reduce_op": Takes("", ("add",))},
)
def dma_compute(
    call: Call,
    dst: Any,
    srcs: Any,
    reduce_op: Any,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: Any = oob_mode.error,
) -> Steps:
    """dst = sum of srcs in float32, computed by the DMA engines."""
    call.need(len(srcs) <= 16, "it takes 1 to 16 sources")
    call.need(
        scales is None or (isinstance(scales, (list, tuple)) and all(s == 1.0 for s in scales)),
        "all scales must be 1.0",
        UnsupportedInstructionError,
    )
    for view in (dst, *srcs):
        call.need(
            view.size == dst.size and (view.indirection is None or _chooses_rows(view)),
            "sources and dst must have one size, and only vector_offset may choose rows at run "
            "time; use nisa.dma_copy",
        )
    indirect = any(_chooses_rows(view) for view in (dst, *srcs))
    if indirect:
        call.need(unique_indices, "unique_indices must be True", UnsupportedInstructionError)
        _check_dynamic(call, (dst, *srcs), "swdge")
        _check_read_modify_write(call, dst, list(srcs))
    else:
        call.need(oob_mode is not _SKIP, "oob_mode.skip without row indices; leave it unset")
    issuer, mode = ("gpsimd", "swdge") if indirect else ("sync", "none")
    yield {"issuer": issuer, "dge_mode": mode, "indirect": indirect}
    skips = oob_mode is _SKIP
    parts = [read(s, skip=skips)[0].astype(F32).reshape(dst.shape) for s in srcs]
    total = functools.reduce(np.add, parts)
    put(dst, total, skip=skips, adds=True)
