"""The result of `@nki.jit`, and how a kernel runs when it is called outside of a simulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nmm_compiler.simulator.machine import running


class JitKernel:
    """The result of `@nki.jit`: callable inside a simulation, launchable with a grid.

    loads: what the compiler of the kernel's dialect does to repeated loads; see `simulate`.
    """

    loads = "as_written"

    def __init__(self, function: Callable[..., Any], grid: int = 1, schedule: Any = None) -> None:
        self.function = function
        self.grid = grid
        self.schedule = schedule
        functools.update_wrapper(self, function, updated=())
        self.func = function

    def __getitem__(self, grid: Any) -> JitKernel:
        sizes = grid if isinstance(grid, tuple) else (grid,)
        count = 1
        for size in sizes:
            count *= int(size)
        return JitKernel(self.function, count, self.schedule)

    def launched(self, grid: Any) -> JitKernel:
        """Return the kernel with at least the programs of `grid`."""
        if isinstance(grid, tuple):
            return self[grid]
        return self if grid <= self.grid else JitKernel(self.function, grid, self.schedule)

    def with_schedule(self, schedule: Any) -> JitKernel:
        """Return the kernel with scheduling hints, which do not change results."""
        return JitKernel(self.function, self.grid, schedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run: inline inside a simulation, else a simulation of its own."""
        if running() is None:
            return simulate_kernel(self)(*args, **kwargs)
        return self.function(*args, **kwargs)


def jit(function: Any = None, **options: Any) -> Any:
    """Mark a kernel; keyword options are for the device compiler and have no effect here."""
    if function is None:
        return lambda f: JitKernel(f)
    return function if isinstance(function, JitKernel) else JitKernel(function)


_RUNNERS: list[Callable[..., Any]] = []


def run_kernels_with(simulate: Callable[..., Any]) -> None:
    """Set the function that runs a kernel called outside of a simulation."""
    _RUNNERS[:] = [simulate]


def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Simulate a kernel; return the Simulation."""
    (simulate,) = _RUNNERS
    return simulate(kernel, *args, **kwargs)


def simulate_kernel(kernel: Any) -> Callable[..., Any]:
    """Return a callable that runs `kernel` here and returns its outputs (nki.simulate)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(kernel, *args, mode="functional", **kwargs)
        outputs: tuple[Any, ...] = result.outputs or ()
        return outputs[0] if result.single else outputs

    return call
