"""The ladder of small kernels: what each rung finds, on every executor that a machine may have."""

import json

import numpy as np
import pytest
import torch
from runtime.neuron_stand_ins import install
from typer.testing import CliRunner

from nmm_compiler import targets
from nmm_compiler.cli.commands import app
from nmm_compiler.errors import NeuronSetupError, UnknownNameError
from nmm_compiler.nki_api.lint import lint_file
from nmm_compiler.runtime import ladder, machine, neuron
from nmm_compiler.simulator.run import simulate


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


@pytest.mark.parametrize("target", targets.names())
def test_every_rung_passes_in_the_simulator(target):
    found = ladder.climb("simulator", target)
    left_out = {v.rung for v in found.verdicts if v.verdict == "left out"}
    assert found.passed, str(found)
    assert left_out == {
        rung.name
        for rung in ladder.RUNGS
        if rung.compiled or (rung.needs and not getattr(targets.get(target), rung.needs))
    }
    assert all(v.predicted_us > 0 for v in found.verdicts if v.verdict == "passed")
    assert ladder.Ladder.from_json(found.to_json()) == found
    assert "in this package's simulator, no device was used" in str(found)


def test_the_rungs_are_legal_nki():
    assert not lint_file(ladder.KERNELS, nki="0.6")
    assert not lint_file(ladder.KERNELS, nki="0.7")
    names = {rung.kernel for rung in ladder.RUNGS}
    assert all(f"def {name}(" in ladder.KERNELS.read_text() for name in names)


@pytest.mark.parametrize("rung", [r for r in ladder.RUNGS if not r.compiled], ids=lambda r: r.name)
def test_a_rung_notices_one_wrong_element(monkeypatch, rung):
    """The largest element of each result is halved."""

    def wrong(*args, **kwargs):
        made = simulate(*args, **kwargs)
        if kwargs["mode"] == "functional":
            for y in made.outputs:
                values = y.astype(np.float64)
                at = np.unravel_index(np.argmax(np.abs(values)), y.shape)
                if values[at] != 0:
                    y[at] = (values[at] * 0.5).astype(y.dtype)
        return made

    monkeypatch.setattr(ladder, "simulate", wrong)
    verdict = ladder._try(rung, "simulator", targets.get("trn2"), 0)
    assert verdict.verdict == "wrong"
    assert "elements differ" in verdict.error


def test_a_rung_that_raises_does_not_stop_the_others(monkeypatch):
    def refuse(*args, **kwargs):
        if "transpos" in str(args[0]) and "tensor" not in str(args[0]):
            raise RuntimeError("the compiler says no")
        return simulate(*args, **kwargs)

    monkeypatch.setattr(ladder, "simulate", refuse)
    monkeypatch.setattr(ladder, "predicted_us", lambda *a: None)
    found = ladder.climb("simulator", "trn2")
    failed = [v for v in found.verdicts if v.verdict == "failed"]
    assert len(failed) == 7
    assert all(v.error == "RuntimeError: the compiler says no" for v in failed)
    assert not found.passed
    assert "27 of 34 rungs passed" in str(found)


def test_without_a_device_the_device_is_refused(monkeypatch):
    install(monkeypatch, torch_neuronx="2.13.3.0")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [])
    with pytest.raises(NeuronSetupError, match="no /dev/neuron"):
        ladder.climb("neuron")
    assert ladder.best_executor() == "nki_simulate"
    install(monkeypatch, nki=None)
    assert ladder.best_executor() == "simulator"
    with pytest.raises(NeuronSetupError, match="pip install nki"):
        ladder.climb("nki_simulate")
    with pytest.raises(UnknownNameError, match="executor"):
        ladder.climb("device")


class OwnNki:
    """Runs a rung's function in this package's simulator where a vendor's tool would.

    It returns zeros for one of them, as toolchains have done.
    """

    def __init__(self, name):
        self.name = name

    def __call__(self, *tensors):
        arrays = [t.float().numpy().astype(ladder.numpy_dtype(_nki_name(t))) for t in tensors]
        made = simulate(f"{ladder.KERNELS}:{self.name}", *arrays, mode="functional")
        share = 0.0 if self.name == "strided_copy" else 1.0
        out = tuple(torch.from_numpy(share * y.astype(np.float32)) for y in made.outputs)
        return out if len(out) > 1 else out[0]


def _nki_name(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    return "float8_e4m3" if name == "float8_e4m3fn" else name


@pytest.fixture
def quick(monkeypatch):
    """Leave out the rungs that are long because they are timed."""
    monkeypatch.setattr(ladder, "RUNGS", tuple(ladder._rungs()))


def test_a_device_climbs_through_the_launchers(monkeypatch, tmp_path, quick):
    """Kernels are loaded, registered and launched as on a device; the verdicts are kept."""
    install(monkeypatch, torch_neuronx="2.13.3.0")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"])
    monkeypatch.setattr(machine, "INSTANCE_TYPE", str(tmp_path / "type"))
    (tmp_path / "type").write_text("trn2.48xlarge")
    monkeypatch.setattr(neuron, "_registered", {})
    monkeypatch.setattr(neuron, "device", lambda: torch.device("cpu"))
    monkeypatch.setitem(neuron._LAUNCHERS, "cpu", neuron._launch_on_torchneuron)
    monkeypatch.setattr(neuron, "load", lambda kernel: OwnNki(kernel.name))
    monkeypatch.setattr(neuron, "_traceable", lambda function: function)
    monkeypatch.setattr(neuron, "compiled_launcher", neuron.launcher)
    monkeypatch.setattr(ladder, "TIMED_RUNS", 1)
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["doctor", "--device"])
    assert done.exit_code == 1, done.output  # a rung is wrong
    assert "verdicts written to" in done.stdout
    written = (tmp_path / "cache" / "device.json").read_text()
    found = ladder.Ladder.from_json(written)
    assert (found.executor, found.target) == ("neuron", "trn2")
    verdicts = {v.rung: v.verdict for v in found.verdicts}
    assert verdicts.pop("strided copy") == "wrong"
    assert set(verdicts.values()) == {"passed"}, str(found)
    assert all(v.time_us > 0 for v in found.verdicts)


def test_the_command_shows_the_verdicts(monkeypatch, tmp_path, quick):
    line = ["doctor", "--device", "--executor", "simulator"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "22 of 22 rungs passed" in done.stdout
    assert "written" not in done.stdout  # verdicts of a simulator are of no device
    out = tmp_path / "verdicts.json"
    told = json.loads(CliRunner().invoke(app, [*line, "--json", "--out", str(out)]).stdout)
    assert len(told["verdicts"]) == len(ladder.RUNGS)
    assert json.loads(out.read_text()) == told
    assert CliRunner().invoke(app, ["doctor", "--executor", "simulator"]).exit_code == 2
    monkeypatch.setattr(ladder, "_compare", lambda *a: "broken")
    assert CliRunner().invoke(app, line).exit_code == 1
