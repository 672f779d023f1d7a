"""Copies one row to all partitions as the NKI compiler does: TensorE multiplies it by ones.

The products are exact (one term each, in float32), so the values are the row's, bit for bit.
Source: the profile and the text of the fused_mamba tutorial (aws-neuron-sdk).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nmm_compiler.simulator.isa import activation, elementwise, tensor_engine
from nmm_compiler.simulator.language.base import ndarray, psum, sbuf
from nmm_compiler.simulator.language.device_loops import of_the_whole_program
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import float32
from nmm_compiler.simulator.tensors.tensor import NkiTensor

EXACT_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def spread_by_product(machine: Machine, dst: NkiTensor, row: NkiTensor, copied: Any) -> None:
    """Write one row to all partitions of dst: ones times the row, one PSUM bank at a time.

    dst: (partitions, ...) and row: (1, ...) in SBUF, of one dtype of EXACT_DTYPES. copied: nl.copy.
    """
    key = ("ones", row.dtype.name)
    ones = machine.identities.get(key)
    if ones is None:  # a constant of the program, written once
        with of_the_whole_program(machine):
            ones = machine.identities[key] = ndarray((1, 128), row.dtype, sbuf, "broadcast_ones")
            elementwise.memset(ones, 1.0)
    for block in _blocks(row.shape[1:], machine.target.psum_bank_bytes_per_partition // 4):
        where = (slice(None), *block)
        moving = row[where]
        wide = ndarray((dst.shape[0], *moving.shape[1:]), float32, psum, "")
        tensor_engine.nc_matmul(wide, ones[:, : dst.shape[0]], moving, is_stationary_onezero=True)
        activation.activation(dst[where], copied, wide)


def _blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut `shape` into blocks of at most `limit` elements."""
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    step = max(limit // inner, 1)
    for start in range(0, shape[0], step):
        first = slice(start, min(start + step, shape[0]))
        for rest in _blocks(shape[1:], limit if inner > limit else inner):
            yield (first, *rest)
