"""How TensorE writes PSUM: within banks, by overwriting or by accumulating."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import SimulationError, TensorShapeError
from nmm_compiler.simulator.isa.instruction import Call
from nmm_compiler.simulator.isa.values import F32, OTHER, f32, put, writers_of
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.indirect import gather
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def check_bank(call: Call, dst: NkiTensor, banks: int) -> None:
    """Check that dst lies in as many PSUM banks as one matmul may write."""
    bank = call.machine.target.psum_bank_bytes_per_partition
    if dst.storage.bytes_per_partition <= bank and dst.storage.address is None:
        return
    access = dst.access()
    base = dst.storage.address[1] if dst.storage.address else 0
    first = (base + access.byte_start) // bank
    last = (base + access.byte_stop - 1) // bank
    if last - first >= banks:
        raise call.error(
            TensorShapeError,
            f"dst {dst.name!r} covers bytes {access.byte_start}..{access.byte_stop} of "
            f"its PSUM partition and so crosses a bank of {bank} B; write one bank at a time",
        )


def accumulate_product(
    machine: Machine, dst: NkiTensor, product: np.ndarray, accumulate: Any
) -> None:
    """Write a product to dst, or add it to earlier products there; None: PSUM's state decides."""
    if product.shape != dst.shape:
        product = product.reshape(dst.shape)
    storage, direct = dst.storage, dst.indirection is None
    key = (dst.offset, dst.shape, dst.strides) if direct else None
    if direct and storage.products == key and accumulate is not False and dst.dtype == "float32":
        _note_sum(machine, accumulate, True)
        target = dst.array()  # the same region as the matmul before has the same writers
        target += product
        return
    writers = writers_of(dst)
    adds = accumulate is not False and (accumulate or bool(writers.any()))
    if accumulate is None:
        _note_sum(machine, accumulate, adds)
    if adds:
        _check_sum(machine, dst, writers, accumulate)
        product = _earlier(machine, dst, writers) + product
    put(dst, product, product=True)
    storage.products = key


def _check_sum(machine: Machine, dst: NkiTensor, writers: np.ndarray, accumulate: Any) -> None:
    """Check that a product adds to products."""
    if accumulate and not writers.all():
        machine.rule(
            SimulationError,
            f"nisa.nc_matmul(accumulate=True) into {dst.name!r}, where no matmul has written "
            "yet: undefined on hardware; start with accumulate=False (or leave it unset)",
        )
    elif writers.max() == OTHER and not machine.target.matmul_adds_to_written_psum:
        text = (
            f"nisa.nc_matmul(accumulate={accumulate}) adds to {dst.name!r}, which memset or "
            "another engine wrote: undefined before trn3; pass accumulate=False for the first "
            "matmul"
        )
        if accumulate is None and (_stored(dst)[writers == OTHER] == 0).all():
            machine.warn(text)  # overwriting and adding to zeros are the same
        else:
            machine.rule(SimulationError, text)


def _stored(dst: NkiTensor) -> np.ndarray:
    return dst.array() if dst.indirection is None else gather(dst)[0]


def _earlier(machine: Machine, dst: NkiTensor, writers: np.ndarray) -> np.ndarray:
    """Return what a product is added to: zeros where nobody has written."""
    if writers.all():
        return f32(dst)
    written = writers != 0
    mask = dst.missing() if dst.indirection is None else None
    if mask is not None and (mask & written).any():
        machine.poisoned.append((dst, mask & written, dst.storage.origin))
    return np.where(written, _stored(dst).astype(F32), F32(0))


def _note_sum(machine: Machine, accumulate: Any, adds: bool) -> None:
    """Tell a loop on the device whether a product adds: the compiler decides that once."""
    if machine.turn is not None and accumulate is None:
        machine.note("nc_matmul(accumulate=None) that adds" if adds else
                     "nc_matmul(accumulate=None) that overwrites")  # fmt: skip
