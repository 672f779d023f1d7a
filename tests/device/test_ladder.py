"""The ladder of small kernels: what each rung finds, on every executor that a machine may have."""

import json
import sys
import types

import numpy as np
import pytest
import torch
from runtime.neuron_stand_ins import install

from nmm_compiler import targets
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.device import ladder
from nmm_compiler.nki_api.api import VERSIONS
from nmm_compiler.nki_api.lint import lint_file, oldest_version
from nmm_compiler.runtime import machine, neuron
from nmm_compiler.simulator.run import simulate


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


@pytest.mark.parametrize("target", targets.names())
def test_every_rung_passes_in_the_simulator(target):
    found = ladder.climb(target)
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
    """Those without a loop on the device from NKI 0.5, the others from 0.6."""
    for file, oldest in ((ladder.KERNELS, "0.5"), (ladder.LOOPS, "0.6")):
        for version in VERSIONS:
            assert bool(lint_file(file, nki=version)) == (version < oldest)
    assert all(f"def {rung.kernel}(" in rung.file.read_text() for rung in ladder.RUNGS)
    assert all(oldest_version(rung.file.read_text()) == rung.nki for rung in ladder.RUNGS)


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
    verdict = ladder._try(rung, "simulator", targets.get("trn2"))
    assert verdict.verdict == "wrong"
    assert "differs by up to" in verdict.error


def test_a_rung_that_raises_does_not_stop_the_others(monkeypatch, quick):
    def refuse(*args, **kwargs):
        if "transpos" in str(args[0]) and "tensor" not in str(args[0]):
            raise RuntimeError("the compiler says no")
        return simulate(*args, **kwargs)

    monkeypatch.setattr(ladder, "simulate", refuse)
    monkeypatch.setattr(ladder, "predicted_us", lambda *a: None)
    found = ladder.climb("trn2")
    failed = [v for v in found.verdicts if v.verdict == "failed"]
    assert len(failed) == 4
    assert all(v.error == "RuntimeError: the compiler says no" for v in failed)
    assert not found.passed
    assert "11 of 15 rungs passed" in str(found)


def test_the_closest_executor_to_a_device_is_taken(monkeypatch):
    install(monkeypatch, torch_neuronx="2.13.3.0")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [])
    assert ladder.best_executor() == "nki_simulate"
    install(monkeypatch, nki=None)
    assert ladder.best_executor() == "simulator"


def test_a_rung_is_loaded_as_every_kernel_is(monkeypatch):
    """Loading asks a kernel for its check, its source and its file; OwnNki loads nothing."""
    install(monkeypatch)
    for name in ("isa", "language"):
        monkeypatch.setitem(sys.modules, f"nki.{name}", types.ModuleType(name))
    loaded = []
    monkeypatch.setattr(neuron, "_loaded", {})
    monkeypatch.setattr(neuron, "simulate", lambda kernel, x: loaded.append(neuron.load(kernel)))
    with pytest.raises(TypeError, match="NoneType"):  # no result was simulated
        ladder._run(ladder.RUNGS[0], "nki_simulate", targets.get("trn2"), [])
    assert [kernel.fn.__name__ for kernel in loaded] == ["copy"]


class OwnNki:
    """Runs a rung's function in this package's simulator where a vendor's tool would.

    It returns zeros for one of them, as toolchains have done.
    """

    def __init__(self, kernel):
        problem = machine.nki_problem(oldest_version(kernel.source))  # as neuron.load asks
        neuron._imported("nki", problem)
        self.kernel = kernel

    def __call__(self, *tensors):
        arrays = [t.float().numpy().astype(ladder.numpy_dtype(_nki_name(t))) for t in tensors]
        made = simulate(f"{self.kernel.path}:{self.kernel.name}", *arrays, mode="functional")
        share = 0.0 if self.kernel.name == "permuted_copy" else 1.0
        out = tuple(torch.from_numpy(share * y.astype(np.float32)) for y in made.outputs)
        return out if len(out) > 1 else out[0]

    def fn(self, x):
        """Return what a trace of rung "copy" sees."""
        return torch.empty_like(x)


def _nki_name(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    return "float8_e4m3" if name == "float8_e4m3fn" else name


@pytest.fixture
def quick(monkeypatch):
    """Leave out the rungs that are long because they are timed."""
    monkeypatch.setattr(ladder, "RUNGS", (*ladder.CONSTRUCTS, *ladder.LOOPED))


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A Trn2 with TorchNeuron whose kernels run in the simulator; set its NKI with `install`."""
    install(monkeypatch, torch_neuronx="2.13.3.0")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"])
    monkeypatch.setattr(machine, "INSTANCE_TYPE", str(tmp_path / "type"))
    (tmp_path / "type").write_text("trn2.48xlarge")
    monkeypatch.setattr(neuron, "_registered", {})
    monkeypatch.setattr(neuron, "device", lambda: torch.device("cpu"))
    monkeypatch.setitem(neuron.LAUNCHERS, "cpu", neuron._launch_on_torchneuron)
    monkeypatch.setattr(neuron, "load", OwnNki)
    monkeypatch.setattr(ladder, "COMPILER", "aot_eager")
    monkeypatch.setattr(ladder, "TIMED_RUNS", 1)
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "cache"))


def test_a_device_climbs_through_the_launchers(tmp_path, nmm, quick, device):
    """Kernels are loaded, registered and launched as on a device; the verdicts are kept."""
    assert "verdicts written to" in nmm("doctor", "--device", code=1).out  # a rung is wrong
    written = (tmp_path / "cache" / "device.json").read_text()
    found = ladder.Ladder.from_json(written)
    assert (found.executor, found.target) == ("neuron", "trn2")
    verdicts = {v.rung: v.verdict for v in found.verdicts}
    assert verdicts.pop("permuted copy") == "wrong"
    assert set(verdicts.values()) == {"passed"}, str(found)
    assert all(v.time_us > 0 for v in found.verdicts)


def test_only_loops_fail_with_an_nki_that_has_none(monkeypatch, tmp_path, quick, device):
    """Kernels that are built there afterwards do without them."""
    install(monkeypatch, torch_neuronx="2.13.3.0", nki="0.5.0")
    found = ladder.climb()
    failed = {v.rung: v.error for v in found.verdicts if v.verdict == "failed"}
    assert set(failed) == {rung.name for rung in ladder.LOOPED}
    assert all("nki 0.5.0 is installed, kernels need 0.6" in error for error in failed.values())
    path = tmp_path / "verdicts.json"
    path.write_text(found.to_json())
    monkeypatch.setenv("NMM_VERDICTS", str(path))
    assert not machine_target("trn2").device_loops


def test_a_device_that_runs_nothing_any_more_gives_no_verdicts(monkeypatch, quick, device):
    """After a fault that no rung survives the others are left out, not called wrong."""
    dead = []

    class Mortal(OwnNki):
        def __call__(self, *tensors):
            dead.extend(["dead"] * (self.kernel.name == "double_row"))
            if dead:
                raise RuntimeError("NRT_EXEC_UNIT_UNRECOVERABLE")
            return super().__call__(*tensors)

    monkeypatch.setattr(neuron, "load", Mortal)
    monkeypatch.setattr(neuron, "_registered", {})
    found = ladder.climb()
    names = [v.rung for v in found.verdicts]
    at = names.index("double row")
    assert found.verdicts[at].verdict == "failed"
    assert {v.verdict for v in found.verdicts[:at]} == {"passed", "wrong"}
    assert {(v.verdict, v.error) for v in found.verdicts[at + 1 :]} == {
        ("left out", "the device runs nothing after 'double row' failed")
    }


def test_the_command_shows_the_verdicts(monkeypatch, tmp_path, nmm, quick):
    line = ("doctor", "--device")
    shown = nmm(*line, code=0).out
    assert "15 of 15 rungs passed" in shown
    assert "written" not in shown  # verdicts of a simulator are of no device
    out = tmp_path / "verdicts.json"
    told = json.loads(nmm(*line, "--json", "--out", out, code=0).out)
    assert len(told["verdicts"]) == len(ladder.RUNGS)
    assert json.loads(out.read_text()) == told
    nmm("doctor", "--out", out, code=2)
    monkeypatch.setattr(ladder, "FP32_ROUNDOFF", -1.0)
    nmm(*line, code=1)
