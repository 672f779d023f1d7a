"""How TensorE writes PSUM: within banks, by overwriting or by accumulating."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import SimulationError, TensorShapeError
from nmm_compiler.simulator.isa.values import F32, f32, matmul_state, put
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def check_bank(machine: Machine, op: str, dst: NkiTensor, banks: int = 1) -> None:
    """Check that dst lies in as many PSUM banks as one matmul may write."""
    bank = machine.target.psum_bank_bytes_per_partition
    if dst.storage.bytes_per_partition <= bank and dst.storage.address is None:
        return
    access = dst.access()
    base = dst.storage.address[1] if dst.storage.address else 0
    first = (base + access.byte_start) // bank
    last = (base + access.byte_stop - 1) // bank
    if last - first >= banks:
        raise machine.error(
            TensorShapeError,
            f"nisa.{op}: dst {dst.name!r} covers bytes {access.byte_start}..{access.byte_stop} of "
            f"its PSUM partition and so crosses a bank of {bank} B; write one bank at a time",
        )


def accumulate_product(
    machine: Machine, dst: NkiTensor, product: np.ndarray, accumulate: Any
) -> None:
    """Write a product to dst, or add it to earlier products there; None: PSUM's state decides."""
    if product.shape != dst.shape:
        product = product.reshape(dst.shape)
    storage = dst.storage
    key = (dst.offset, dst.shape, dst.strides)
    if storage.products == key and accumulate is not False and dst.dtype == "float32":
        _note_sum(machine, accumulate, True)
        target = dst.array()  # the same region as the matmul before has the same state
        target += product
        return
    state = matmul_state(dst)
    storage.products = key
    if accumulate is False:
        put(dst, product)
        state[...] = 1
        return
    if accumulate:
        if not state.all():
            machine.rule(
                SimulationError,
                f"nisa.nc_matmul(accumulate=True) into {dst.name!r}, where no matmul has written "
                "yet: undefined on hardware; start with accumulate=False (or leave it unset)",
            )
            target = dst.array()
            target[state == 0] = 0
        elif state.max() == 2 and not machine.target.matmul_adds_to_written_psum:
            machine.rule(
                SimulationError,
                f"nisa.nc_matmul(accumulate=True) into {dst.name!r}, which memset or another "
                "engine wrote: undefined before trn3; start with accumulate=False",
            )
        put(dst, f32(dst) + product)
        state[...] = 1
        return
    _note_sum(machine, accumulate, bool(state.any()))
    if state.any():
        if state.max() == 2 and not machine.target.matmul_adds_to_written_psum:
            text = (
                f"nisa.nc_matmul accumulates into {dst.name!r}, which memset or another engine "
                "wrote: undefined before trn3; pass accumulate=False for the first matmul"
            )
            if (dst.array()[state == 2] == 0).all():
                machine.warn(text)  # overwriting and adding to zeros are the same
            else:
                machine.rule(SimulationError, text)
        if state.all():
            target = dst.array()
            if target.dtype == F32:
                target += product
            else:
                put(dst, f32(dst) + product)
        else:
            mask = dst.missing()
            if mask is not None and (mask & (state != 0)).any():
                machine.poisoned.append((dst, mask & (state != 0), storage.origin))
            old = np.where(state != 0, dst.array().astype(F32), F32(0))
            put(dst, old + product)
    else:
        put(dst, product)
    state[...] = 1


def _note_sum(machine: Machine, accumulate: Any, adds: bool) -> None:
    """Tell a loop on the device whether a product adds: the compiler decides that once."""
    if machine.turn is not None and accumulate is None:
        machine.note("nc_matmul(accumulate=None) that adds" if adds else
                     "nc_matmul(accumulate=None) that overwrites")  # fmt: skip
