"""Executors: how a rewritten call runs through its emitted kernel.

    op call -> specs and operands (calls) -> buckets (kernels) -> kernel -> launch -> cut, reshape

"simulator" runs the kernel's source in this package's simulator, "nki_simulate" in AWS's, "neuron"
on the device. A token count between buckets is padded with zero rows, whose results are dropped. A
kernel that cannot be built or fails its first-run check leaves its calls to PyTorch, with a
warning. Importing this module registers the executors with the ops.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmm_compiler.errors import NeuronSetupError, ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels import ops, ops_reference
from nmm_compiler.options import Options
from nmm_compiler.runtime import neuron
from nmm_compiler.runtime.calls import Launch, Lowered, lower, tokens
from nmm_compiler.runtime.configuration import options_of
from nmm_compiler.runtime.kernels import KERNELS
from nmm_compiler.runtime.weights import PACKS, has_own_memory

Launcher = Callable[[Any, Sequence[Tensor]], Tensor | None]
"""Runs one kernel on its operands; None when the kernel must not be used."""


class KernelExecutor:
    """Runs op calls through kernels with one launcher.

    traced_device: while calls on this device type are traced they are lowered to the launcher's own
    ops, which the device's compiler knows, instead of staying one opaque op.
    """

    def __init__(self, name: str, launcher: Launcher, traced_device: str | None = None) -> None:
        self.name = name
        self.launcher = launcher
        self.traced_device = traced_device

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run op `name`: by its kernels, or by PyTorch where there are none to use."""
        out = self._by_kernels(name, args, kwargs)
        return ops_reference.REFERENCES[name](*args, **kwargs) if out is None else out

    def _by_kernels(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        options = options_of(kwargs.get("executor", self.name))
        m = int(tokens(args[0], kwargs))
        if m == 0:
            return None
        try:
            lowered = lower(name, args, kwargs, m, _transpose_for(args[0], options))
        except (SpecError, ShapeError, UnknownNameError) as error:
            if options.strict:
                raise
            _warn_once(f"nmm: no kernel for a call of {name}: {error}; PyTorch computes it")
            return None
        results = []
        for launch in lowered.launches:
            result = self._run(launch, lowered, kwargs.get("target", "trn2"), options)
            if result is None:
                return None
            results.append(result)
        return results if lowered.many else results[0]

    def _run(
        self, launch: Launch, lowered: Lowered, target: str, options: Options
    ) -> Tensor | None:
        """Launch the kernel once per planned bucket along the tokens."""
        x, *weights = launch.operands
        x_tokens = 0 if lowered.x_layout == "row" else 1
        out_tokens = 0 if lowered.out_layout == "row" else 1
        pieces, start = [], 0
        for size in KERNELS.plan(launch.spec, target, options):
            kernel = KERNELS.get_or_warn(dataclasses.replace(launch.spec, m=size), target, options)
            if kernel is None:
                return None
            used = min(size, launch.spec.m - start)
            part = _padded(x.narrow(x_tokens, start, used), x_tokens, size - used)
            y = self.launcher(kernel, (part, *(w.contiguous() for w in weights)))
            if y is None:
                return None
            pieces.append(y if used == size else y.narrow(out_tokens, 0, used))
            start += used
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, out_tokens)
        if lowered.out_layout == "row":
            return out.reshape(*lowered.lead, out.shape[-1])
        return out.contiguous()


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """Return x, contiguous, with `rows` zero tokens more."""
    if rows == 0:
        return x.contiguous()
    padding = (0, 0, 0, rows) if dim == 0 else (0, rows)
    return torch.nn.functional.pad(x, padding)


def _transpose_for(x: Tensor, options: Options) -> Callable[[Tensor], Tensor] | None:
    """Return how weights are handed over transposed; None where no copy can be kept.

    While tracing, and on lazy devices, a copy would be made in every call: there the kernel reads
    the weight as it is stored.
    """
    if not has_own_memory(x):
        return None
    return functools.partial(PACKS.transposed, freeze=options.freeze)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


_simulating = threading.Lock()


def _on_cpu(executor: str, operands: Sequence[Tensor]) -> None:
    device = operands[0].device
    if device.type != "cpu":
        raise NeuronSetupError(
            f"executor {executor!r} got tensors on {str(device)!r}; it runs on the CPU: move the "
            "model to 'cpu', or use executor 'auto'"
        )


def _launch_in_simulator(kernel: Any, operands: Sequence[Tensor]) -> Tensor:
    _on_cpu("simulator", operands)
    with _simulating:
        simulation = kernel.simulate(*(t.detach() for t in operands), mode="functional")
    return _tensor(simulation.output, operands[0].dtype)


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Return a NumPy array, possibly of an ml_dtypes type, as a tensor with the same bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "V" or array.dtype.name not in _NUMPY_NAMES:
        return torch.from_numpy(array.view(f"u{array.itemsize}")).view(dtype)
    return torch.from_numpy(array)


_NUMPY_NAMES = ("float16", "float32")


def _launch_in_nki_simulate(kernel: Any, operands: Sequence[Tensor]) -> Tensor:
    _on_cpu("nki_simulate", operands)
    return neuron.simulate(kernel, [t.detach() for t in operands])


ops.EXECUTORS["simulator"] = KernelExecutor("simulator", _launch_in_simulator)
ops.EXECUTORS["nki_simulate"] = KernelExecutor("nki_simulate", _launch_in_nki_simulate)
ops.EXECUTORS["neuron"] = KernelExecutor("neuron", neuron.launch, traced_device="neuron")
