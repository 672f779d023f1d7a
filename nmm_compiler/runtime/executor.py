"""Executors: how a rewritten call runs through its emitted kernel.

    op call -> specs and operands (calls) -> buckets (kernels) -> kernel -> launch -> cut, reshape

"simulator" runs the kernel's source in this package's simulator, "nki_simulate" in AWS's, "neuron"
on the device. A token count between buckets is padded with zero rows, whose results are dropped.
Where a kernel cannot be built or fails its first-run check, executor "auto" leaves the calls to
PyTorch, with a warning; an executor that was named raises NeuronSetupError, since a caller who
names one wants that kernel's numbers. Importing this module registers the executors with the ops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

from nmm_compiler.errors import (
    ModelError,
    NeuronSetupError,
    ShapeError,
    SpecError,
    UnknownNameError,
    no_kernel,
)
from nmm_compiler.ops import registration
from nmm_compiler.ops.call_options import options_of
from nmm_compiler.ops.launches import Launch, axes_that_differ, inputs_of
from nmm_compiler.ops.lower import lower
from nmm_compiler.ops.operands import tokens_of
from nmm_compiler.options import Options
from nmm_compiler.runtime import neuron
from nmm_compiler.runtime.kernels import KERNELS, NoKernelError, warn_once
from nmm_compiler.runtime.weights import PACKS, has_own_memory

Launcher = Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]
"""Runs one kernel on its operands; raises NoKernelError when the kernel must not be used."""


@dataclasses.dataclass(eq=False)
class KernelExecutor:
    """Runs op calls through kernels with one launcher.

    traced_device: while calls on this device type are traced they are lowered to the launcher's own
    ops, which the device's compiler knows, instead of staying one opaque op.
    """

    name: str
    launcher: Launcher
    traced_device: str | None = None

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run op `name`: by its kernels; with executor "auto" by PyTorch where there are none.

        Raises NeuronSetupError when this executor was named and a kernel cannot be had.
        """
        executor = kwargs.get("executor", self.name)
        if 0 in args[0].shape:  # no tokens: nothing to compute
            return registration.DEFINITIONS[name].reference(*args, **kwargs)
        options = options_of(executor)
        try:
            return self._by_kernels(name, args, kwargs, options)
        except NoKernelError as refused:
            if options.strict or executor.partition("#")[0] == self.name:
                raise no_kernel(self.name, *refused.args) from refused.__cause__
            if refused.__cause__ is not None:  # else the first run has warned
                warn_once(f"nmm: {refused}")
            return registration.DEFINITIONS[name].reference(*args, **kwargs)

    def _by_kernels(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        """Return the results of an op's kernel, in its shapes."""
        lead, _ = tokens_of(args[0], kwargs.get("x_layout", "row"))
        transpose = None
        if has_own_memory(args[0]):  # else, as in a trace, each call would make the copy
            transpose = functools.partial(PACKS.transposed, freeze=options.freeze)
        try:
            m = int(math.prod(lead))
            launch = lower(name, args, kwargs, m, transpose, lnc=options.lnc)
        except (SpecError, ShapeError, UnknownNameError) as error:
            if options.strict:
                raise
            raise NoKernelError(f"a call of {name}", str(error)) from error
        results = self._run(launch, kwargs.get("target", "trn2"), options)
        shaped = [
            y.reshape(*lead, y.shape[-1]) if layout == "row" else y.contiguous()
            for y, layout in zip(results, launch.spec.result_layouts(), strict=True)
        ]
        return shaped if registration.DEFINITIONS[name].many else shaped[0]

    def _run(self, launch: Launch, target: str, options: Options) -> Sequence[Tensor]:
        """Launch the kernel once per planned bucket along the tokens; return its results.

        Raises NoKernelError where it must not be used.
        """
        spec, axis = launch.spec, launch.token_axis
        pieces: list[tuple[Tensor, ...]] = []
        start = 0
        for size in KERNELS.plan(spec, target, options, axis):
            part = dataclasses.replace(spec, **{axis: size})
            used = min(size, getattr(spec, axis) - start)
            dims = axes_that_differ(inputs_of(spec), inputs_of(part))
            given = [
                t if at is None else _padded(t.narrow(at, start, used), at, size - used)
                for t, at in zip(launch.operands, dims, strict=True)
            ]
            kernel = KERNELS.get(part, target, options)
            ys = self.launcher(kernel, [operand.contiguous() for operand in given])
            dims = axes_that_differ(spec.outputs(), part.outputs())
            pieces.append(
                tuple(
                    y if at is None else y.narrow(at, 0, used)
                    for y, at in zip(ys, dims, strict=True)
                )
            )
            start += used
        if len(pieces) == 1:
            return pieces[0]
        return [torch.cat(ys, at) for *ys, at in zip(*pieces, dims, strict=True)]


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """Return x, contiguous, with `rows` zero tokens more."""
    if rows == 0:
        return x.contiguous()
    padding = (0, rows) if dim == x.dim() - 1 else (0, 0, 0, rows)
    return torch.nn.functional.pad(x, padding)


_simulating = threading.Lock()


def _check_simulated(executor: str, kernel: Any, device: torch.device) -> None:
    """Raise for tensors that are not on the CPU, and for a kernel of several ranks."""
    if device.type != "cpu":
        raise NeuronSetupError(
            f"executor {executor!r} got tensors on {str(device)!r}; it runs on the CPU: move the "
            "model to 'cpu', or use executor 'auto'"
        )
    if kernel.spec.tp > 1:
        raise SpecError(
            f"executor {executor!r} runs one rank, and {kernel.name} is one of "
            f"{kernel.spec.tp} that exchange data; use kernel.simulate_ranks for all of "
            "them, or executor 'reference' in as many processes"
        )


def _launch_in_simulator(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _check_simulated("simulator", kernel, operands[0].device)
    with _simulating:
        simulation = kernel.simulate(*map(_operand, operands), mode="functional")
    return tuple(map(neuron.tensor, simulation.outputs))


def _operand(tensor: Tensor) -> Any:
    """Return a tensor as a kernel reads it: fp8 numbers as those of NKI's float8_e4m3.

    Raises ModelError for one beyond 240, whose bits are infinity or no number there.
    """
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.detach()
    bits = tensor.detach().view(torch.uint8)
    if bool(((bits & 0x7F) > 0x77).any()):
        raise ModelError(
            "a weight of torch.float8_e4m3fn holds numbers beyond 240, where NKI's float8_e4m3 "
            "ends; quantize to [-240, 240], as nmm.quantize_factors does"
        )
    return bits.numpy().view(ml_dtypes.float8_e4m3)


def _launch_in_nki_simulate(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _check_simulated("nki_simulate", kernel, operands[0].device)
    return neuron.simulate(kernel, [t.detach() for t in operands])


registration.EXECUTORS["simulator"] = KernelExecutor("simulator", _launch_in_simulator)
registration.EXECUTORS["nki_simulate"] = KernelExecutor("nki_simulate", _launch_in_nki_simulate)
registration.EXECUTORS["neuron"] = KernelExecutor("neuron", neuron.launch, traced_device="neuron")
