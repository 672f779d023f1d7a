"""DMA instructions: dma_copy, dma_transpose, dma_compute."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nmm_compiler.errors import KernelArgumentError, OperandError, UnsupportedInstructionError
from nmm_compiler.simulator.isa import poison
from nmm_compiler.simulator.isa.enums import dge_mode, engine, oob_mode
from nmm_compiler.simulator.isa.instruction import Call, Steps, attributes, instruction
from nmm_compiler.simulator.isa.operands import (
    DMA_MEMORIES,
    SBUF,
    check_conversion,
    check_hazard,
    check_priority,
    require,
)
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32, put
from nmm_compiler.simulator.tensors.dtypes import cast
from nmm_compiler.simulator.tensors.indirect import gather, positions, scatter, store_at
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_UNKNOWN, _SKIP = engine.unknown, oob_mode.skip
_ISSUERS = {engine.sync: "sync", engine.scalar: "scalar", engine.gpsimd: "gpsimd"}


def _issue(call: Call, mode: Any, given: Any, same_dtype: bool) -> tuple[str, str]:
    """Return (issuing engine, DGE mode) after their rules."""
    name = mode.name
    if name == "hwdge":
        require(call, f"{call.op}(dge_mode=hwdge)", lambda t: t.dma_generates_descriptors)
        if not same_dtype:
            raise call.error(
                OperandError,
                "hwdge cannot convert dtypes; use the same dtype or another dge_mode",
            )
    if given is _UNKNOWN:
        return ("gpsimd" if name == "swdge" else "sync"), name
    if given not in (engine.sync, engine.scalar) and name == "hwdge":
        raise call.error(
            OperandError,
            f"hwdge descriptors come from the sync or scalar engine, not {given}",
        )
    if name != "hwdge":
        call.rule(
            OperandError,
            f"engine={given.name} with dge_mode {name}; only hwdge takes an engine, leave it unset "
            "or pass dge_mode=nisa.dge_mode.hwdge",
        )
    return _ISSUERS.get(given, "sync"), name


def _check_dynamic(call: Call, views: tuple[NkiTensor, ...], mode: str) -> None:
    """Refuse a runtime address where descriptors are made before the run."""
    for view in views:
        if view.indirection is not None and mode == "none":
            raise call.error(
                OperandError,
                f"{view.name!r} has a runtime address, dge_mode none makes descriptors before the "
                "run; leave dge_mode unset",
            )
        if view.indirection is not None and view.indirection.kind == "vector":
            if view.memory != "hbm":
                raise call.error(
                    OperandError,
                    f"vector_offset on {view.name!r} in {view.memory.upper()}; the indexed tensor "
                    "must be in HBM",
                )
            if mode == "hwdge":
                raise call.error(
                    OperandError,
                    "gather and scatter need software descriptors, not hwdge; leave dge_mode "
                    "unset or use swdge",
                )


@instruction(
    engines=("dma",),
    operands="src[N] -> dst[N]",
    memory=DMA_MEMORIES,
    streams=("src",),
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
    check_priority(call, priority)
    _check_dynamic(call, (dst, src), mode)
    chosen_rows = _chooses_rows(dst) or _chooses_rows(src)
    if chosen_rows:
        issuer = "gpsimd"
    yield attributes(issuer=issuer, dge_mode=mode, transpose=False, indirect=chosen_rows)
    values, valid = gather(src, oob_mode is _SKIP)
    if not same:
        values = values.astype(F32)
    if dst.indirection is not None:
        scatter(dst, values, oob_mode is _SKIP)
    elif valid is not None:  # rows whose index was out of bounds keep what they had
        keep = np.repeat(valid, values.size // src.shape[0]).reshape(dst.shape)
        stored = cast(values.reshape(dst.shape), dst.dtype)
        store_at(dst, positions(dst)[0].reshape(dst.shape)[keep], stored[keep])
    else:
        put(dst, values, exact=same)


def _chooses_rows(view: NkiTensor) -> bool:
    """Return whether an index tensor chooses rows of the view."""
    return view.indirection is not None and view.indirection.kind == "vector"


@instruction(
    engines=("dma",),
    operands="src -> dst",
    memory=DMA_MEMORIES,
    memories={"dst": SBUF},
    same_dtype=("dst", "src"),
    packed=True,
    flows={"dst": poison.dma_transpose},
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
    order = poison.TURNED.get(rank)
    given = axes is None or (isinstance(axes, (tuple, list)) and tuple(axes) == order)
    if order is None or not given:
        raise call.error(
            OperandError,
            f"src {src.shape} with axes {axes}; axes are (1, 0), (2, 1, 0) "
            "or (3, 1, 2, 0) for 2, 3 or 4 dimensions",
        )
    expected = tuple(src.shape[a] for a in order)
    if dst.shape != expected:
        raise call.error(
            OperandError,
            f"dst {dst.name!r} {dst.shape}, src {src.shape} transposes to {expected}",
        )
    check_priority(call, priority)
    _check_alignment(call, dst)
    mode = dge_mode.name
    indirect = _chooses_rows(src)
    if dst.indirection is not None:
        raise call.error(OperandError, f"dst {dst.name!r} has a runtime address; copy it later")
    if src.indirection is None and oob_mode is _SKIP:
        raise call.error(
            OperandError,
            "oob_mode.skip without a runtime index, a direct transpose has none; leave it unset",
        )
    _check_dynamic(call, (src,), mode if indirect else "unknown")
    _check_transpose_mode(call, src, mode, indirect)
    issuer = "gpsimd" if indirect else "sync"
    yield attributes(issuer=issuer, dge_mode=mode, transpose=True, indirect=indirect)
    values, valid = gather(src, oob_mode is _SKIP)
    if valid is not None:
        rows = valid.reshape((-1,) + (1,) * (rank - 1))
        values = np.where(rows, values, np.zeros((), values.dtype))
    put(dst, values.transpose(order), exact=True)


def _check_alignment(call: Call, dst: NkiTensor) -> None:
    """Warn of rows of dst that start at no multiple of 32 bytes.

    No document says so, nki-library does: "DMA_transpose requires align=32" (qkv_cte.py).
    """
    size = dst.dtype.item_bytes
    rows = zip(dst.shape[:-1], dst.strides[:-1], strict=True)
    apart = [stride * size for extent, stride in rows if extent > 1]
    if any(distance % 32 for distance in apart):
        call.warn(
            f"rows of dst {dst.name!r} lie {max(apart)} bytes apart, and "
            "AWS's kernels keep them at multiples of 32; give dst a longer last dimension and pass "
            "a slice of it"
        )


def _check_transpose_mode(call: Call, src: NkiTensor, mode: str, indirect: bool) -> None:
    allowed = ("unknown", "swdge") if indirect else ("unknown", "hwdge")
    if mode == "none" and src.indirection is None:
        call.warn(
            "dge_mode none; its reference lets a direct transpose take unknown "
            "or hwdge, the guide of DMA descriptors (nki-dge) and nki-library none too"
        )
    elif mode not in allowed:
        raise call.error(
            OperandError,
            f"dge_mode {mode}; {'indirect' if indirect else 'direct'} "
            f"transposes take {' or '.join(allowed)}",
        )
    if indirect:
        shape = src.shape
        if src.dtype.item_bytes != 2 or shape[0] % 16 or shape[-1] > 128:
            raise call.error(
                OperandError,
                f"indirect: src {shape} {src.dtype}; 2-byte dtype, rows "
                "a multiple of 16, last dimension at most 128",
            )
        if len(shape) == 4 and 1 not in shape[1:3]:
            raise call.error(
                OperandError,
                f"indirect: src {shape}; of a 4-D src the second or third dimension must be 1",
            )
        _check_transpose_index(call, src)
        return
    # descriptors made beforehand take no runtime address: the hardware makes them then (nki-dge)
    if mode != "hwdge" and src.indirection is None:
        return
    first, rank = src.shape[0], len(src.shape)
    ok = src.dtype.item_bytes == 2 and src.shape[-1] <= 128
    if rank == 2:
        ok = ok and first == 16
    else:
        ok = ok and first in (1, 2, 4, 8, 16) and (first * src.shape[-2]) % 16 == 0
    if not ok:
        raise call.error(
            OperandError,
            "by hwdge, which dge_mode or a runtime address asks for: src "
            f"{src.shape} {src.dtype}; 2-byte dtype, last dimension at most 128, and 16 rows (2-D) "
            "or rows in 1, 2, 4, 8, 16 with rows * shape[-2] a multiple of 16 (3-D, 4-D)",
        )


def _check_transpose_index(call: Call, src: NkiTensor) -> None:
    """Check the index tensor of an indirect transpose: its rows' indices, column by column."""
    index = src.indirection.index
    if index.__class__ is not NkiTensor:
        raise call.error(
            OperandError,
            f"indirect: the index is {type(index).__name__}; pass an SBUF tensor",
        )
    shape, rows = index.shape, index.shape[0]
    if index.dtype != "uint32":
        raise call.error(
            OperandError,
            f"indirect: the index {index.name!r} is {index.dtype}; it must be uint32",
        )
    if (
        len(shape) != 2
        or not 16 <= rows <= 128
        or rows % 16
        or (shape[1] > 1 and rows != 128)
        or index.size < src.shape[0]
    ):
        raise call.error(
            OperandError,
            f"indirect: index {index.name!r} {shape} for {src.shape[0]} rows; "
            "2-D, 16 to 128 rows in steps of 16, 128 when it has more than one column, and an "
            "index for each row",
        )


def _check_read_modify_write(call: Call, dst: NkiTensor, srcs: list[NkiTensor]) -> None:
    """Check dma_compute with row indices: dst[i] += SBUF data, or SBUF dst += src[i]."""
    if len(srcs) != 2:
        raise call.error(OperandError, f"{len(srcs)} sources with row indices; it takes exactly 2")
    rows = [s for s in srcs if _chooses_rows(s)]
    plain = [s for s in srcs if not _chooses_rows(s)]
    if _chooses_rows(dst):
        fits = len(rows) == 1 and rows[0].storage is dst.storage and plain[0].memory == "sbuf"
        wanted = "one source with the indices and storage of dst, the other in SBUF"
    else:
        fits = len(rows) == 1 and dst.memory == "sbuf" and plain[0].storage is dst.storage
        wanted = "dst in SBUF, which is also the source without indices"
    if not fits:
        raise call.error(OperandError, f"read-modify-write by row indices needs {wanted}")


@instruction(
    engines=("dma",),
    operands="-> dst",
    memory=DMA_MEMORIES,
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
    if not isinstance(srcs, (list, tuple)):
        raise call.error(KernelArgumentError, f"srcs is {type(srcs).__name__}; pass a list")
    srcs = list(srcs)
    if not 1 <= len(srcs) <= 16:
        raise call.error(OperandError, f"{len(srcs)} sources; it takes 1 to 16")
    if scales is not None and (
        not isinstance(scales, (list, tuple)) or any(s != 1.0 for s in scales)
    ):
        raise call.error(UnsupportedInstructionError, f"scales {scales}; all must be 1.0")
    for s in srcs:
        call.read("src", s, DMA_MEMORIES)
    for s in srcs:
        if s.size != dst.size:
            raise call.error(
                OperandError,
                f"src {s.shape} and dst {dst.shape} differ in size",
            )
    for view in (dst, *srcs):
        if view.indirection is not None and not _chooses_rows(view):
            raise call.error(
                OperandError,
                f"{view.name!r} has a runtime address; only vector_offset may choose rows at run "
                "time, use nisa.dma_copy",
            )
    indirect = _chooses_rows(dst) or any(_chooses_rows(s) for s in srcs)
    if indirect:
        if not unique_indices:
            raise call.error(UnsupportedInstructionError, "unique_indices must be True")
        _check_dynamic(call, (dst, *srcs), "swdge")
        _check_read_modify_write(call, dst, srcs)
    elif oob_mode is _SKIP:
        raise call.error(OperandError, "oob_mode.skip without row indices; leave it unset")
    for s in srcs:
        check_hazard(call, dst, s, True)
    issuer, mode = ("gpsimd", "swdge") if indirect else ("sync", "none")
    yield attributes(issuer=issuer, dge_mode=mode, transpose=False, indirect=indirect)
    parts = [gather(s, oob_mode is _SKIP)[0].astype(F32).reshape(dst.shape) for s in srcs]
    total = functools.reduce(np.add, parts)
    if dst.indirection is not None:
        scatter(dst, total, oob_mode is _SKIP, adds=True)
    else:
        put(dst, total)
