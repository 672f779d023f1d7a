"""Neuron: emitted kernels on a device, or in AWS's own simulator.

The only file that imports nki, torch_neuronx or torch_xla, and only when a call needs them.

    tensors on "xla"      torch-neuronx up to 2.9 on torch-xla: the `nki.jit` kernel is called
    tensors on "neuron"   TorchNeuron (torch 2.13, 2.14): the kernel is registered with `nki_op`
    tensors on the CPU    `nki.simulate`, for executor "nki_simulate"

A kernel in dialect "neuronxcc", NKI Beta 1, needs `neuronxcc.nki` and no package nki. On "xla" its
`nki.jit` function is called with the tensors, as AWS has asked since it ended
`torch_neuronx.nki_jit` (Neuron SDK 2.24); on the CPU `neuronxcc.nki.simulate_kernel` takes and
gives NumPy arrays. TorchNeuron has no way to launch it and is refused.

NKI before 0.5 lacks the views that kernels use and is refused, as is a version that lacks what a
kernel needs. The first time that a kernel runs on a device, it gets random operands and is compared
with the float64 reference (first_run.py). A kernel that differs, or does not compile, is not used
again, with a warning. A device of another generation, or one whose logical cores are not the
kernel's, is refused (machine.py).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nmm_compiler.errors import FileError, NeuronSetupError, no_kernel
from nmm_compiler.kernels.base import numpy_dtype
from nmm_compiler.nki_api.lint import oldest_version
from nmm_compiler.options import neuron_environment
from nmm_compiler.runtime import first_run, machine
from nmm_compiler.runtime.first_run import several
from nmm_compiler.simulator.loading.source_text import read_source, run_source


def _imported(module: str, problem: str | None) -> Any:
    """Import nki or neuronxcc.nki, or raise NeuronSetupError with what to install."""
    if problem is not None:
        raise NeuronSetupError(problem)
    return importlib.import_module(module)


def _on_its_cores(function: Any, kernel: Any) -> Any:
    """Return a kernel's function launched on its cores: `kernel[2]`."""
    return function if kernel.spec.lnc == 1 else function[kernel.spec.lnc]


_loaded: dict[tuple[str, str], Any] = {}
_lock = threading.RLock()


def load(kernel: Any) -> Any:
    """Return the `@nki.jit` function of a kernel's verified source, executed once.

    The source is executed, not the file. The NKI compiler asks for the function's source again and
    gets the executed text; in case it opens the file, a file with other text is refused with
    FileError.
    """
    path = Path(kernel.path)
    with _lock:
        found = _loaded.get(_identity(kernel))
        if found is None:
            if kernel.dialect == "neuronxcc":
                _imported("neuronxcc.nki", machine.beta_1_problem())
            else:
                _imported("nki", machine.nki_problem(oldest_version(kernel.source)))
            if path.exists() and read_source(path) != kernel.source:
                raise FileError(
                    f"{path} was changed after kernel {kernel.name} was verified; nothing of it "
                    "was executed. Run `nmm cache verify`, then compile again"
                )
            kernel.check_before_run()
            module = types.ModuleType(f"nmm_kernel_{kernel.name}")
            module.__file__ = str(path)
            run_source(kernel.source, str(path), module.__dict__)
            found = _loaded[_identity(kernel)] = getattr(module, kernel.name)
    return found


def _identity(kernel: Any) -> tuple[str, str]:
    """Return the identity of a kernel: its displayed path and its verified source."""
    return str(kernel.path), kernel.source


def simulate(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a kernel in AWS's simulator on CPU tensors; return its results."""
    if kernel.dialect == "neuronxcc":
        return _simulate_beta_1(kernel, operands)
    nki = _imported("nki", machine.nki_problem())
    with _lock, neuron_environment(kernel.target.name):
        return several(nki.simulate(_on_its_cores(load(kernel), kernel))(*operands))


def _simulate_beta_1(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a kernel of Beta 1 in its simulator, which takes NumPy arrays and gives them back.

    It computes bfloat16 and fp8 in float32 (NKI known issues, SDK 2.26).
    """
    spec = kernel.spec
    arrays = [
        tensor.detach().to(torch.float32).numpy().astype(numpy_dtype(operand.dtype))
        for tensor, operand in zip(operands, spec.inputs(), strict=True)
    ]
    nki = _imported("neuronxcc.nki", machine.beta_1_problem())
    with _lock, neuron_environment(kernel.target.name):
        results = several(nki.simulate_kernel(load(kernel), *arrays))
    return tuple(
        first_run.tensor(np.asarray(array).astype(numpy_dtype(result.dtype)))
        for array, result in zip(results, spec.outputs(), strict=True)
    )


def launch(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """Run a kernel on the Neuron device that holds its operands; return its results.

    Returns None for a kernel that failed its first-run check: the caller computes the reference.
    While a graph is traced nothing is checked: the backend has checked the kernels it built, and
    one that was built later is used unchecked, with a warning. Raises NeuronSetupError for tensors
    that are on no Neuron device, and for a device that is not what the kernel was made for.
    """
    device = operands[0].device
    if device.type not in _LAUNCHERS:
        raise NeuronSetupError(
            f"executor 'neuron' got tensors on {device.type!r}; move the model to the device "
            "(.to('neuron') or torch_xla.device()), or use executor 'auto'"
        )
    if torch._C._len_torch_dispatch_stack():
        machine.check_launch(kernel.target.name, kernel.spec.lnc)
        verdict = _verdicts.get((*_identity(kernel), device.type))
        if verdict is None:
            warnings.warn(
                f"nmm: kernel {kernel.name} was built while a graph was traced, so it is used on "
                f"{device.type} unchecked; compile with kernels='build' to have it checked first",
                stacklevel=2,
            )
            verdict = True
    else:
        verdict = check(kernel, device)
    return _LAUNCHERS[device.type](kernel, operands) if verdict else None


def _launch_on_xla(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return several(_on_its_cores(load(kernel), kernel)(*operands))


def _launch_on_torchneuron(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if kernel.dialect == "neuronxcc":
        raise NeuronSetupError(
            f"kernel {kernel.name} is in dialect 'neuronxcc' (NKI Beta 1), which runs on torch-xla "
            "tensors; for tensors on 'neuron' pass options={'dialect': 'nki'}"
        )
    return several(registered_op(kernel, len(operands))(*operands))


Launcher = Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]

_LAUNCHERS: dict[str, Launcher] = {
    "xla": _launch_on_xla,
    "neuron": _launch_on_torchneuron,
}


def device() -> torch.device:
    """Return the Neuron device of this process; raises ImportError where its package is broken."""
    if machine.probe().path == "torchneuron":
        importlib.import_module("torch_neuronx")
        return torch.device("neuron")
    return importlib.import_module("torch_xla").device()


def launcher(device: torch.device) -> Launcher:
    """Return the function that runs a kernel on a device, without the first-run check."""
    return _LAUNCHERS[device.type]


_COMPILERS = {"neuron": "neuron"}
"""Device type -> backend of torch.compile whose graphs hold kernels; those of torch-xla do not."""


def compiled_launcher(device: torch.device) -> Launcher:
    """Return the function that runs a kernel on a device within a graph of torch.compile."""

    @functools.cache
    def compiled(op: Any) -> Any:
        def call(*tensors: Tensor) -> Any:
            return op(*tensors)

        return torch.compile(call, backend=_COMPILERS[device.type], fullgraph=True, dynamic=False)

    def launch(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        op = registered_op(kernel, len(operands))  # before Dynamo traces, which refuses its lock
        return several(compiled(op)(*operands))

    return launch


_registered: dict[str, Any] = {}


def registered_op(kernel: Any, operands: int) -> Any:
    """Return the kernel as a torch op, registered once with TorchNeuron's `nki_op`.

    `nki_op` wants a typed Python function that calls the kernel. While a graph is traced it runs
    that function on fake and functional tensors, as `torch.library.triton_op` does: `wrap_nki`
    makes of the kernel's call a higher-order operator there, and plain execution elsewhere.
    """
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()[:32]
    name = f"nmm_kernels::{kernel.name}_{digest}"
    with _lock:
        found = _registered.get(name)
        if found is not None:
            return found
        torch_neuronx = importlib.import_module("torch_neuronx")
        nki_op = getattr(torch_neuronx, "nki_op", None)
        if nki_op is None:
            raise NeuronSetupError(
                f"torch_neuronx {machine.version('torch-neuronx')} has no nki_op, which tensors on "
                "'neuron' need; install torch-neuronx 2.13 or newer, or use torch-xla tensors"
            )
        function = _on_its_cores(_traceable(load(kernel)), kernel)
        single = len(kernel.spec.outputs()) == 1

        def call(*tensors: Tensor) -> Any:
            results = several(function(*tensors))
            return results[0] if single else results

        returned: Any = Tensor if single else tuple[(Tensor,) * len(kernel.spec.outputs())]  # type: ignore[misc]
        parameters = [
            inspect.Parameter(
                f"operand{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor
            )
            for i in range(operands)
        ]
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=returned
        )
        call.__annotations__ = {**{p.name: Tensor for p in parameters}, "return": returned}
        call.__name__ = call.__qualname__ = kernel.name
        found = _registered[name] = nki_op(name, mutates_args={})(call)
    return found


def _traceable(function: Any) -> Any:
    """Return a `@nki.jit` function that may be called with the tensors of a trace."""
    try:
        hop = importlib.import_module("torch_neuronx.nki_hop")
    except ModuleNotFoundError:
        return function  # newer versions recognize `nki.jit` themselves
    return hop.wrap_nki(function)


_verdicts: dict[tuple[str, str, str], bool] = {}


def check(kernel: Any, device: torch.device) -> bool:
    """Return whether the kernel gives right results on this kind of device; try it the first time.

    Raises NeuronSetupError when the device is not what the kernel was made for.
    """
    key = (*_identity(kernel), device.type)
    with _lock:
        if key not in _verdicts:
            machine.check_launch(kernel.target.name, kernel.spec.lnc)
            with _disable_current_modes(), torch.no_grad():
                fault = first_run.fault(kernel, device, _LAUNCHERS[device.type])
            if fault is not None:
                warnings.warn(
                    f"nmm: kernel {kernel.name} is not used on {device.type}: {fault}. PyTorch "
                    f"computes its calls instead. Source: {kernel.path}",
                    stacklevel=2,
                )
            _verdicts[key] = fault is None
        return _verdicts[key]


def failed_first_run(kernel: Any) -> NeuronSetupError:
    """Return the error for a kernel that gave wrong results, where nothing else may compute."""
    reason = f"{kernel.name} failed its first run, as the warning before says"
    return no_kernel("neuron", str(kernel.spec), reason)


def forget() -> None:
    """Forget loaded kernels and first-run verdicts (registered torch ops stay)."""
    with _lock:
        _loaded.clear()
        _verdicts.clear()
