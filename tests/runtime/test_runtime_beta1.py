"""Kernels of NKI Beta 1 on a machine that has nothing else: probing, launching, simulating."""

import sys

import numpy as np
import pytest
import torch
from runtime.neuron_stand_ins import install, write_kernel

from nmm_compiler.codegen import dialects
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, random_arrays
from nmm_compiler.device import ladder
from nmm_compiler.errors import NeuronSetupError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.options import Options
from nmm_compiler.runtime import first_run, machine, neuron
from nmm_compiler.runtime.kernels import Kernels
from nmm_compiler.simulator.beta1 import modules
from nmm_compiler.targets import get

SPEC = LowRankSpec(m=4, k=8, r=2, n=6, dtype="float32")
BETA_1 = {"nki": None, "neuronx_cc": "2.22.12471.0"}
OLD_TORCH = {"torch_neuronx": "2.7.0.1", "torch_xla": "2.7.0"}
OFF = Options(cache="off")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    dialects._beta_1_only.cache_clear()
    neuron.forget()
    yield
    dialects._beta_1_only.cache_clear()
    neuron.forget()


def operands(spec):
    return [first_run.tensor(array) for array in random_arrays(spec, seed=3)]


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
    monkeypatch.setitem(neuron._LAUNCHERS, "cpu", neuron._launch_on_xla)
    x, u, v = given = operands(SPEC)
    for run in (neuron.simulate, neuron.launch):
        (y,) = run(kernel, given)
        torch.testing.assert_close(y, (x @ u) @ v)
    assert seen.simulated_for == ["trn2"]
    assert len(neuron.load(kernel).calls) == 3  # the two, and the first run before the launch
    assert "nki" not in sys.modules
    with pytest.raises(NeuronSetupError, match="runs on torch-xla tensors"):
        neuron._LAUNCHERS["neuron"](kernel, given)


def test_what_is_missing_is_named_with_what_to_install(monkeypatch, tmp_path):
    install(monkeypatch)
    kernel = write_kernel(tmp_path, SPEC, dialect="neuronxcc", name="missing_beta_1")
    with pytest.raises(NeuronSetupError, match="neuronx-cc is not installed, and the kernel is in"):
        neuron.simulate(kernel, operands(SPEC))
    install(monkeypatch, **BETA_1)
    kernel = write_kernel(tmp_path, SPEC, name="current")
    with pytest.raises(NeuronSetupError, match=r"only NKI Beta 1 .* pass options={'dialect'"):
        neuron.simulate(kernel, operands(SPEC))


def test_the_rungs_say_that_they_are_written_in_nki(monkeypatch):
    install(monkeypatch, **BETA_1, **OLD_TORCH)
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"])
    assert ladder.best_executor() == "simulator"
    with pytest.raises(NeuronSetupError, match="only NKI Beta 1 inside neuronx-cc"):
        ladder.climb("neuron")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_emitted_kernel_runs_through_the_documented_calls(monkeypatch, dtype):
    """The modules are those of the simulator: the kernel's own imports find them."""
    install(monkeypatch, **BETA_1)
    for name, module in modules.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = LowRankSpec(m=130, k=200, r=64, n=300, dtype=dtype, bias=True)
    kernel = build_kernel(spec, "trn1", options=OFF)
    assert kernel.dialect == "neuronxcc"
    arrays = random_arrays(spec, seed=3)
    (y,) = neuron.simulate(kernel, [first_run.tensor(array) for array in arrays])
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
    assert len(held.all()) == 2
