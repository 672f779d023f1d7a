"""`nmm doctor --fit`: factors that were put into the times of a device are found again."""

import dataclasses
import json
from pathlib import Path

import pytest

from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel, kernel_key
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.device import ladder
from nmm_compiler.device.ladder import ENGINES, calibrate
from nmm_compiler.errors import FileError, UnknownNameError
from nmm_compiler.kernels.linear.specs import MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.runtime import machine

LAUNCH_US = 812.0
KNOWN = {"TensorE": 1.25, "VectorE": 0.8, "ScalarE": 1.6, "DMA, bytes": 1.4, "DMA, issue": 0.7}


def slower(target, factors):
    """Return the target with each engine's constants scaled by hand."""
    values = {}
    for engine, divided, multiplied in ENGINES.values():
        factor = factors.get(engine, 1.0)
        values |= {name: getattr(target, name) / factor for name in divided}
        values |= {name: getattr(target, name) * factor for name in multiplied}
    transposes = factors["DMA, transposes"] / factors["DMA, bytes"]
    values["dma_transpose_fraction"] = target.dma_transpose_fraction / transposes
    return dataclasses.replace(target, **values)


def times_of(target, path, **changes):
    """Write the ladder of a device whose times are those of a target, with a launch on top."""
    verdicts = [
        ladder.Verdict(
            rung=rung.name, construct=rung.construct, verdict="passed",
            time_us=LAUNCH_US + ladder.predicted_us(rung, target),
        )
        for rung in ladder.RUNGS
        if not rung.compiled and ladder.predicted_us(rung, target) is not None
    ]  # fmt: skip
    found = ladder.Ladder(
        executor="neuron", target=target.name, machine=machine.probe(), verdicts=tuple(verdicts)
    )
    path.write_text(json.dumps({**found.to_dict(), **changes}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The verdicts of a trn2 whose engines are off by KNOWN, and that machine."""
    known = slower(targets.get("trn2"), KNOWN | {"DMA, transposes": 1.5})
    return times_of(known, tmp_path_factory.mktemp("device") / "verdicts.json"), known


def read_again(found, path):
    """Return the fitted target as `--target FILE` reads it."""
    file = path.with_name("fitted.json")
    file.write_text(json.dumps(found.file()))
    return targets.get(str(file))


def test_known_factors_are_found_again(device):
    path, known = device
    found = calibrate(path)
    factors = found.engines
    assert {name: factors[name] for name in KNOWN} == pytest.approx(KNOWN, rel=0.03)
    assert factors["DMA, transposes"] == pytest.approx(1.5, rel=0.05)
    fitted = read_again(found, path)
    for name, (old, new) in found.numbers.items():
        assert old == getattr(targets.get("trn2"), name)
        assert new == pytest.approx(getattr(known, name), rel=0.08), name
        assert fitted.sources[name].kind == "measured"
        assert "verdicts.json" in fitted.sources[name].where
    assert len(found.numbers) == 11


def test_the_fitted_target_predicts_the_machine(device):
    """Rungs that no factor came from too."""
    path, known = device
    fitted = read_again(calibrate(path), path)
    for rung in ladder.RUNGS:
        if not rung.compiled:
            want, raw = (ladder.predicted_us(rung, t) for t in (known, targets.get("trn2")))
            got = ladder.predicted_us(rung, fitted)
            assert abs(got - want) <= max(0.05 * want, 0.5 * abs(raw - want)), rung.name


def test_the_command_writes_a_target_that_commands_and_options_read(device, tmp_path, nmm):
    path, _ = device
    out = tmp_path / "mine.json"
    assert "11 constants of trn2 changed" in nmm("doctor", "--fit", path, "--out", out).out
    sizes = ("--m", "256", "--k", "1024", "--n", "1024")
    nmm("kernel", "matmul", *sizes, "--target", out, code=0)
    spec = MatmulSpec(m=256, k=1024, n=1024)
    kernel = build_kernel(spec, str(out), options=Options.make({"target": str(out)}))
    assert kernel.target.name == "trn2"  # what its hardware is called when it is launched
    plain = build_kernel(spec, "trn2")
    assert kernel.profile().latency_us > 1.05 * plain.profile().latency_us
    keys = [kernel_key(spec, machine_target(t), None) for t in (str(out), "trn2")]
    assert keys[0].diff(keys[1]) == ("machine",)


def test_a_factor_that_cannot_be_is_left_alone(device, tmp_path):
    told = json.loads(device[0].read_text())
    for verdict in told["verdicts"]:
        if verdict["rung"] == "matmuls, many":
            verdict["time_us"] = 100 * LAUNCH_US
        elif verdict["rung"] == "additions, many":
            verdict["verdict"] = "failed"
    (tmp_path / "noisy.json").write_text(json.dumps(told))
    found = calibrate(tmp_path / "noisy.json")
    why = {name: one for name, one in found.engines.items() if isinstance(one, str)}
    assert set(why) == {"TensorE", "VectorE"}
    assert "is not believed" in why["TensorE"]
    assert "did not both pass" in why["VectorE"]
    assert not {"tensor_clock_hz", "vector_clock_hz"} & set(found.numbers)
    assert "is not believed" in str(found)


def test_files_that_say_nothing_are_errors(device, tmp_path, nmm):
    told = json.loads(device[0].read_text())
    for verdict in told["verdicts"]:
        verdict["time_us"] = None

    def passed(times):
        return [{"rung": str(t), "verdict": "passed", "time_us": t} for t in times]

    for text, words in (
        ("{", "not JSON"),
        ('{"target": "trn9"}', "names no target"),
        (json.dumps(told), "holds no times"),
        ('{"target": "trn2", "verdicts": 3}', "holds no times"),
        (json.dumps(told | {"verdicts": passed(["nan", True, 10**400])}), "holds no times"),
    ):
        (tmp_path / "file.json").write_text(text)
        with pytest.raises(FileError, match=words):
            calibrate(tmp_path / "file.json")
    for text in (
        '{"base": "trn9", "numbers": {}}',
        '{"base": "trn2", "numbers": {"psum_banks": [1e9, "x"]}}',
        '{"base": "trn2", "numbers": {"tensor_clock_hz": [-1, "x"]}}',
        '{"base": "trn2", "numbers": {"name": ["trn3", "x"]}}',
        '{"base": "trn2", "numbers": {"tensor_clock_hz": 1e9}}',
        '{"base": "trn2", "numbers": {"tensor_clock_hz": [1e400, "x"]}}',
        '{"base": "trn2", "numbers": {"tensor_clock_hz": [1e5, "x"]}}',
        '{"base": "trn2", "numbers": {"tensor_clock_hz": [1%s, "x"]}}' % ("0" * 400),
    ):
        (tmp_path / "file.json").write_text(text)
        with pytest.raises(FileError, match=r"file\.json"):
            targets.get(str(tmp_path / "file.json"))
    with pytest.raises(FileError, match="no regular file"):
        calibrate(Path("/dev/full"))
    with pytest.raises(FileError, match="cannot read"):
        targets.get("nowhere.json")
    with pytest.raises(UnknownNameError):
        Options(target="nowhere.toml")
    nmm("doctor", "--fit", device[0], "-o", "mine.toml", code=2)
