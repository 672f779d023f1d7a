"""`neuronxcc.nki.language`: its names, ranges, and the programs of a launch grid.

Loops run as Python: the Beta 1 compiler traced a loop's body once and unrolled it later, so a
loop variable is an integer here.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from nmm_compiler.simulator.beta1 import math as functions
from nmm_compiler.simulator.beta1.creation import (
    empty_like,
    full,
    ndarray,
    ones,
    par_dim,
    rand,
    random_seed,
    shared_constant,
    shared_identity_matrix,
    zeros,
    zeros_like,
)
from nmm_compiler.simulator.beta1.index import arange, mgrid
from nmm_compiler.simulator.beta1.indexing import index
from nmm_compiler.simulator.beta1.moves import (
    atomic_rmw,
    broadcast_to,
    device_print,
    expand_dims,
    load,
    load_transpose2d,
    store,
)
from nmm_compiler.simulator.beta1.pending import (
    session,
)
from nmm_compiler.simulator.beta1.tensor import (
    OPERATIONS,
    kind_of,
    numpy_dtype,
)
from nmm_compiler.simulator.language.base import (
    hbm,
    private_hbm,
    psum,
    sbuf,
    shared_hbm,
    tile_size,
)
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import DynamicSlice

NAMES: dict[str, Any] = dict(functions.NAMES)
OPERATIONS["index"] = index


def affine_range(*args: Any, **options: Any) -> range:
    """Return range(*args); iterations may run in any order on the device."""
    return range(*(int(a) for a in args))


def program_id(axis: int) -> int:
    """Return this program's index along an axis of the launch grid."""
    now = session()
    return now.program[axis] if now.grid else 0


def num_programs(axes: Any = None) -> int:
    """Return the number of programs along axes of the launch grid; of all without axes."""
    grid = session().grid
    if axes is None:
        return math.prod(grid)
    return math.prod(grid[a] for a in ([axes] if isinstance(axes, int) else axes)) if grid else 1


def program_ndim() -> int:
    """Return the number of dimensions of the launch grid."""
    return len(session().grid)


class SpmdDim:
    """A dimension of a launch grid made of two: `nl.spmd_dim(outer, inner)`, one of them nl.nc."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self.outer, self.inner = outer, inner

    @property
    def size(self) -> int:
        """Programs along the dimension."""
        return int(self.outer) * int(self.inner)

    def core(self, index: int) -> int:
        """Return the core that runs program `index` of the dimension."""
        outer, inner = divmod(index, int(self.inner))
        return outer if isinstance(self.outer, nc) else inner if isinstance(self.inner, nc) else 0

    @property
    def cores(self) -> int:
        """Cores that the dimension is spread over."""
        return max((int(p) for p in (self.outer, self.inner) if isinstance(p, nc)), default=1)


class nc(int):  # noqa: N801  (the name NKI gives it)
    """A dimension of a launch grid whose programs run on cores of their own."""

    def __new__(cls, size: int) -> nc:
        """Return the dimension of `size` cores."""
        return super().__new__(cls, size)

    def __mul__(self, other: Any) -> Any:
        return SpmdDim(self, other)

    def __rmul__(self, other: Any) -> Any:
        return SpmdDim(other, self)


def finfo(dtype: Any) -> Any:
    """Return the limits of a float dtype, as numpy.finfo."""
    return ml_dtypes.finfo(kind_of(dtype).numpy)


class _Limits:
    """`nl.fp32` and `nl.bfp16`: the least value of the format."""

    def __init__(self, least: float) -> None:
        self.min = least


NAMES.update(
    {
        "fp32": _Limits(float(np.finfo(np.float32).min)), "bfp16": _Limits(-math.inf),
        "sbuf": sbuf, "psum": psum, "hbm": hbm, "private_hbm": private_hbm,
        "shared_hbm": shared_hbm, "tile_size": tile_size, "mgrid": mgrid, "arange": arange,
        "affine_range": affine_range, "sequential_range": affine_range,
        "static_range": affine_range, "spmd_dim": SpmdDim, "nc": nc, "par_dim": par_dim,
        "ds": DynamicSlice, "bool_": np.bool_, "finfo": finfo,
    }
)  # fmt: skip
for _function in (
    ndarray, full, zeros, ones, zeros_like, empty_like, rand, random_seed, shared_constant,
    shared_identity_matrix, load, store, load_transpose2d, atomic_rmw, device_print, broadcast_to,
    expand_dims, program_id, num_programs, program_ndim,
):  # fmt: skip
    NAMES[_function.__name__] = _function
for _name in ["int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"]:
    NAMES[_name] = getattr(np, _name)
for _name in ["bfloat16", "float8_e4m3", "float8_e5m2", "tfloat32"]:
    NAMES[_name] = numpy_dtype(getattr(dtypes, _name))
