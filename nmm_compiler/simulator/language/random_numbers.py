"""`nki.language` random functions: rand, random_seed, dropout."""

from __future__ import annotations

from typing import Any

from nmm_compiler.simulator.isa import dma, elementwise, random_numbers
from nmm_compiler.simulator.language.base import dtype_of, ndarray, sbuf
from nmm_compiler.simulator.language.exports import exported
from nmm_compiler.simulator.language.math import FUNCTIONS
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.dtypes import int32, uint16
from nmm_compiler.simulator.tensors.tensor import NkiTensor


@exported
def rand(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return uniform random values in [0, 1): 16 random bits each."""
    bits = ndarray(shape, uint16, sbuf, "")
    random_numbers.rng(bits)
    result = ndarray(shape, dtype, buffer, name)
    target = ndarray(shape, dtype, sbuf, "") if result.memory == "hbm" else result
    elementwise.tensor_scalar(target, bits, FUNCTIONS["multiply"], 1.0 / 65536.0)
    if target is not result:
        dma.dma_copy(result, target)
    return result


@exported
def random_seed(seed: Any) -> None:
    """Seed the generator: a [1, 1] tensor or an integer."""
    if not isinstance(seed, NkiTensor):
        tile = ndarray((1, 1), int32, sbuf, "")
        elementwise.memset(tile, int(seed))
        seed = tile
    random_numbers.set_rng_seed(seed)


@exported
def dropout(x: Any, rate: Any, dtype: Any = None) -> NkiTensor:
    """Return x with elements zeroed with probability `rate`."""
    result = ndarray(x.shape, x.dtype, sbuf, "")
    random_numbers.dropout(result, x, rate)
    kind = x.dtype if dtype is None else dtype_of(current(), dtype)
    return result if kind == x.dtype else FUNCTIONS["copy"](result, kind)
