"""What failed on this machine's device, and what its environment takes, is in no kernel."""

import dataclasses
import json
import os
import warnings

import pytest
import torch
from kernels.judge import prove_right, spec_of

import nmm_compiler
from nmm_compiler import targets
from nmm_compiler.codegen.build import build_kernel, kernel_key
from nmm_compiler.codegen.choose import choose, rank, refusal
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.device import ladder
from nmm_compiler.errors import FileError, OptionTypeError
from nmm_compiler.kernels.linear.specs import MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.prices.kernel import estimate_us, simulated_us
from nmm_compiler.runtime.kernels import Kernels
from nmm_compiler.targets.this_machine import WITHOUT

FP8 = "float8_e4m3"


def verdicts(path, failed=(), executor="neuron", target="trn2", nki="0.6.0"):
    """Write a ladder's file in which some rungs failed; return options that name it."""
    rungs = [{"rung": name, "verdict": "failed"} for name in failed]
    told = {"executor": executor, "target": target, "verdicts": rungs, "machine": {"nki": nki}}
    path.write_text(json.dumps(told), encoding="utf-8")
    return Options(cache=f"off:{path.parent}")


CASES = [
    ("DMA transpose 77", "matmul m=300 k=300 n=300", "dma_transpose", 0),
    ("DMA transpose 3-D", "lowrank m=200 k=256 r=200 n=256", "dma_transpose", 0),
    ("DMA transpose 512", "gated_mlp m=200 k=256 n=256 down_r=128", "dma_transpose", 0),
    ("DMA transpose 8", "lowrank_shared m=200 k=256 pairs=128:256", "dma_transpose", 0),
    ("double row", f"matmul m=256 k=512 n=512 dtype={FP8} x_layout=col", "double_row", 0),
    ("loop to a register", "matmul m=1300 k=256 n=256 x_layout=col", "fori_loop", 40),
]


@pytest.mark.parametrize(("rung", "line", "construct", "budget"), CASES)
def test_a_construct_that_failed_is_not_chosen(tmp_path, rung, line, construct, budget):
    """The kernel that is chosen instead is right, and is another cache entry."""
    spec = spec_of(line)
    failed = verdicts(tmp_path / "device.json", [rung])
    off = Options(cache="off")
    if budget:
        off, failed = (dataclasses.replace(o, instruction_budget=budget) for o in (off, failed))
    before = build_kernel(spec, "trn2", options=off)
    after = build_kernel(spec, "trn2", options=failed)
    assert construct in before.source
    assert construct not in after.source
    prove_right(after)
    keys = [kernel_key(spec, kernel.target, None) for kernel in (before, after)]
    assert keys[0].diff(keys[1]) == ("machine",)
    assert set(WITHOUT[rung]) == set(dict(keys[1].entries)["machine"])


def test_x_turns_on_tensor_engine_in_a_loop():
    made = rank(MatmulSpec(m=2100, k=256, n=256), targets.get("trn2"), 60)
    assert {one.schedule.x_load for one in made if one.schedule.m_loop} == {"tensor"}


@pytest.mark.parametrize("change", [{"executor": "simulator"}, {"target": "trn3"}])
def test_verdicts_of_a_simulator_or_of_other_hardware_change_nothing(tmp_path, change):
    options = verdicts(tmp_path / "device.json", ["DMA transpose 8"], **change)
    assert machine_target("trn2", options) is targets.get("trn2")


@pytest.mark.parametrize(
    ("seen", "installed", "holds"),
    [("0.6.0", "0.6.0", True), ("0.6.0", None, True), ("0.6.0", "0.6.1", False),
     ("0.6.0", "0.7.0", False), (None, "0.6.0", False)],
)  # fmt: skip
def test_verdicts_hold_for_the_nki_that_gave_them(tmp_path, monkeypatch, seen, installed, holds):
    """Where none is installed too: kernels are built ahead for the machine of the verdicts."""
    options = verdicts(tmp_path / "device.json", ["DMA transpose 8"], nki=seen)
    monkeypatch.setattr("nmm_compiler.codegen.machine_target._installed_nki", lambda: installed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert machine_target("trn2", options).dma_transposes is not holds
            machine_target("trn3", options)
    said = [str(w.message) for w in caught]
    assert len(said) == (not holds)
    for text in said:
        assert f"NKI {seen}, and {installed} is installed; run: nmm doctor --device" in text
        assert "\n" not in text


def calibrated(path, factor):
    """Write a target's file whose TensorE is slower by a factor."""
    clock = targets.get("trn2").tensor_clock_hz / factor
    path.write_text(json.dumps({"base": "trn2", "numbers": {"tensor_clock_hz": [clock, "here"]}}))
    return str(path)


@pytest.mark.parametrize(
    ("of_target", "size"),
    [(estimate_us, 2048), (simulated_us, 512)],
    ids=("closed form", "simulated"),
)
def test_prices_are_those_of_the_machine(tmp_path, monkeypatch, of_target, size):
    """A calibrated target counts, also one that was written anew, and so do verdicts."""
    monkeypatch.setenv("NMM_CACHE", "off")
    price = lambda spec, name: of_target(spec, machine_target(name))  # noqa: E731
    spec = MatmulSpec(m=size, k=size, n=size, x_layout="col")
    plain = price(spec, "trn2")
    slower = [price(spec, calibrated(tmp_path / "mine.json", factor)) for factor in (4, 16)]
    assert slower[0] > 1.5 * plain
    assert slower[1] > 2 * slower[0]
    fp8 = dataclasses.replace(spec, dtype=FP8)
    paired = price(fp8, "trn2")
    verdicts(tmp_path / "device.json", ["double row"])
    monkeypatch.setenv("NMM_VERDICTS", str(tmp_path / "device.json"))
    assert price(spec, "trn2") == plain
    if of_target is simulated_us:  # the closed form counts passes of one row for every dtype
        assert price(fp8, "trn2") > paired


def test_a_whole_model_is_predicted_for_the_machine(tmp_path):
    model = torch.nn.Linear(4096, 4096, bias=False).bfloat16()
    inputs = (torch.zeros(2048, 4096).bfloat16(),)
    plain, slow = (
        nmm_compiler.predict(model, target, inputs=inputs, price="closed_form").ttft_us
        for target in ("trn2", calibrated(tmp_path / "mine.json", 2))
    )
    assert slow > 1.5 * plain


def test_one_process_keeps_kernels_of_each_machine_apart(tmp_path):
    spec = MatmulSpec(m=300, k=300, n=300)
    failed = verdicts(tmp_path / "device.json", ["DMA transpose 77"])
    kernels = Kernels()
    found = [kernels.get(spec, "trn2", o) for o in (Options(cache="off"), failed)]
    assert ["dma_transpose" in kernel.source for kernel in found] == [True, False]
    assert refusal(spec, machine_target("trn2", failed)) is None


def test_every_rung_that_is_named_exists_and_every_change_is_a_capability():
    rungs = {rung.name for rung in ladder.RUNGS}
    assert set(WITHOUT) <= rungs
    for changes in WITHOUT.values():
        assert all(isinstance(getattr(targets.get("trn2"), name), bool) for name in changes)
    # a rung about a construct that has another form is in the table
    about = {r.name for r in ladder.RUNGS if "transpose" in r.name or "double row" in r.name}
    assert about - {"TensorE transpose"} <= set(WITHOUT)


def test_the_variable_names_the_file_else_it_is_beside_the_cache(tmp_path, monkeypatch):
    options = verdicts(tmp_path / "a.json", ["DMA transpose 8"])
    monkeypatch.setenv("NMM_VERDICTS", str(tmp_path / "a.json"))
    assert not machine_target("trn2").dma_transposes
    monkeypatch.setenv("NMM_VERDICTS", "off")
    assert machine_target("trn2").dma_transposes
    monkeypatch.delenv("NMM_VERDICTS")
    assert machine_target("trn2", options).dma_transposes
    os.rename(tmp_path / "a.json", tmp_path / "device.json")
    assert not machine_target("trn2", options).dma_transposes
    monkeypatch.setenv("NMM_VERDICTS", str(tmp_path / "a.json"))
    with pytest.raises(OptionTypeError, match="nmm doctor --device wrote"):
        machine_target("trn2")  # a file that is named has to be there
    monkeypatch.delenv("NMM_VERDICTS")
    verdicts(tmp_path / "device.json", [], ["DMA transpose 8", "copy"])  # written anew
    assert machine_target("trn2", options).dma_transposes


NO_NAME = '{"verdicts": [{"rung": [], "verdict": "failed"}]}'


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdicts": [1]}', NO_NAME, "[" * 100_000])
def test_a_file_that_is_no_ladder_is_an_error(tmp_path, text):
    (tmp_path / "device.json").write_text(text)
    with pytest.raises(FileError, match=r"device\.json"):
        machine_target("trn2", Options(cache=f"off:{tmp_path}"))


@pytest.mark.parametrize(
    "line",
    [
        "matmul m=600 k=256 n=700",
        "matmul m=100 k=256 n=5000 x_layout=col",
        "lowrank m=513 k=256 r=1100 n=700 v_layout=col",
        "lowrank m=16 k=2048 r=1100 n=5000",
        "lowrank_shared m=130 k=256 pairs=1100:300,512",
        "gated_mlp m=130 k=256 n=600 gate_r=1100 down_r=200",
    ],
)
def test_seven_banks_where_the_compiler_takes_one(monkeypatch, line):
    spec = spec_of(line)
    monkeypatch.setenv("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "true")
    chip = machine_target("trn2")
    assert chip.psum_banks == 7
    assert machine_target("trn1").psum_banks == 8  # it has no DMA transposes
    best = choose(spec, "trn2")[0].schedule
    assert best.banks <= 7
    kernel = build_kernel(spec, "trn2", options=Options(cache="off"))
    prove_right(kernel)
    assert dict(kernel_key(spec, chip, None).entries)["machine"] == {"psum_banks": 7}
