"""Kernels of Beta 1: `nki.jit` and similar decorators, launch grids, arguments as tensors.

A launch grid is any number of programs that share tensors in shared HBM. Programs of one core run
one after the other; `nl.nc(2)` spreads a dimension over two cores, which run at once as the
current dialect's LNC programs do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from nmm_compiler.errors import KernelArgumentError, SimulationError, UnsupportedInstructionError
from nmm_compiler.simulator.beta1.language import NAMES, Dimension, spmd_dim, store
from nmm_compiler.simulator.beta1.tensor import Session, Tensor, fail, session
from nmm_compiler.simulator.language.base import hbm, shared_hbm
from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.loading.standins import JitKernel, TensorType
from nmm_compiler.simulator.machine import CURRENT, current, defined_at, place_instructions
from nmm_compiler.simulator.tensors.tensor import NkiTensor

Grid = tuple[Dimension, ...]


def _mutable(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "mutable" in annotation
    return isinstance(annotation, TensorType) and annotation.mutable


def programs(grid: Grid, core: int) -> Iterator[tuple[int, ...]]:
    """Yield the programs of a launch grid that a core runs, in order."""
    for program in itertools.product(*(range(len(d)) for d in grid)):
        if sum(d[p] for d, p in zip(grid, program, strict=True)) == core:
            yield program


def _cores(grid: Grid) -> int:
    spread = [max(dimension) + 1 for dimension in grid]
    if sum(n > 1 for n in spread) > 1:
        sizes = tuple(map(len, grid))
        raise KernelArgumentError(f"launch grid {sizes} spreads two dimensions over cores; one may")
    return max(spread, default=1)


def _entry(function: Callable[..., Any], grid: Grid, checked: bool) -> Callable[..., Any]:
    """Return a kernel as the simulator calls it: with its own tensors, once per core."""

    @functools.wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        now = session()
        given = inspect.signature(function).bind(*args, **kwargs)
        for name, value in given.arguments.items() if checked else ():
            annotation = given.signature.parameters[name].annotation
            if isinstance(value, NkiTensor) and not _mutable(annotation):
                now.read_only[value.storage.identity] = name
        tensors = _each(lambda v: Tensor.of(v) if isinstance(v, NkiTensor) else v, (args, kwargs))
        returned: Any = None
        mine = list(programs(grid, now.machine.program_id))
        now.grid = tuple(map(len, grid))
        for program in mine:
            now.program = program
            now.machine.programs.begin(now.machine)
            returned = function(*tensors[0], **tensors[1])
            now.flush()
        with place_instructions(defined_at(function)):
            return _each(lambda value: _unwrapped(value, now, len(mine)), returned)

    return entry


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or containers of values, with what a function makes of each value."""
    if type(value) in (tuple, list):
        return type(value)(_each(function, v) for v in value)
    if type(value) is dict:
        return {key: _each(function, v) for key, v in value.items()}
    return function(value)


def _unwrapped(value: Any, now: Session, programs_run: int) -> Any:
    """Return the tensor of the simulator that a result is, or what is no tensor."""
    if not isinstance(value, Tensor):
        return value
    if value.memory != "hbm":
        value = _stored(value)
    view = value.tile()
    storage = view.storage
    if programs_run > 1 and storage.region is not shared_hbm and not storage.is_input:
        raise fail(
            SimulationError,
            f"each of {programs_run} programs returned its own {value!r}; allocate it in "
            "nl.shared_hbm",
        )
    storage.region = shared_hbm  # outputs in nl.hbm are legal in this dialect
    return view


def _stored(tile: Tensor) -> Tensor:
    """Return a copy in HBM of an on-chip tile that a kernel returned.

    AWS's documentation of SDK 2.26 does so in the example of nki.isa.range_select.
    """
    current().warn(f"{tile!r} is returned from on chip, and stored in HBM for that")
    out = NAMES["ndarray"](tile.shape, tile.dtype, buffer=hbm)
    store(out, tile)
    return out


class Kernel(JitKernel):
    """The result of `nki.jit` in Beta 1: launched as kernel(...) or kernel[grid](...).

    checked: parameters are read-only unless annotated as mutable; kernels of the older convention,
        which fill their last parameters, are launched unchecked.
    """

    def __init__(
        self, function: Callable[..., Any], launch: Grid = (), *, checked: bool = True
    ) -> None:
        super().__init__(_entry(function, launch, checked), _cores(launch))
        self.plain = function
        self.launch = launch
        self.checked = checked

    def __getitem__(self, grid: Any) -> Kernel:
        given = grid if type(grid) is tuple else (grid,)
        launch = tuple(d if isinstance(d, Dimension) else spmd_dim(d, 1) for d in given)
        return type(self)(self.plain, launch, checked=self.checked)

    def launched(self, grid: Any) -> JitKernel:
        """Return the kernel with a launch grid, unless it has one or the grid is 1."""
        return self if grid == 1 else self[grid]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run: inline inside a kernel, else a simulation of its own."""
        if CURRENT.machine is None:
            return standins.simulate_kernel(self)(*args, **kwargs)
        if self.launch:
            raise fail(
                UnsupportedInstructionError,
                f"kernel {self.plain.__name__} with a launch grid inside another kernel "
                "(err_nested_kernel_with_spmd_grid); call it without one",
            )
        return self.plain(*args, **kwargs)


class Benchmark(Kernel):
    """The result of `nki.benchmark`: a call simulates the timing; `benchmark_result` holds it."""

    benchmark_result: SimpleNamespace | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Time the kernel in the simulator; inside a kernel, run inline."""
        if CURRENT.machine is not None:
            return super().__call__(*args, **kwargs)
        profile = standins.run(self, *args, mode="timing", named=kwargs).profile
        latency = SimpleNamespace(get_latency_percentile=lambda percentile: profile.device_us)
        self.benchmark_result = SimpleNamespace(nc_latency=latency)  # a simulation has no spread
        return None


def _decorator(made: type[Kernel], checked: bool = True) -> Callable[..., Any]:
    """Return a decorator with or without options; the options are for the device's compiler."""

    def decorate(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda f: decorate(f)
        if isinstance(function, Kernel):
            return made(function.plain, function.launch, checked=function.checked)
        return made(function, checked=checked)

    return decorate


benchmark = _decorator(Benchmark)
unchecked = _decorator(Kernel, checked=False)
_MODES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("auto", "jax", "torchxla", "baremetal", "simulation"), _decorator(Kernel)),
    "benchmark": benchmark,
    "trace": unchecked,  # not documented; nki-samples marks functions that kernels call with it
}


def jit(function: Any = None, mode: str = "auto", **options: Any) -> Any:
    """Return `nki.jit`'s kernel; every mode runs in the simulator, "benchmark" only times it."""
    if mode not in _MODES:
        raise KernelArgumentError(f"nki.jit: mode {mode!r}; Beta 1 has {', '.join(_MODES)}")
    return _MODES[mode](function, **options)


def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel on NumPy arrays; return its outputs."""
    launched = kernel if isinstance(kernel, Kernel) else Kernel(kernel, checked=False)
    return standins.simulate_kernel(launched)(*args, **kwargs)
