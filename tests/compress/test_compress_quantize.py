"""Factors of eight bits: how far they are off, saved and loaded, and what is refused."""

import copy

import pytest
import torch
from compress_models import stack, tokens
from torch import nn
from toy_models import llama

from nmm_compiler.errors import FileError, ModelError, OptionTypeError, UnknownNameError
from nmm_compiler.lowrank_models import hf
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import quantize_factors
from nmm_compiler.lowrank_models.recover import recover
from nmm_compiler.lowrank_models.save import save_factors
from nmm_compiler.targets import get

IDS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "format"), [("float8_e4m3", "fp8"), ("int8", "int8")])
def test_compress_rounds_the_factors_that_it_makes(name, format):
    models = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    report = compress(models[0], 0.3, align=8, factors=name)
    compress(models[1], 0.3, align=8)
    quantize_factors(models[1], name)
    state = models[1].state_dict()
    assert all(torch.equal(state[key], value) for key, value in models[0].state_dict().items())
    assert models[0][0].down.format == format
    said = " ".join(str(report).split())  # its lines are wrapped
    assert (report.factors, f"factors of {format}" in said) == (format, True)
    assert report.to_dict()["factors"] == format


@pytest.mark.parametrize("format", ["int8", "mxfp8"])
def test_rounded_factors_count_as_parameters_of_the_model(format):
    model, rounded = stack(width=64, inner=96), stack(width=64, inner=96)
    plain = compress(model, rank=32)
    report = compress(rounded, rank=32, factors=format)
    assert report.model_parameters_after == plain.model_parameters_after
    assert report.model_ratio == plain.model_ratio


def test_fp8_factors_are_priced_as_the_kernels_that_read_them():
    """A decode step reads half of the bytes; int8 factors are dequantized, and priced so.

    The loads get shorter, by the halved bytes over the bandwidth. Products, which fp8 does not
    shorten, may hide a part: half is asked for, and is not derived. No time is below its bytes'.
    """
    size, rank, times = 2048, 512, {}
    for factors in (None, "float8_e4m3", "int8"):
        model = nn.Sequential(nn.Linear(size, size, device="meta", dtype=torch.bfloat16))
        report = compress(model, rank=rank, workload=1, factors=factors)
        times[factors] = report.workload[0].us
    halved_us = 1e6 * rank * 2 * size / get("trn2").memory_bytes_per_second
    assert 0.5 * halved_us <= times[None] - times["float8_e4m3"]
    assert halved_us < times["float8_e4m3"]
    assert 2 * halved_us < times[None]
    assert times["int8"] == times[None]


def test_what_does_not_go_on_top_is_refused_by_name(tmp_path):
    model = stack()
    with pytest.raises(ModelError, match="run compress"):
        quantize_factors(model)
    compress(model, 0.3, align=4)
    teacher = copy.deepcopy(model)
    with pytest.raises(UnknownNameError, match="int8"):
        quantize_factors(model, "int9")
    quantize_factors(model)
    with pytest.raises(ModelError, match="of floats"):
        quantize_factors(model)
    with pytest.raises(OptionTypeError, match="recover, then quantize"):
        recover(model, tokens(), teacher=teacher)
    with pytest.raises(FileError, match="before quantizing"):
        save_factors(model, tmp_path / "f")


def test_torchao_works_and_says_how_to_save(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = llama(num_key_value_heads=4)
    compress(model, 0.2, align=8)
    expected = model(IDS).logits
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    off = (model(IDS).logits - expected).norm() / expected.norm()
    assert 0 < off < 0.05
    with pytest.raises(FileError, match="quantize after loading"):
        hf.save(model, tmp_path / "a")
    with pytest.raises(FileError, match="before quantizing"):
        save_factors(model, tmp_path / "f")
