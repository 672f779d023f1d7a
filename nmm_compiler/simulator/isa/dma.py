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
    Issue,
    check_conversion,
)
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32
from nmm_compiler.simulator.tensors.elements import put, read
from nmm_compiler.simulator.tensors.tensor import NkiTensor

TURNED = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
"""The order of dimensions that nisa.dma_transpose leaves, by their number."""
_UNKNOWN, _SKIP = engine.unknown, oob_mode.skip


@instruction(
    engines="dma",
    operands="src[N] -> dst[N]",
    memory=DMA_MEMORIES,
    streams="src",
    packed=True,
)
def dma_copy(
    call: Issue,
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = dge_mode.unknown,
    engine: Any = _UNKNOWN,
) -> Steps:
    """dst = src between HBM and SBUF, with a dtype conversion through float32."""
    check_conversion(call, dst, src)
    same, mode, chosen_rows = dst.dtype == src.dtype, dge_mode.name, _chooses_rows(dst, src)
    if mode == "hwdge":
        call.machine.require("dma_copy(dge_mode=hwdge)", flag="dma_generates_descriptors")
        call.need(same, "hwdge cannot convert dtypes; make them equal or drop dge_mode")
    issuer = "gpsimd" if chosen_rows or mode == "swdge" else "sync"
    if engine is not _UNKNOWN:
        call.need(
            mode != "hwdge" or engine.name in ("sync", "scalar"),
            "hwdge descriptors come from the sync or scalar engine",
        )
        call.should(mode == "hwdge", "only hwdge takes an engine; unset it or pass dge_mode.hwdge")
        issuer = "gpsimd" if chosen_rows else engine.name
    yield {"issuer": issuer, "dge_mode": mode, "indirect": chosen_rows}
    values, valid = read(src, skip=oob_mode is _SKIP)
    if not same:
        values = values.astype(F32)
    # rows whose index was out of bounds keep what they had
    where = None if valid is None else np.repeat(valid, values.size // src.shape[0])
    put(dst, values, exact=same, where=where, skip=oob_mode is _SKIP)


def _chooses_rows(*views: NkiTensor) -> bool:
    """Return whether an index tensor chooses rows of one of the views."""
    return any(getattr(view.indirection, "kind", "") == "vector" for view in views)


@instruction(
    engines="dma",
    operands="src -> dst",
    memory=DMA_MEMORIES,
    memories={"dst": SBUF},
    same_dtype="dst src",
    packed=True,
)
def dma_transpose(
    call: Issue,
    dst: Any,
    src: Any,
    axes: Any = None,
    priority: Any = None,
    dge_mode: Any = dge_mode.unknown,
    oob_mode: Any = oob_mode.error,
) -> Steps:
    """dst = src with its first and last dimensions swapped, by DMA, into SBUF."""
    call.machine.require("dma_transpose", "use nisa.nc_transpose", "dma_transposes")
    rank = len(src.shape)
    order = TURNED.get(rank, ())
    call.need(
        order and (axes is None or (isinstance(axes, (tuple, list)) and tuple(axes) == order)),
        "axes of 2, 3 or 4 dimensions are (1, 0), (2, 1, 0) or (3, 1, 2, 0)",
    )
    expected = tuple(src.shape[a] for a in order)
    call.need(dst.shape == expected, f"the shape of dst must be {expected}")
    mode, direct, indirect = dge_mode.name, src.indirection is None, _chooses_rows(src)
    call.need(dst.indirection is None, "dst has a runtime address; copy it later")
    call.need(not (direct and oob_mode is _SKIP), "oob_mode.skip without a runtime index; unset it")
    two_bytes = src.dtype.item_bytes == 2 and src.shape[-1] <= 128
    if indirect:
        _check_row_indices(call, src, mode, two_bytes)
    elif mode == "none" and direct:
        call.machine.warn(
            f"{call.name}: dge_mode none; its reference lets a direct transpose take unknown "
            "or hwdge, the guide of DMA descriptors (nki-dge) and nki-library none too"
        )
    else:
        call.need(mode in ("unknown", "hwdge"), "a direct transpose takes dge_mode.hwdge or none")
        # descriptors made beforehand take no runtime address: the hardware makes them (nki-dge)
        few = src.shape[0] in ((16,) if rank == 2 else (1, 2, 4, 8, 16))
        call.need(
            (mode != "hwdge" and direct)
            or (two_bytes and few and (rank == 2 or src.shape[0] * src.shape[-2] % 16 == 0)),
            "hwdge, which dge_mode or a runtime address asks for, takes a 2-byte dtype, a last "
            "dimension up to 128, and 16 rows (2-D) or 1, 2, 4, 8 or 16 with rows * shape[-2] a "
            "multiple of 16 (3-D, 4-D)",
        )
    issuer = "gpsimd" if indirect else "sync"
    yield {"issuer": issuer, "dge_mode": mode, "transpose": True, "indirect": indirect}
    values, valid = read(src, skip=oob_mode is _SKIP)
    if valid is not None:
        rows = valid.reshape((-1,) + (1,) * (rank - 1))
        values = np.where(rows, values, np.zeros((), values.dtype))
    call.move = lambda elements: elements.transpose(order)
    put(dst, call.move(values), exact=True)


def _check_row_indices(call: Issue, src: NkiTensor, mode: str, two_bytes: bool) -> None:
    """Check dma_transpose of rows that an index tensor chooses."""
    rows, index = src.shape[0], src.indirection.index
    call.need(
        mode in ("unknown", "swdge")
        and two_bytes
        and rows % 16 == 0
        and (len(src.shape) < 4 or 1 in src.shape[1:3]),
        "row indices take no dge_mode but swdge, a 2-byte dtype, rows in steps of 16, a last "
        "dimension up to 128, and a 4-D src whose second or third dimension is 1",
    )
    sides: tuple[int, ...] = getattr(index, "shape", ())
    call.need(
        len(sides) == 2
        and sides[0] in range(16, 129, 16)
        and (sides[1] == 1 or sides[0] == 128)
        and index.dtype == "uint32"
        and index.size >= rows,
        "the index is a 2-D uint32 tensor in SBUF of 16 to 128 rows in steps of 16, 128 when "
        "it has more than one column, with an index for each row",
    )


def _check_read_modify_write(call: Issue, dst: NkiTensor, srcs: list[NkiTensor]) -> None:
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
    operands="srcs[N] -> dst[N]",
    lists="srcs",
    memory=DMA_MEMORIES,
    streams="srcs",
    operators={"reduce_op": Takes("", ("add",))},
)
def dma_compute(
    call: Issue,
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
    views, skips = (dst, *srcs), oob_mode is _SKIP
    indirect = _chooses_rows(*views)
    call.need(
        all(view.indirection is None or _chooses_rows(view) for view in views),
        "only vector_offset may choose rows at run time; use nisa.dma_copy",
    )
    call.need(
        unique_indices or not indirect, "unique_indices must be True", UnsupportedInstructionError
    )
    call.need(indirect or not skips, "oob_mode.skip without row indices; leave it unset")
    if indirect:
        _check_read_modify_write(call, dst, list(srcs))
    issuer, mode = ("gpsimd", "swdge") if indirect else ("sync", "none")
    yield {"issuer": issuer, "dge_mode": mode, "indirect": indirect}
    parts = [read(s, skip=skips)[0].astype(F32).reshape(dst.shape) for s in srcs]
    total = functools.reduce(np.add, parts)
    put(dst, total, skip=skips, adds=True)
