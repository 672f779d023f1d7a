"""vllm-neuron's backends get a rewritten graph; against stand-ins with the documented signatures.

backend(gm, example_inputs, options={}), whose cache key is a hash of str(gm.graph) without the
    kernel_idx of kernels' calls
wrap_nki(kernel)[grid](*args) -> a call of the higher-order operator nki_kernel_wrapper
"""

import ast
import copy
import dataclasses
import hashlib
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from torch._ops import HigherOrderOperator
from toy_models import Model, Pair

import nmm_compiler as nmm
from nmm_compiler.codegen import build
from nmm_compiler.device import vllm_neuron
from nmm_compiler.simulator.run import simulate

MODULE = "vllm_neuron.nki.nki_hop"


class Wrapper(HigherOrderOperator):
    """nki_kernel_wrapper, which runs the kernel in our simulator."""

    def __init__(self):
        super().__init__("nki_kernel_wrapper", cacheable=True)

    def __call__(self, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names,
                 constant_args_key):  # fmt: skip
        return super().__call__(
            kernel_idx=kernel_idx, grid=grid, backend_config=backend_config,
            operand_output_aliases=operand_output_aliases, args=args, arg_names=arg_names,
            constant_args_key=constant_args_key,
        )  # fmt: skip


wrapper = Wrapper()
for key in ("AutogradCPU", "ADInplaceOrView", "BackendSelect", "AutocastCPU"):
    wrapper.fallthrough(getattr(torch._C.DispatchKey, key))
kernels = []


@wrapper.py_impl(torch._C.DispatchKey.CPU)
def _on_cpu(*, kernel_idx, args, arg_names, **_):
    kernel = kernels[kernel_idx]
    assert arg_names == kernel.names
    tensors = [np.asarray(a) for a in args if isinstance(a, torch.Tensor)]
    (digest,) = (a for a in args if not isinstance(a, torch.Tensor))
    run = simulate(kernel.place, *tensors, digest, target="trn2", mode="functional")
    results = [torch.from_numpy(np.ascontiguousarray(y)) for y in run.outputs]
    return results[0] if len(results) == 1 else tuple(results)


class Caller:
    def __init__(self, index, grid, names):
        self.index, self.grid, self.names = index, grid, names

    def __getitem__(self, grid):
        return Caller(self.index, (grid,) if isinstance(grid, int) else grid, self.names)

    def __call__(self, *args, **kwargs):
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return wrapper(
            kernel_idx=self.index, grid=self.grid, backend_config="", operand_output_aliases={},
            args=tuple(given[name] for name in self.names), arg_names=self.names,
            constant_args_key=-1,
        )  # fmt: skip


def wrap_nki(kernel):
    kernels.append(kernel)
    return Caller(len(kernels) - 1, [], kernel.names)


class Jit:
    """A kernel of a file; names are its parameters, as inspect.signature gives them."""

    def __init__(self, kernel, directory):
        path = directory / f"{kernel.name}_{len(kernels)}.py"
        path.write_text(kernel.source)
        self.place = f"{path}:{kernel.name}"
        functions = [n for n in ast.parse(kernel.source).body if isinstance(n, ast.FunctionDef)]
        (own,) = (f for f in functions if f.name == kernel.name)
        self.names = [argument.arg for argument in own.args.args]


@pytest.fixture
def neuron(monkeypatch, tmp_path):
    """Stand-ins for nki and vllm-neuron; yields what the backends were given."""
    seen = []
    module = types.ModuleType(MODULE)
    module.wrap_nki = wrap_nki
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(vllm_neuron.neuron, "load", lambda kernel: Jit(kernel, tmp_path))

    def backend(gm, example_inputs, options={}):  # noqa: B006  (as it is documented)
        plain = copy.deepcopy(gm)
        for node in plain.graph.nodes:
            if node.target is wrapper:
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "kernel_idx"}
        key = hashlib.md5(str(plain.graph).encode()).hexdigest()
        seen.append((gm, options, key))
        return gm.forward

    def capture(gm, example_inputs, options={}):  # noqa: B006
        backend(gm, example_inputs, options)

        def bail(*args):
            raise RuntimeError("captured")

        return bail

    for name, function in (("vllm_neuron", backend), ("vllm_neuron_graph_capture", capture)):
        function._tags = ()
        monkeypatch.setitem(registry._COMPILER_FNS, name, function)
        monkeypatch.setitem(registry._BACKENDS, name, None)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def three_chains():
    parts = {"q": Pair(64, 8, 48, False), "k": Pair(64, 4, 16, False), "o": Pair(48, 6, 64, False)}
    model = Model(lambda m, x: (m.o(torch.tanh(m.q(x))), m.k(x)), **parts)
    return model.requires_grad_(False), torch.randn(2, 5, 64)


def calls(gm):
    return [node for node in gm.graph.nodes if node.target is wrapper]


def test_a_rewritten_graph_reaches_the_backend(neuron):
    model, x = three_chains()
    compiled = torch.compile(
        model, backend=vllm_neuron.wrap(strict=True), options={"compiler_args": "-O1"}
    )
    got, want = compiled(x), model(x)
    for left, right in zip(got, want, strict=True):
        # Sums of 64 terms and then of 8, of size 1, in another order.
        torch.testing.assert_close(left, right, rtol=0, atol=2.0**-23 * 72)
    ((gm, options, _),) = neuron
    assert options == {"compiler_args": "-O1"}
    assert len(calls(gm)) == 2  # q and k share x
    assert not any("nmm" in str(node.target) for node in gm.graph.nodes)
    assert nmm.last_report().inner == "vllm_neuron"
    assert len(nmm.last_report().kernels) == 2
    assert "for this graph (10 tokens a call, simulated)" in nmm.last_report().headline()
    # The hash of a kernel is a static argument of its call.
    sources = {hashlib.sha256(k.source.encode()).hexdigest() for _, k in build._KERNELS.values()}
    for node in calls(gm):
        assert node.kwargs["arg_names"][-1] == vllm_neuron.HASH_ARGUMENT
        assert node.kwargs["args"][-1] in sources
        assert node.kwargs["args"][-1] in str(gm.graph)


def test_attention_is_a_kernel_of_reshaped_operands(neuron):
    attention = Model(
        lambda m, x: nn.functional.scaled_dot_product_attention(*x.unbind(), is_causal=True)
    )
    x = torch.randn(3, 1, 2, 8, 16)
    compiled = torch.compile(attention, backend=vllm_neuron.wrap(strict=True, rules=["+attention"]))
    # Sums of 16 terms and then of 8, of size 1, in another order.
    torch.testing.assert_close(compiled(x), attention(x), rtol=0, atol=2.0**-23 * 64)
    assert len(calls(neuron[0][0])) == 1


def test_the_cache_key_changes_with_a_kernels_source_and_with_nothing_else(neuron, monkeypatch):
    model, x = three_chains()
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(model, backend=vllm_neuron.wrap(strict=True))(x)
    real = vllm_neuron._with_hash

    def newer(kernel):
        return real(dataclasses.replace(kernel, source=kernel.source + "\n# a newer version\n"))

    monkeypatch.setattr(vllm_neuron, "_with_hash", newer)
    torch._dynamo.reset()
    torch.compile(model, backend=vllm_neuron.wrap(strict=True))(x)
    first, again, changed = (key for *_, key in neuron)
    assert first == again != changed


def test_install_wraps_what_vllm_calls_by_name(neuron):
    model, x = three_chains()
    names = ("vllm_neuron", "vllm_neuron_graph_capture")
    assert vllm_neuron.install(strict=True) == names
    assert vllm_neuron.install(strict=True) == names  # a second time changes nothing
    with pytest.raises(RuntimeError, match="captured"):
        torch.compile(model, backend=names[1])(x)
    torch._dynamo.reset()
    torch.compile(model, backend=names[0])(x)
    keys = [key for *_, key in neuron]
    assert len(keys) == 2
    assert keys[0] == keys[1]  # what was captured is what is looked up


def test_a_graph_without_chains_is_the_backends_own(neuron):
    torch.compile(nn.Linear(8, 8), backend=vllm_neuron.wrap())(torch.randn(2, 8))
    ((gm, _, _),) = neuron
    assert not calls(gm)


@pytest.mark.parametrize(
    ("there", "dynamic", "words"),
    [(False, False, "install vllm-neuron"), (True, True, "dynamic=False")],
)
def test_without_wrap_nki_or_with_a_symbolic_token_count_the_way_out_is_told(
    neuron, monkeypatch, there, dynamic, words
):
    if not there:
        monkeypatch.setitem(sys.modules, MODULE, None)
    model, x = three_chains()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        torch.compile(model, backend=vllm_neuron.wrap(), dynamic=dynamic)(x)
