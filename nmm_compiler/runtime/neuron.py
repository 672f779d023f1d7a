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
kernel needs. A device of another generation, or one whose logical cores are not the kernel's, is
refused (machine.py).

The first time that a kernel runs on a device, it gets random operands. Every result must be finite
and of the right shape; TOKENS tokens, the first and the last among them, are compared with the
float64 reference, in all their features, as a proof in the simulator compares them: a reference of
all tokens would take minutes for the layers of a large model. A kernel of several ranks runs in the
processes of all of them, with the same operands in each. One that differs, or does not compile, is
not used again, with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
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

from nmm_compiler.codegen.check_against_float64 import compare, random_arrays
from nmm_compiler.errors import FileError, NeuronSetupError
from nmm_compiler.kernels.base import numpy_dtype
from nmm_compiler.nki_api.lint import oldest_version
from nmm_compiler.options import neuron_environment
from nmm_compiler.runtime import machine
from nmm_compiler.runtime.kernels import NoKernelError
from nmm_compiler.simulator.loading.source_text import read_source, run_source

TOKENS = 16
FP8 = torch.float8_e4m3fn
"""torch's dtype for nki's float8_e4m3: the same bits for the same numbers up to 240, nki's largest.
torch-neuronx takes one for the other on trn2 (its utils.map_external_dtype_to_torch)."""


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
        loaded = _loaded.get(_identity(kernel))
        if loaded is None:
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
            loaded = _loaded[_identity(kernel)] = getattr(module, kernel.name)
    return loaded


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
        tensor(np.asarray(array).astype(numpy_dtype(result.dtype)))
        for array, result in zip(results, spec.outputs(), strict=True)
    )


def launch(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a kernel on the Neuron device that holds its operands; return its results.

    While a graph is traced nothing is checked: the backend has checked the kernels it built, and
    one that was built later is used unchecked, with a warning. Raises NoKernelError for a kernel
    that failed its first-run check, NeuronSetupError for tensors that are on no Neuron device, and
    for a device that is not what the kernel was made for.
    """
    device = operands[0].device
    if device.type not in LAUNCHERS:
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
    if not verdict:
        raise NoKernelError(str(kernel.spec), FAILED_FIRST_RUN.format(kernel.name))
    return LAUNCHERS[device.type](kernel, operands)


def _launch_on_xla(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return several(_on_its_cores(load(kernel), kernel)(*operands))


def _launch_on_torchneuron(kernel: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if kernel.dialect == "neuronxcc":
        raise NeuronSetupError(
            f"kernel {kernel.name} is in dialect 'neuronxcc' (NKI Beta 1), which runs on torch-xla "
            "tensors; for tensors on 'neuron' pass options={'dialect': 'nki'}"
        )
    return tuple(registered_op(kernel)(list(operands)))


Launcher = Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]

LAUNCHERS: dict[str, Launcher] = {"xla": _launch_on_xla, "neuron": _launch_on_torchneuron}
"""Device type -> what runs a kernel there, without the first-run check."""


def device() -> torch.device:
    """Return the Neuron device of this process; raises ImportError where its package is broken."""
    if machine.probe().path == "torchneuron":
        importlib.import_module("torch_neuronx")
        return torch.device("neuron")
    return importlib.import_module("torch_xla").device()


_registered: dict[str, Any] = {}


def registered_op(kernel: Any) -> Any:
    """Return the kernel as a torch op of a list of tensors, registered once with `nki_op`.

    TorchNeuron's `nki_op` wants a typed Python function that calls the kernel. While a graph is
    traced it runs that function on fake and functional tensors, as `torch.library.triton_op` does:
    `wrap_nki` makes of the kernel's call a higher-order operator there, and plain execution
    elsewhere.
    """
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()[:32]
    name = f"nmm_kernels::{kernel.name}_{digest}"
    with _lock:
        if name not in _registered:
            torch_neuronx = importlib.import_module("torch_neuronx")
            nki_op = getattr(torch_neuronx, "nki_op", None)
            if nki_op is None:
                raise NeuronSetupError(
                    f"torch_neuronx {machine.version('torch-neuronx')} has no nki_op, which "
                    "tensors on 'neuron' need; install torch-neuronx 2.13 or newer, or use "
                    "torch-xla tensors"
                )
            function = _on_its_cores(_traceable(load(kernel)), kernel)

            def call(operands: list[Tensor]) -> list[Tensor]:
                return list(several(function(*operands)))

            _registered[name] = nki_op(name, mutates_args={})(call)
        return _registered[name]


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
                wrong = fault(kernel, device, LAUNCHERS[device.type])
            if wrong is not None:
                warnings.warn(
                    f"nmm: kernel {kernel.name} is not used on {device.type}: {wrong}. PyTorch "
                    f"computes its calls instead. Source: {kernel.path}",
                    stacklevel=2,
                )
            _verdicts[key] = wrong is None
        return _verdicts[key]


def fault(kernel: Any, device: torch.device, launch: Launcher) -> str | None:
    """Run the kernel on seeded random operands; return what is wrong, or None."""
    spec = kernel.spec
    arrays = random_arrays(spec)
    tensors = [tensor(array).to(device) for array in arrays]
    try:
        results = launch(kernel, tensors)
        got = [y.detach().to("cpu").to(torch.float64).numpy() for y in results]
    except Exception as error:  # the vendor's compiler and runtime may raise anything
        return f"its first run failed with {type(error).__name__}: {error}"
    wrong = misfit(got, [tuple(operand.shape) for operand in spec.outputs()])
    return _difference(spec, arrays, got) if wrong is None else f"its first run {wrong}"


def misfit(got: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Return how many results, of which shape or which elements cannot be right, or None."""
    if len(got) != len(shapes):
        return f"returned {len(got)} results, not {len(shapes)}"
    for values, shape in zip(got, shapes, strict=True):
        if values.shape != shape:
            return f"returned shape {values.shape}, not {shape}"
        finite = int(np.isfinite(values).sum())
        if finite < values.size:
            return f"is not finite in {values.size - finite} of {values.size} elements"
    return None


def _difference(spec: Any, arrays: Sequence[Any], got: Sequence[Any]) -> str | None:
    """Return how the results of some tokens differ from the float64 reference, or None."""
    chosen = _chosen(spec.m) if spec.splits_tokens else np.arange(spec.m)
    small = dataclasses.replace(spec, m=len(chosen))
    arrays = _of_tokens(arrays, spec.inputs(), chosen)
    if spec.tp > 1:  # operands of the product that all ranks compute
        arrays = small.joined(*arrays)
    references = (small.reference, small.error_bound, small.typical_error)
    wanted, bounds, typical = (several(one(*arrays)) for one in references)
    proof = compare(
        "first run",
        tuple(_of_tokens(got, spec.outputs(), chosen)),
        wanted,
        bounds,
        typical,
    )
    if proof.passed:
        return None
    return (
        f"its first run differs from the float64 reference by up to {proof.max_error:.3g} in "
        f"{proof.elements} elements compared, {100 * proof.norm_share:.0f} % of the limit in norm"
    )


def _chosen(m: int) -> Any:
    """Return the tokens that are compared, in order: the first, the last and random ones."""
    if m <= TOKENS:
        return np.arange(m)
    between = np.random.default_rng(0).choice(m - 2, TOKENS - 2, replace=False)
    return np.sort([0, m - 1, *(1 + between)])


def _of_tokens(arrays: Sequence[Any], operands: Sequence[Any], chosen: Any) -> list[Any]:
    """Return the arrays of operands with the chosen tokens only, where one has tokens."""
    return [
        array if one.token_dim is None else np.take(array, chosen, one.token_dim)
        for array, one in zip(arrays, operands, strict=True)
    ]


def several(value: Any) -> tuple[Any, ...]:
    """Return one result, or a tuple or list of them, as a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def tensor(array: Any) -> Tensor:
    """Return an array, perhaps of an ml_dtypes type, as a tensor with the same bits."""
    dtype = FP8 if array.dtype.name == "float8_e4m3" else getattr(torch, array.dtype.name)
    bits = np.ascontiguousarray(array).view(f"i{array.itemsize}")
    return torch.from_numpy(bits).view(dtype)


FAILED_FIRST_RUN = "{} failed its first run, as the warning before says"


def forget() -> None:
    """Forget loaded kernels and first-run verdicts (registered torch ops stay)."""
    with _lock:
        _loaded.clear()
        _verdicts.clear()
