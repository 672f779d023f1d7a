"""Weights of few bits with a low-rank branch: errors, bytes, ranks, saving, and what is refused."""

import copy
import types

import pytest
import torch
from compress_models import stack, tokens
from torch import nn
from toy_models import llama

import nmm_compiler as nmm
from nmm_compiler.errors import (
    ModelError,
    OptionTypeError,
    ShapeError,
)
from nmm_compiler.kernels.packed_formats import FORMATS, dequantize
from nmm_compiler.lowrank_models import modules
from nmm_compiler.lowrank_models.apply import calibrate, compress, count_bytes
from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear
from nmm_compiler.lowrank_models.tensor_parallel import tensor_parallel_plan

IDS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(model, batches):
    """The inputs and outputs of each linear of `stack` over batches: {name: (x, y)}."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, x, y, name=name: found.update({name: (x[0], y)})
            )
    model(torch.cat(batches))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_op_gives_what_the_table_says(name):
    """Bit for bit: both multiply an element by a scale, in float32."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 24)
    linear.weight.data[3] = 0
    made = QuantizedLinear.of(linear.weight, name, linear.bias)
    expected = dequantize(made.values.numpy(), made.scale.detach().numpy(), FORMATS[name])
    assert torch.equal(made.weight, torch.from_numpy(expected))
    x = torch.randn(5, 64)
    assert torch.equal(made(x), nn.functional.linear(x, made.weight, linear.bias))


@pytest.mark.parametrize("method", ["whitened", "two-sided"])
@pytest.mark.parametrize("rank", [0, 12])
@torch.no_grad()
def test_reported_errors_are_those_of_the_outputs(method, rank):
    """Over the calibration data, with moments that are carried through what the base leaves."""
    batches, model = tokens(width=128), stack(width=128, inner=192)
    original = copy.deepcopy(model)
    seen = outputs(original, batches)
    report = compress(model, base="mxfp4", rank=rank, calibration=batches, method=method)
    for layer in report.layers:
        x, y = seen[layer.name]
        new, bias = model.get_submodule(layer.name), original.get_submodule(layer.name).bias
        y = y if bias is None else y - bias
        off = (new(x) if bias is None else new(x) - bias) - y
        # both are sums of float32; the base and the branch are added in float32
        assert layer.output_error == pytest.approx(float(off.norm() / y.norm()), rel=1e-3)
        assert (layer.rank, layer.base) == (rank, "mxfp4")
        kind = LowRankLinear if rank else QuantizedLinear
        assert isinstance(new, kind)


@pytest.mark.parametrize(
    ("base", "factors", "dtype"),
    [
        ("mxfp4", None, torch.bfloat16),
        ("mxfp4", "mxfp8", torch.float32),
        ("int4", "fp8", torch.bfloat16),
        ("mxfp4", "fp8", torch.bfloat16),
        ("int8", None, torch.float32),
    ],
)
@pytest.mark.parametrize("rank", [0, 32])
def test_bytes_are_those_that_are_held(base, factors, dtype, rank):
    model = stack(width=256, inner=320).to(dtype)
    report = compress(model, base=base, rank=rank, factors=factors)
    layers = [model.get_submodule(layer.name) for layer in report.layers]
    for layer, module in zip(report.layers, layers, strict=True):
        biases = sum(p.nbytes for name, p in module.named_parameters() if name.endswith("bias"))
        assert layer.bytes == count_bytes(module) - biases
    assert report.model_bytes_after == count_bytes(model)
    assert report.achieved_ratio == 1 - sum(x.bytes for x in report.layers) / sum(
        2 * x.k * x.n for x in report.layers
    )


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("factors", [None, "fp8"])
def test_a_budget_of_bytes_is_kept_and_spent(calibrated, factors):
    model = stack(width=128, inner=256).bfloat16()
    data = [x.bfloat16() for x in tokens(width=128)] if calibrated else None
    report = compress(
        model, 0.6, base="mxfp4", factors=factors, calibration=data, align=8, method="auto"
    )
    assert 0.6 <= report.achieved_ratio < 0.63
    assert len({layer.rank for layer in report.layers}) > 1


def test_bases_without_room_for_a_branch_count_in_a_budget():
    """In float32 a base of 8 bits and the smallest branch take more than the weight in 16 bits."""
    report = compress(stack(width=64, inner=64), 0.1, base="fp8")
    assert {layer.rank for layer in report.layers} == {0}
    assert report.achieved_ratio == pytest.approx(report.layers[0].ratio)
    assert report.achieved_ratio > 0.4


def test_ranks_follow_what_a_base_loses():
    """A matrix that its base keeps whole gets no branch."""
    model = stack(width=64, inner=64)
    exact = model.layers[0].q
    exact.weight.data = exact.weight.data.sign() / 2
    report = compress(model, 0.5, base="mxfp4", calibration=tokens(width=64), align=4)
    ranks = {layer.name: layer.rank for layer in report.layers}
    assert ranks["layers.0.q"] == 0 < max(ranks.values())
    assert isinstance(model.layers[0].q, QuantizedLinear)


def test_statistics_that_are_not_those_of_a_call_are_refused():
    """Those for one base serve another."""
    sizes, batches = {"width": 64, "inner": 96}, tokens(width=64)
    statistics = calibrate(stack(**sizes), batches, base="mxfp4")
    compress(stack(**sizes), rank=8, base="int4", calibration=statistics)
    carried = calibrate(stack(**sizes), batches)
    with pytest.raises(ModelError, match=r"factors of the weights.*base='int4'"):
        compress(stack(**sizes), rank=8, base="int4", calibration=carried)


@pytest.mark.parametrize("base", ["mxfp4", "int4"])
@pytest.mark.parametrize("rank", [0, 8])
def test_a_base_is_rounded_for_its_inputs_and_its_branch(base, rank, monkeypatch):
    """Inputs of few directions: errors that they do not see are free."""
    torch.manual_seed(0)
    mixed = torch.randn(24, 128)
    batches = [torch.randn(256, 24) @ mixed + 0.1 * torch.randn(256, 128) for _ in range(4)]
    errors = []
    for fitted in (False, True):
        if not fitted:
            monkeypatch.setattr(modules, "ROUNDS", 0)
            monkeypatch.setattr(modules, "PULL", 1 - 1e-9)
        model = nn.Sequential(nn.Linear(128, 96, bias=False))
        torch.manual_seed(1)
        nn.init.normal_(model[0].weight)
        report = compress(model, base=base, rank=rank, calibration=batches)
        errors.append(report.layers[0].output_error)
        monkeypatch.undo()
    assert errors[1] < 0.85 * errors[0]


def test_the_code_beside_the_weights_computes_the_same():
    """test_compress_ways_to_load.py has layers with a branch."""
    from nmm_compiler.lowrank_models import modeling_nmm_lowrank as alone

    torch.manual_seed(0)
    linear, x = nn.Linear(64, 24), torch.randn(5, 64)
    for name in FORMATS:
        made = QuantizedLinear.of(linear.weight, name, linear.bias)
        twin = alone.FewBitLinear(64, 24, True, name)
        twin.load_state_dict(made.state_dict())
        assert torch.equal(twin(x), made(x))


def test_adapters_go_on_top_of_a_branch():
    peft = pytest.importorskip("peft")
    model = llama(layers=2, num_key_value_heads=4)
    compress(model, base="mxfp4", rank=8)
    expected = model(IDS).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["down", "up"], r=2))
    assert torch.equal(adapted(IDS).logits, expected)  # an adapter starts at zero
    adapted(IDS).logits.sum().backward()
    found = [p.grad for name, p in adapted.named_parameters() if "lora_B" in name]
    assert found
    assert all(grad is not None and grad.abs().max() > 0 for grad in found)


def test_blocks_that_do_not_divide_are_refused_by_name():
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64))
    with pytest.raises(ShapeError, match=r"1 has 40 input features.*exclude="):
        compress(model, base="mxfp4", rank=4)
    assert compress(model, base="mxfp4", rank=4, exclude="1").layers[0].base == "mxfp4"


def test_a_rank_above_break_even_leaves_the_base_alone_and_says_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(512, 512)).bfloat16()
    report = compress(model, base="mxfp4", rank=32)
    assert [layer.rank for layer in report.layers] == [0, 32]
    assert "rank 32 saves nothing (break-even above 23): the base alone" in report.layers[0].note


@pytest.mark.parametrize(
    ("base", "target", "read"),
    [
        ("mxfp4", "trn2", False), ("mxfp4", "trn3", True), ("fp8", "trn1", False),
        ("fp8", "trn2", True), ("int4", "trn3", False), ("int8", "trn2", False),
    ],
)  # fmt: skip
def test_a_base_that_no_kernel_of_the_target_reads_is_said_to_be_multiplied_out(base, target, read):
    report = compress(nn.Sequential(nn.Linear(64, 96)).bfloat16(), base=base, target=target)
    said = f"no kernel for {target} reads {base}: calls multiply it out"
    assert (said not in " ".join(str(report).split())) == read
    assert (said not in report.headline()) == read


def test_what_has_a_base_is_not_compressed_again():
    model = stack(width=64, inner=96)
    compress(model, base="mxfp4", rank=0, include="layers.0")
    report = compress(model, base="int4", rank=4)
    assert all("already quantized (mxfp4)" in skip.reason for skip in report.skipped)
    assert [layer.name for layer in report.layers] == [
        f"layers.1.{name}" for name in ("q", "k", "up", "down")
    ]


@pytest.mark.parametrize("base", ["fp8", "mxfp4"])
def test_packed_weights_are_refused_where_nothing_cuts_or_reads_them(base):
    model = llama(256, 512, vocabulary=128, dtype=torch.bfloat16)
    nmm.compress(model, base=base, rank=16, allow_slower=True)
    with pytest.raises(OptionTypeError, match="no style cuts packed numbers"):
        tensor_parallel_plan(model, types.SimpleNamespace(ndim=1))
    if base == "fp8":
        lines = nmm.predict(model, price="closed_form", last=True).lines
        assert sum(" fp8 r16" in line.what for line in lines) == 3  # q, k and v; o; the MLP
    else:
        with pytest.raises(ModelError, match=r"mxfp4 weights .* predict the dense model"):
            nmm.predict(model, price="closed_form")
