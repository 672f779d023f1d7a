"""Neuron paths against stand-ins: probing, refusing, launching, checking the first run."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from runtime.neuron_stand_ins import RIGHT, StandInKernel, install, write_kernel

from nmm_compiler.codegen import dialects
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, random_arrays
from nmm_compiler.device import ladder
from nmm_compiler.errors import FileError, NeuronSetupError, OptionTypeError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.ops import registration
from nmm_compiler.ops.call_options import executor_name
from nmm_compiler.options import Options
from nmm_compiler.runtime import executor, kernels, machine, neuron
from nmm_compiler.runtime.kernels import Kernels, NoKernelError
from nmm_compiler.simulator.beta1 import modules
from nmm_compiler.targets import get

SPEC = LowRankSpec(m=4, k=8, r=2, n=6, dtype="float32")
BETA_1 = {"nki": None, "neuronx_cc": "2.22.12471.0"}
NATIVE, XLA = {"torch_neuronx": "2.13.3.0"}, {"torch_neuronx": "2.9.0.1", "torch_xla": "2.9.0"}
LOW_RANK = torch.ops.nmm.lowrank_matmul
names = (f"tiny{i}" for i in itertools.count())


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(neuron, "_registered", {})
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    dialects.beta_1_only.cache_clear()
    neuron.forget()
    yield
    dialects.beta_1_only.cache_clear()
    neuron.forget()


def operands(spec=SPEC):
    torch.manual_seed(0)
    return [torch.randn(t.shape, dtype=getattr(torch, t.dtype)) for t in spec.inputs()]


def computes_the_product(run):
    """Assert that `run` returns the product of the operands that it is given."""
    x, u, v = given = operands()
    torch.testing.assert_close(run(given)[0], (x @ u) @ v)


@pytest.fixture
def cpu_is_xla(monkeypatch):
    """Let CPU tensors stand for tensors on a torch-xla device."""
    install(monkeypatch, **XLA)
    monkeypatch.setitem(neuron.LAUNCHERS, "cpu", neuron._launch_on_xla)
    monkeypatch.setattr(registration, "NEURON_DEVICES", ("cpu",))


@pytest.fixture
def cpu_is_neuron(monkeypatch):
    """Let CPU tensors stand for tensors on TorchNeuron's device."""
    monkeypatch.setitem(neuron.LAUNCHERS, "cpu", neuron._launch_on_torchneuron)
    monkeypatch.setattr(registration, "NEURON_DEVICES", ("cpu",))
    monkeypatch.setattr(registration.EXECUTORS["neuron"], "traced_device", "cpu")
    return install(monkeypatch, **NATIVE)


def as_stored(spec, body):
    """Return the body of a low-rank product, or that of a dense one, with operands as they lie."""
    body = body if isinstance(spec, LowRankSpec) else "x @ w"
    for operand in "xuvw":
        if getattr(spec, f"{operand}_layout", "row") == "col":
            body = body.replace(operand, f"{operand}.T")
    return body if spec.out_layout == "row" else f"({body}).T.contiguous()"


@pytest.fixture
def one_kernel(monkeypatch, tmp_path):
    """Have every spec built as the stand-in kernel with this body."""

    def use(body=RIGHT):
        class Table(kernels.Kernels):
            def get(self, spec, target, options):
                made = self.found.get((spec, target))
                if made is None:
                    made = write_kernel(tmp_path, spec, as_stored(spec, body), next(names))
                    self.found[spec, target] = made
                return made

        table = Table()
        monkeypatch.setattr(executor, "KERNELS", table)
        return table

    return use


@pytest.mark.parametrize(
    ("packages", "devices", "dialect", "path", "problem"),
    [
        ({"nki": None}, 0, None, "none", "package nki is not installed; run: pip install nki"),
        ({"nki": "0.6.0"}, 0, "nki", "simulate", None),
        ({"nki": "0.5.0", **XLA}, 1, "nki", "torch-xla", None),
        ({"nki": "0.7.1", **NATIVE}, 2, "nki", "torchneuron", None),
        ({"nki": "0.5.0", "torch_neuronx": "2.11.3.0.1278"}, 1, "nki", "torchneuron", None),
        ({"nki": "0.8", **NATIVE, "torch_xla": "2.12.0"}, 2, "nki", "torchneuron", None),
        ({"nki": "0.6.0", "torch_neuronx": "2.9.0.1"}, 1, "nki", "none", "needs torch-xla"),
        ({"nki": "0.2.0", **XLA}, 1, None, "none", "nki 0.2.0 is installed, kernels need"),
        ({**BETA_1, **XLA, "torch_neuronx": "2.7.0.1"}, 1, "neuronxcc", "torch-xla", None),
        (BETA_1, 0, "neuronxcc", "simulate", None),
        ({**BETA_1, **NATIVE}, 1, "neuronxcc", "simulate", "takes no kernels of NKI Beta 1"),
        ({**BETA_1, "nki": "0.6.0"}, 0, "nki", "simulate", None),
    ],
)
def test_the_probe_names_the_path_the_dialect_and_the_problem(
    monkeypatch, packages, devices, dialect, path, problem
):
    install(monkeypatch, **packages)
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"] * devices)
    found = machine.probe()
    assert (found.dialect, found.path) == (dialect, path)
    assert (found.problem is None) == (problem is None), found.problem
    assert problem is None or problem in found.problem
    rows = dict(found.rows())
    assert rows["NKI dialect"] == machine._DIALECTS[dialect]
    assert machine.NeuronProbe.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("version", "body", "needed"),
    [
        ("0.2.0", RIGHT, r"need 0\.5 or newer; run: pip install nki"),
        ("0.1", RIGHT, r"need 0\.5 or newer; run: pip install nki"),
        ("0.4.99+abc", RIGHT, r"need 0\.5 or newer; run: pip install nki"),
        ("0.5.0", "nl.fori_loop(0, 2, print)", r"nki 0\.5\.0 is installed, kernels need 0\.6"),
    ],
)
def test_an_nki_older_than_a_kernel_needs_is_refused(monkeypatch, tmp_path, version, body, needed):
    install(monkeypatch, nki=version)
    kernel = write_kernel(tmp_path, SPEC, body)
    source = kernel.source.replace("import nki\n", "import nki\nimport nki.language as nl\n", 1)
    kernel = StandInKernel(kernel.name, SPEC, kernel.target, source, tmp_path / "absent.py")
    with pytest.raises(NeuronSetupError, match=needed):
        neuron.simulate(kernel, operands())


def test_nki_simulate_runs_the_file_for_the_kernels_target(monkeypatch, tmp_path):
    seen = install(monkeypatch)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    computes_the_product(functools.partial(neuron.simulate, write_kernel(tmp_path, SPEC)))
    assert seen.simulated_for == ["trn2"]
    assert "NEURON_PLATFORM_TARGET_OVERRIDE" not in os.environ
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")  # no kernel for trn3 is at hand
    computes_the_product(functools.partial(neuron.simulate, write_kernel(tmp_path, SPEC)))
    assert seen.simulated_for == ["trn2", "trn2"]
    assert os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn3"


def test_a_file_that_was_changed_after_it_was_verified_is_refused(monkeypatch, tmp_path):
    install(monkeypatch)
    kernel = write_kernel(tmp_path, SPEC)
    x, u, v = operands()
    marker = tmp_path / "ran"
    for text in (
        f"open({str(marker)!r}, 'w').close()\n{kernel.source}",
        kernel.source.replace("@ v", "@ v * 2"),
    ):
        kernel.path.write_text(text)
        with pytest.raises(FileError, match="changed after kernel tiny was verified"):
            neuron.simulate(kernel, (x, u, v))
        assert not marker.exists()
    kernel.path.write_text(kernel.source)
    (got,) = neuron.simulate(kernel, (x, u, v))
    kernel.path.write_text("raise RuntimeError\n")  # loaded already, and not read again
    assert torch.equal(neuron.simulate(kernel, (x, u, v))[0], got)
    assert "(x @ u) @ v" in inspect.getsource(neuron.load(kernel).fn)
    kernel.path.unlink()
    neuron.forget()
    assert torch.equal(neuron.simulate(kernel, (x, u, v))[0], got)


def test_nki_simulate_as_executor(monkeypatch, one_kernel):
    install(monkeypatch)
    table = one_kernel()
    x, u, v = operands()
    got = LOW_RANK(x[:3], u, v, executor="nki_simulate")
    torch.testing.assert_close(got, (x[:3] @ u) @ v)
    assert [k.spec.m for k in table.found.values()] == [4]  # the bucket of 3 tokens


def test_the_neuron_executor_refuses_tensors_that_are_elsewhere(one_kernel):
    one_kernel()
    with pytest.raises(NeuronSetupError, match="got tensors on 'cpu'; move the model"):
        LOW_RANK(*operands(), executor="neuron")


def test_torch_xla_tensors_run_the_jit_kernel(one_kernel, cpu_is_xla):
    table = one_kernel()
    for name in ("auto", "neuron"):
        computes_the_product(lambda given, name=name: [LOW_RANK(*given, executor=name)])
    (kernel,) = table.found.values()
    assert len(neuron.load(kernel).calls) == 3  # the first run's check, and two calls


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("((x @ u) @ v) * 0", "differs from the float64 reference by up to"),
        ("((x @ u) @ v) * 1.001", "differs from the float64 reference"),
        ("((x @ u) @ v) * float('nan')", "is not finite in 24 of 24 elements"),
        ("(x @ u)", r"returned shape \(4, 2\), not \(4, 6\)"),
        ("1 / 0", "failed with ZeroDivisionError"),
    ],
)
def test_a_kernel_that_fails_its_first_run_is_not_used(one_kernel, cpu_is_xla, body, words):
    """Contributed kernels have returned zeros with exit code 0 after a toolchain update."""
    table = one_kernel(body)
    x, u, v = operands()
    with pytest.warns(UserWarning, match=words):
        got = LOW_RANK(x, u, v, executor="auto")
    torch.testing.assert_close(got, (x @ u) @ v)
    with warnings.catch_warnings(action="error"):  # said once
        LOW_RANK(x, u, v, executor="auto")
        with pytest.raises(NeuronSetupError, match="failed its first run"):
            LOW_RANK(x, u, v, executor="neuron")
        with pytest.raises(NeuronSetupError, match="failed its first run"):
            LOW_RANK(x, u, v, executor=executor_name(Options(strict=True)))
    assert len(neuron.load(next(iter(table.found.values()))).calls) == 1


def test_torchneuron_registers_each_kernel_once(tmp_path, cpu_is_neuron):
    kernel = write_kernel(tmp_path, SPEC, name=next(names))
    for _ in range(2):
        computes_the_product(functools.partial(neuron.launch, kernel))
    (registered,) = cpu_is_neuron.registered
    assert registered.startswith(f"nmm_kernels::{kernel.name}_")
    assert "(Tensor[] operands) -> Tensor[]" in str(
        neuron.registered_op(kernel)._opoverload._schema
    )


def test_torchneuron_graphs_hold_the_kernels_operator(one_kernel, cpu_is_neuron):
    """The device's compiler must see its own operator, not one that it does not know."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    table = one_kernel()
    graphs = []

    def neuron_compiler(gm, example_inputs):
        graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return make_boxed_func(gm.forward)

    x, *weights = operands()
    u, v = (w.t().contiguous().requires_grad_() for w in weights)

    @torch.compile(backend=aot_autograd(fw_compiler=neuron_compiler), fullgraph=True)
    def run(x):
        return torch.ops.nmm.lowrank_matmul(
            x, u, v, u_layout="col", v_layout="col", executor="auto"
        ).relu()

    want = (x @ u.t() @ v.t()).relu()
    with warnings.catch_warnings(record=True, action="always") as said:
        got = run(x)
        grads = torch.autograd.grad(got.square().sum(), (u, v))
    assert {"built while a graph was traced" in str(one.message) for one in said} == {True}
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), (u, v)))
    assert ["stand_in_nki_kernel" in graph for graph in graphs] == [True, True]
    assert all(
        neuron.load(kernel).calls for kernel in table.found.values()
    )  # they ran, after the trace
    assert not any(target.startswith("nmm.") for graph in graphs for target in graph)


def test_a_traced_graph_uses_what_the_backend_has_checked(monkeypatch, one_kernel, cpu_is_neuron):
    """Nothing runs while a graph is traced: kernels are tried when they are built."""
    from nmm_compiler.backend import compile_graph

    monkeypatch.setattr(compile_graph, "fill_cache", lambda *given, **more: set())
    x, u, v = operands()
    for body, traced in ((RIGHT, True), ("(x @ u) @ v * 2", False)):
        table = one_kernel(body)
        monkeypatch.setattr(compile_graph, "KERNELS", table)
        work = compile_graph.Compilation(
            torch.fx.symbolic_trace(torch.nn.Identity()), [x], Options()
        )
        calls = [types.SimpleNamespace(name="call", kwargs={"target": "trn2"})]
        monkeypatch.setattr(compile_graph, "calls_of", lambda gm, found=calls: found)
        monkeypatch.setattr(compile_graph, "graph_call", lambda *given: ("op", (), {}, 1))
        monkeypatch.setattr(compile_graph, "_specs", lambda *given: [SPEC])
        with warnings.catch_warnings(record=True, action="always") as said:
            monkeypatch.setattr(
                StandInKernel,
                "profile",
                lambda self: types.SimpleNamespace(
                    hbm_read_bytes=1, hbm_write_bytes=1, latency_us=1.0
                ),
                raising=False,
            )
            with work.tried("kernels"):  # a stand-in has no schedule to report
                compile_graph._build_kernels(work, work.gm)
        (kernel,) = table.found.values()
        assert len(neuron.load(kernel).calls) == 1
        assert any("differs from the float64 reference" in str(w.message) for w in said) != traced
        if not traced:
            work.options = Options(strict=True)
            with pytest.raises(NeuronSetupError, match="failed its first run"):
                compile_graph._build_kernels(work, work.gm)
        with (
            torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
            warnings.catch_warnings(action="error"),
            contextlib.nullcontext() if traced else pytest.raises(NoKernelError, match="first"),
        ):
            neuron.launch(kernel, (x, u, v))
        assert len(neuron.load(kernel).calls) == 1


@pytest.mark.parametrize("variable", ["NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"])
def test_logical_cores_that_are_not_the_kernels_are_refused(
    monkeypatch, one_kernel, cpu_is_xla, variable
):
    table = one_kernel()
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    x, u, v = operands()
    with pytest.raises(
        NeuronSetupError, match=r"default of trn2.*export NEURON_LOGICAL_NC_CONFIG=1"
    ):
        LOW_RANK(x, u, v, executor="auto")
    monkeypatch.setenv(variable, "2")
    with pytest.raises(NeuronSetupError, match=r"NEURON_LOGICAL_NC_CONFIG=2 is set"):
        LOW_RANK(x, u, v, executor="auto")
    assert not neuron.load(next(iter(table.found.values()))).calls
    monkeypatch.setenv(variable, "three")
    with pytest.raises(OptionTypeError, match=f"{variable}.*1 or 2"):
        LOW_RANK(x, u, v, executor="auto")
    monkeypatch.setenv(variable, "1")
    LOW_RANK(x, u, v, executor="auto")


@pytest.mark.parametrize("path", ["xla", "neuron", None])
def test_a_kernel_of_two_cores_is_launched_on_two(monkeypatch, tmp_path, path):
    """path: None for nki.simulate, which asks for no cores of a device."""
    install(monkeypatch, torch_neuronx="2.13.3.0")
    kernel, other = (
        write_kernel(tmp_path, dataclasses.replace(SPEC, lnc=2), name=next(names)) for _ in "ab"
    )
    if path is None:
        computes_the_product(functools.partial(neuron.simulate, kernel))
    else:
        monkeypatch.setitem(neuron.LAUNCHERS, "cpu", neuron.LAUNCHERS[path])
        with pytest.raises(NeuronSetupError, match="written for 2 physical cores"):
            neuron.check(other, torch.device("cpu"))
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
        computes_the_product(functools.partial(neuron.launch, kernel))
    assert set(neuron.load(kernel).grids) == {2}


def test_a_kernel_for_other_hardware_is_refused(monkeypatch, tmp_path, one_kernel, cpu_is_xla):
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"])
    one_kernel()
    instance = tmp_path / "instance_type"
    monkeypatch.setattr(machine, "INSTANCE_TYPE", str(instance))
    x, u, v = operands()
    for name, target in (("Inf2", "trn1"), ("trn1.2xlarge", "trn1"), ("Trn3", "trn3")):
        instance.write_text(name + "\n")
        assert machine.probe().target == target
        with pytest.raises(NeuronSetupError, match=f"built for trn2 and the device is {target}"):
            LOW_RANK(x, u, v, executor="auto", target="trn2")
    instance.write_text("trn2.48xlarge\n")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    with pytest.raises(NeuronSetupError, match="NEURON_PLATFORM_TARGET_OVERRIDE=trn1 asks for"):
        LOW_RANK(x, u, v, executor="auto")
    for name in ("trn2", "gen3"):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)
        LOW_RANK(x, u, v, executor="auto")


def test_the_probe_says_what_to_set_for_logical_cores(monkeypatch, tmp_path):
    install(monkeypatch, torch_neuronx="2.13.3.0")
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"])
    monkeypatch.setattr(machine, "INSTANCE_TYPE", str(tmp_path / "instance_type"))
    (tmp_path / "instance_type").write_text("trn2.3xlarge")
    found = machine.probe()
    assert (found.target, found.logical_cores) == ("trn2", 2)
    assert "export NEURON_LOGICAL_NC_CONFIG=1" in found.problem
    assert ("logical core", "2 physical") in found.rows()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert machine.probe().problem is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (RIGHT, None),
        ("(x @ u) @ (v * 0 + 0.1)", "differs from the float64"),  # deaf to v
        (
            "nki.torch.cat([((x @ u) @ v)[:-1], ((x @ u) @ v)[-1:] * 1.5])",
            "differs from the float64",
        ),
        (
            "((x @ u) @ v).index_fill(0, nki.torch.tensor(77), float('inf'))",
            "not finite in 6 of 1800",
        ),
    ],
)
def test_the_first_run_of_many_tokens_compares_some(monkeypatch, tmp_path, body, words):
    """Every value is looked at, and the first, the last and some more tokens are compared."""
    install(monkeypatch)
    sys.modules["nki"].torch = torch
    spec = LowRankSpec(m=300, k=8, r=2, n=6, dtype="bfloat16")
    compared = []
    real = LowRankSpec.reference
    monkeypatch.setattr(LowRankSpec, "reference", lambda s, *a: compared.append(s.m) or real(s, *a))
    kernel = write_kernel(tmp_path, spec, body, "many")
    found = neuron.fault(kernel, torch.device("cpu"), neuron._launch_on_xla)
    assert (found is None) if words is None else (words in found)
    assert compared == ([] if words and "finite" in words else [neuron.TOKENS])


def test_tensors_of_arrays_have_their_values_and_their_bits():
    """Those of fp8 too, which the first run hands over."""
    spec = LowRankSpec(m=4, k=8, r=2, n=6, dtype="float8_e4m3", scales="tensor")
    for array in random_arrays(spec):
        tensor = neuron.tensor(array)
        assert np.array_equal(tensor.float().numpy(), array.astype(np.float32))
        bits = tensor.view(getattr(torch, f"int{8 * array.itemsize}")).numpy()
        assert np.array_equal(bits, array.view(bits.dtype))


# Kernels of NKI Beta 1 on a machine that has nothing else: probing, launching, simulating.

OLD_TORCH = {"torch_neuronx": "2.7.0.1", "torch_xla": "2.7.0"}


@pytest.mark.parametrize(
    ("packages", "target", "dialect"),
    [
        (BETA_1, "trn1", "neuronxcc"),
        (BETA_1, "trn2", "neuronxcc"),
        (BETA_1, "trn3", "nki"),
        ({**BETA_1, "nki": "0.2.0"}, "trn1", "nki"),
        ({"nki": None}, "trn1", "nki"),
    ],
)
def test_beta_1_is_the_default_where_it_is_all_there_is(monkeypatch, packages, target, dialect):
    install(monkeypatch, **packages)
    assert dialects.dialect_for(get(target)) == dialect
    assert dialects.dialect_for(get(target), "nki") == "nki"


def test_a_kernel_is_simulated_and_launched_on_torch_xla_alone(monkeypatch, tmp_path):
    seen = install(monkeypatch, **BETA_1, **OLD_TORCH)
    kernel = write_kernel(tmp_path, SPEC, dialect="neuronxcc", name="tiny_beta_1")
    monkeypatch.setitem(neuron.LAUNCHERS, "cpu", neuron._launch_on_xla)
    x, u, v = given = [neuron.tensor(array) for array in random_arrays(SPEC, seed=3)]
    for run in (neuron.simulate, neuron.launch):
        (y,) = run(kernel, given)
        torch.testing.assert_close(y, (x @ u) @ v)
    assert seen.simulated_for == ["trn2"]
    assert len(neuron.load(kernel).calls) == 3  # the two, and the first run before the launch
    assert "nki" not in sys.modules
    with pytest.raises(NeuronSetupError, match="runs on torch-xla tensors"):
        neuron.LAUNCHERS["neuron"](kernel, given)


@pytest.mark.parametrize(
    ("packages", "dialect", "run", "words"),
    [
        ({}, "neuronxcc", neuron.simulate, "neuronx-cc is not installed, and the kernel is in"),
        (BETA_1, "nki", neuron.simulate, r"only NKI Beta 1 .* pass options={'dialect'"),
        ({"torch_neuronx": "2.9.0.1", "nki_op": False}, "nki", neuron.LAUNCHERS["neuron"],
         r"torch_neuronx 2\.9\.0\.1 has no nki_op"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_what_to_install(
    monkeypatch, tmp_path, packages, dialect, run, words
):
    install(monkeypatch, **packages)
    kernel = write_kernel(tmp_path, SPEC, dialect=dialect, name=next(names))
    with pytest.raises(NeuronSetupError, match=words):
        run(kernel, operands())


def test_the_rungs_say_that_they_are_written_in_nki(monkeypatch):
    install(monkeypatch, **BETA_1, **OLD_TORCH)
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"])
    assert ladder.best_executor() == "simulator"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_emitted_kernel_runs_through_the_documented_calls(monkeypatch, dtype):
    """The modules are those of the simulator: the kernel's own imports find them."""
    install(monkeypatch, **BETA_1)
    for name, module in modules.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = LowRankSpec(m=130, k=200, r=64, n=300, dtype=dtype, bias=True)
    kernel = build_kernel(spec, "trn1", options=Options(cache="off"))
    assert kernel.dialect == "neuronxcc"
    arrays = random_arrays(spec, seed=3)
    (y,) = neuron.simulate(kernel, [neuron.tensor(array) for array in arrays])
    assert y.dtype == getattr(torch, dtype)
    got = (y.to(torch.float64).numpy(),)
    wanted = (np.asarray(spec.reference(*arrays)),)
    proof = compare(
        kernel.name, got, wanted, (spec.error_bound(*arrays),), (spec.typical_error(*arrays),)
    )
    assert proof.passed, str(proof)


def test_two_dialects_of_one_spec_are_two_kernels():
    held = Kernels()
    spec = LowRankSpec(m=4, k=8, r=2, n=6)
    found = {
        name: held.get(spec, "trn1", Options(cache="off", dialect=name))
        for name in ("nki", "neuronxcc")
    }
    assert {name: kernel.dialect for name, kernel in found.items()} == {
        "nki": "nki", "neuronxcc": "neuronxcc",
    }  # fmt: skip
    assert len(held.found) == 2
