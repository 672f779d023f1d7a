"""Neuron: emitted kernels on a device, or in AWS's own simulator.

The only file that imports nki, torch_neuronx or torch_xla, and only when a call needs them.

    tensors on "xla"      torch-neuronx up to 2.9 on torch-xla: the `nki.jit` kernel is called
    tensors on "neuron"   TorchNeuron (torch 2.13, 2.14): the kernel is registered with `nki_op`
    tensors on the CPU    `nki.simulate`, for executor "nki_simulate"

NKI before 0.3 spells its instructions differently and is refused. The first time a kernel meets a
device it runs on random operands and is compared with the float64 reference; one that differs, or
does not compile, is not used again, with a warning.
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import inspect
import re
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nmm_compiler.errors import ChangedFileError, NeuronSetupError
from nmm_compiler.nki_api.source_text import read_source
from nmm_compiler.options import neuron_environment
from nmm_compiler.records import Record
from nmm_compiler.simulator.loading.run_text import run_source

MINIMUM_NKI = (0, 3)
INSTALL = "pip install nki neuronx-cc torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com"
_PACKAGES = ("nki", "neuronx-cc", "torch-neuronx", "torch-xla")


@dataclass(frozen=True, kw_only=True)
class NeuronProbe(Record):
    """What of Neuron this machine has. Versions are None where a package is not installed.

    path: "torchneuron", "torch-xla", "simulate" (only nki) or "none": what executor "neuron" or
    "nki_simulate" would use. problem: what stands in the way, with the way out, or None.
    """

    nki: str | None
    neuronx_cc: str | None
    torch_neuronx: str | None
    torch_xla: str | None
    devices: int
    path: str
    problem: str | None

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, found) lines for `nmm doctor`."""
        shown = [
            (name, getattr(self, name.replace("-", "_")) or "not installed") for name in _PACKAGES
        ]
        return [
            *shown,
            ("Neuron devices", str(self.devices)),
            ("Neuron path", self.path),
            *([("Neuron problem", self.problem)] if self.problem else []),
        ]


def probe() -> NeuronProbe:
    """Look for Neuron packages and devices without importing any of them."""
    versions = {name: _version(name) for name in _PACKAGES}
    devices = len(glob.glob("/dev/neuron[0-9]*"))
    problem = _nki_problem(versions["nki"], versions["neuronx-cc"])
    if problem is not None:
        path = "none"
    elif versions["torch-neuronx"] is not None and versions["torch-xla"] is None:
        path = "torchneuron"
    elif versions["torch-neuronx"] is not None:
        path = "torch-xla"
    else:
        path = "simulate"
    if path in ("torchneuron", "torch-xla") and not devices:
        problem = "no /dev/neuron* device; kernels can only run with executor 'nki_simulate'"
    return NeuronProbe(
        nki=versions["nki"],
        neuronx_cc=versions["neuronx-cc"],
        torch_neuronx=versions["torch-neuronx"],
        torch_xla=versions["torch-xla"],
        devices=devices,
        path=path,
        problem=problem,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nki_problem(nki: str | None, neuronx_cc: str | None) -> str | None:
    """Return why no kernel can run with these versions, or None."""
    if nki is None:
        older = ", only the neuronxcc.nki inside neuronx-cc" if neuronx_cc else ""
        return f"package nki is not installed{older}; run: {INSTALL}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", nki)[:2])
    if numbers < MINIMUM_NKI:
        wanted = ".".join(map(str, MINIMUM_NKI))
        return f"nki {nki} is installed, kernels need {wanted} or newer; run: {INSTALL} --upgrade"
    return None


def _nki() -> Any:
    """Import nki, or raise NeuronSetupError with what to install."""
    problem = _nki_problem(_version("nki"), _version("neuronx-cc"))
    if problem is not None:
        raise NeuronSetupError(problem)
    return importlib.import_module("nki")


_loaded: dict[tuple[str, str], Any] = {}
_lock = threading.RLock()


def load(kernel: Any) -> Any:
    """Return the `@nki.jit` function of a kernel's verified source, executed once.

    The source is executed, not the file. The NKI compiler asks for the function's source again and
    gets the executed text; in case it opens the file, a file with other text is refused with
    ChangedFileError.
    """
    path = Path(kernel.path)
    with _lock:
        found = _loaded.get(_identity(kernel))
        if found is None:
            _nki()
            if path.exists() and read_source(path) != kernel.source:
                raise ChangedFileError(
                    f"{path} was changed after kernel {kernel.name} was verified; nothing of it "
                    "was executed. Run `nmm cache verify`, then compile again"
                )
            module = types.ModuleType(f"nmm_kernel_{kernel.name}")
            module.__file__ = str(path)
            run_source(kernel.source, str(path), module.__dict__)
            found = _loaded[_identity(kernel)] = getattr(module, kernel.name)
    return found


def _identity(kernel: Any) -> tuple[str, str]:
    """Return what tells kernels apart: where a kernel is shown, and its verified source."""
    return str(kernel.path), kernel.source


def simulate(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a kernel in AWS's simulator on CPU tensors; return its results."""
    nki = _nki()
    with _lock, neuron_environment(_target_name(kernel)):
        return _results(nki.simulate(load(kernel))(*operands))


def launch(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """Run a kernel on the Neuron device that holds its operands; return its results.

    Returns None for a kernel that failed its first-run check: the caller computes the reference.
    Raises NeuronSetupError for tensors that are on no Neuron device.
    """
    device = operands[0].device
    if device.type not in _LAUNCHERS:
        raise NeuronSetupError(
            f"executor 'neuron' got tensors on {device.type!r}; move the model to the device "
            "(.to('neuron') or torch_xla.device()), or use executor 'auto'"
        )
    if not _checked(kernel, device):
        return None
    return _LAUNCHERS[device.type](kernel, operands)


def _launch_on_xla(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _results(load(kernel)(*operands))


def _launch_on_torchneuron(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _results(registered_op(kernel, len(operands))(*operands))


_LAUNCHERS: dict[str, Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]] = {
    "xla": _launch_on_xla,
    "neuron": _launch_on_torchneuron,
}

_registered: dict[str, Any] = {}


def registered_op(kernel: Any, operands: int) -> Any:
    """Return the kernel as a torch op, registered once with TorchNeuron's `nki_op`.

    `nki_op` wants a typed Python function that calls the kernel; decorating the kernel itself would
    have Dynamo run it while tracing.
    """
    name = f"nmm_kernels::{kernel.name}_{_digest(kernel)}"
    with _lock:
        found = _registered.get(name)
        if found is not None:
            return found
        torch_neuronx = importlib.import_module("torch_neuronx")
        nki_op = getattr(torch_neuronx, "nki_op", None)
        if nki_op is None:
            raise NeuronSetupError(
                f"torch_neuronx {_version('torch-neuronx')} has no nki_op, which tensors on "
                "'neuron' need; install torch-neuronx 2.13 or newer, or use torch-xla tensors"
            )
        function = load(kernel)

        shapes = [tuple(result.shape) for result in kernel.spec.outputs()]
        single = len(shapes) == 1

        def call(*tensors: Tensor) -> Any:
            results = _results(function(*tensors))
            return results[0] if single else results

        returned: Any = Tensor if single else tuple[(Tensor,) * len(shapes)]  # type: ignore[misc]
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
        op = nki_op(name, mutates_args={})(call)
        if hasattr(op, "register_fake"):

            def fake(*tensors: Tensor) -> Any:
                made = tuple(tensors[0].new_empty(shape) for shape in shapes)
                return made[0] if single else made

            op.register_fake(fake)
        _registered[name] = op
    return op


_verdicts: dict[tuple[str, str, str], bool] = {}


def _checked(kernel: Any, device: torch.device) -> bool:
    """Say if the kernel gave right results on this kind of device, trying it the first time."""
    key = (*_identity(kernel), device.type)
    with _lock:
        if key not in _verdicts:
            with _disable_current_modes(), torch.no_grad():
                fault = _first_run(kernel, device)
            if fault is not None:
                warnings.warn(
                    f"nmm: kernel {kernel.name} is not used on {device.type}: {fault}. PyTorch "
                    f"computes its calls instead. Source: {kernel.path}",
                    stacklevel=2,
                )
            _verdicts[key] = fault is None
        return _verdicts[key]


def _first_run(kernel: Any, device: torch.device) -> str | None:
    """Run the kernel on seeded random operands; return what is wrong, or None."""
    spec = kernel.spec
    generator = np.random.default_rng(0)
    arrays = []
    for operand in spec.inputs():
        values = generator.standard_normal(operand.shape) / np.sqrt(operand.shape[0])
        arrays.append(values.astype(_numpy_dtype(operand.dtype)))
    tensors = [
        torch.from_numpy(a.astype(np.float32)).to(_torch_dtype(o.dtype)).to(device)
        for a, o in zip(arrays, spec.inputs(), strict=True)
    ]
    try:
        results = _LAUNCHERS[device.type](kernel, tensors)
        got = [y.detach().to("cpu").to(torch.float64).numpy() for y in results]
    except Exception as error:  # whatever the vendor's compiler or runtime raises
        return f"its first run failed with {type(error).__name__}: {error}"
    wanted, bounds = _several(spec.reference(*arrays)), _several(spec.error_bound(*arrays))
    if len(got) != len(wanted):
        return f"its first run returned {len(got)} results, not {len(wanted)}"
    for values, want, bound in zip(got, wanted, bounds, strict=True):
        fault = _fault(values, np.asarray(want, dtype=np.float64), bound)
        if fault is not None:
            return fault
    return None


def _fault(values: Any, want: Any, bound: Any) -> str | None:
    """Return what is wrong with one result of a first run, or None."""
    if values.shape != want.shape:
        return f"its first run returned shape {values.shape}, not {want.shape}"
    excess = np.abs(values - want) - bound
    if not np.all(excess <= 0):
        worst = float(np.max(np.nan_to_num(np.abs(values - want), nan=np.inf)))
        wrong = int(np.sum(~(excess <= 0)))
        return (
            f"its first run differs from the float64 reference in {wrong} of {want.size} elements, "
            f"by up to {worst:.3g}"
        )
    return None


def forget() -> None:
    """Forget loaded kernels and first-run verdicts (registered torch ops stay)."""
    with _lock:
        _loaded.clear()
        _verdicts.clear()


def _results(out: Any) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _target_name(kernel: Any) -> str:
    return str(getattr(kernel.target, "name", kernel.target))


def _digest(kernel: Any) -> str:
    import hashlib

    return hashlib.sha256(kernel.source.encode()).hexdigest()[:32]


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)
