"""Stand-ins for nki, torch_neuronx and their versions, with the documented signatures.

    nki.jit(fn=None, **kwargs) -> Kernel, called with tensors, `kernel[lnc](...)` for a grid
    nki.simulate(kernel) -> callable on NumPy arrays or torch tensors, same kind back
    neuronxcc.nki.jit(func=None, mode="auto", **kwargs) -> Kernel, called with tensors (NKI Beta 1)
    neuronxcc.nki.simulate_kernel(kernel, *args, **kwargs) -> results; NumPy arrays in and out
    torch_neuronx.nki_op(name, mutates_args) -> decorator of a typed function, a custom op back:
        while a graph is traced the function itself runs, on fake and functional tensors
    torch_neuronx.nki_hop.wrap_nki(kernel) -> callable that is a higher-order operator in a trace

A stand-in kernel runs its own Python body on tensors: kernel files of these tests use that.
"""

import importlib.metadata
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)

from nmm_compiler.targets import Target, get


class JitKernel:
    """What `nki.jit` returns."""

    def __init__(self, fn, kwargs):
        self.fn, self.kwargs, self.grid = fn, kwargs, ()
        self.calls, self.grids = [], []

    def __getitem__(self, grid):
        launched = JitKernel(self.fn, self.kwargs)
        launched.grid, launched.calls, launched.grids = grid, self.calls, self.grids
        return launched

    def __call__(self, *args):
        assert all(isinstance(a, (torch.Tensor, np.ndarray)) for a in args)
        assert not any(type(a).__name__ in ("FakeTensor", "FunctionalTensor") for a in args), (
            "a kernel was run while tracing"
        )
        self.calls.append(tuple(a.shape for a in args))
        self.grids.append(self.grid)
        return self.fn(*args)


class KernelCall(HigherOrderOperator):
    """A kernel's call in a traced graph, as torch_neuronx's nki_kernel_wrapper."""

    def __init__(self):
        super().__init__("stand_in_nki_kernel", cacheable=True)

    def __call__(self, kernel_index, args):
        return super().__call__(kernel_index=kernel_index, args=args)


kernel_call = KernelCall()
wrapped_kernels = []
for key in ("PythonDispatcher", "PythonTLSSnapshot", "ADInplaceOrView", "BackendSelect"):
    kernel_call.fallthrough(getattr(torch._C.DispatchKey, key))
kernel_call.fallthrough(torch._C.DispatchKey.AutogradCPU)


@kernel_call.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def run_kernel(*, kernel_index, args):
    return wrapped_kernels[kernel_index](*args)


@kernel_call.py_impl(FakeTensorMode)
def fake_kernel(mode, *, kernel_index, args):
    with mode:
        return wrapped_kernels[kernel_index].fn(*args)


@kernel_call.py_impl(ProxyTorchDispatchMode)
def trace_kernel(mode, *, kernel_index, args):
    with disable_proxy_modes_tracing():
        out = kernel_call(kernel_index, args)
    proxies = torch.utils._pytree.tree_map(mode.tracer.unwrap_proxy, args)
    node = mode.tracer.create_proxy(
        "call_function", kernel_call, (), {"kernel_index": kernel_index, "args": proxies}
    )
    return track_tensor_tree(out, node, constant=None, tracer=mode.tracer)


@kernel_call.py_functionalize_impl
def functional_kernel(ctx, kernel_index, args):
    unwrapped = ctx.unwrap_tensors(args)
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(kernel_call(kernel_index, unwrapped))


class WrappedKernel:
    """What `wrap_nki` returns."""

    def __init__(self, kernel):
        self.index, self.kernel = len(wrapped_kernels), kernel
        wrapped_kernels.append(kernel)

    def __getitem__(self, grid):
        return WrappedKernel(self.kernel[grid])

    def __call__(self, *args):
        return kernel_call(self.index, args)


@dataclass
class StandIns:
    """What was installed, and what it saw."""

    registered: list = field(default_factory=list)
    simulated_for: list = field(default_factory=list)


def install(
    monkeypatch, *, nki="0.6.0", neuronx_cc=None, torch_neuronx=None, torch_xla=None, nki_op=True
):
    """Put the stand-ins into sys.modules with these versions; None leaves one out."""
    seen = StandIns()
    versions = {
        "nki": nki, "neuronx-cc": neuronx_cc, "torch-neuronx": torch_neuronx,
        "torch-xla": torch_xla,
    }  # fmt: skip
    real = importlib.metadata.version

    def version(name):
        if name in versions:
            if versions.get(name) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    if nki is not None:
        module = types.ModuleType("nki")

        def jit(fn=None, **kwargs):
            return JitKernel(fn, kwargs) if fn is not None else lambda f: JitKernel(f, kwargs)

        def simulate(kernel):
            def run(*args):
                seen.simulated_for.append(os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"))
                return kernel(*args)

            return run

        module.jit, module.simulate = jit, simulate
        monkeypatch.setitem(sys.modules, "nki", module)
    if neuronx_cc is not None:
        _install_beta_1(monkeypatch, seen)
    if torch_neuronx is not None:
        module = types.ModuleType("torch_neuronx")
        if nki_op:

            def make(name, mutates_args):
                def decorate(fn):
                    assert not isinstance(fn, JitKernel), "decorate a function, not the kernel"
                    op = torch.library.custom_op(name, fn, mutates_args=mutates_args)
                    op.register_fake(fn)

                    def traced(mode, op, types, args, kwargs):
                        with mode:
                            return fn(*args, **kwargs)

                    op.register_torch_dispatch(FunctionalTensorMode, traced)
                    seen.registered.append(name)
                    return op

                return decorate

            module.nki_op = make
            hop = types.ModuleType("torch_neuronx.nki_hop")
            hop.wrap_nki = WrappedKernel
            monkeypatch.setitem(sys.modules, "torch_neuronx.nki_hop", hop)
        monkeypatch.setitem(sys.modules, "torch_neuronx", module)
    return seen


def _install_beta_1(monkeypatch, seen):
    module = types.ModuleType("neuronxcc.nki")

    def jit(func=None, mode="auto", **kwargs):
        return JitKernel(func, kwargs) if func is not None else lambda f: JitKernel(f, kwargs)

    def simulate_kernel(kernel, *args, **kwargs):
        assert all(isinstance(a, np.ndarray) for a in args), "NumPy arrays only"
        seen.simulated_for.append(os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"))
        return kernel(*args, **kwargs)

    module.jit, module.simulate_kernel = jit, simulate_kernel
    monkeypatch.setitem(sys.modules, "neuronxcc", types.ModuleType("neuronxcc"))
    monkeypatch.setitem(sys.modules, "neuronxcc.nki", module)
    sys.modules["neuronxcc"].nki = module


@dataclass(frozen=True)
class StandInKernel:
    """A kernel as the build hands it over, with a file that the test wrote."""

    name: str
    spec: object
    target: Target
    source: str
    path: Path
    dialect: str = "nki"

    def check_before_run(self):
        """Nothing: its file is of this process."""


RIGHT = "(x @ u) @ v"


def write_kernel(tmp_path, spec, body=RIGHT, name="tiny", dialect="nki"):
    """Return a kernel of the operands of a spec whose file returns `body`."""
    line = "import nki" if dialect == "nki" else "import neuronxcc.nki as nki"
    operands = ", ".join(operand.name for operand in spec.inputs())
    source = f"{line}\n\n\n@nki.jit\ndef {name}({operands}):\n    return {body}\n"
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    return StandInKernel(name, spec, get("trn2"), source, path, dialect)
