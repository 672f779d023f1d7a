"""Quantized factors: plain int8 and fp8 modules, torchao's subclasses, after compress."""

import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Backend, Model, compiled, kinds_of
from torch import nn

import nmm_compiler as nmm

quantization = pytest.importorskip("torchao.quantization")
workflow = pytest.importorskip("torchao.prototype.mx_formats.inference_workflow")


def linear(weight, kind, after):
    """Return a linear with int8 or fp8 weights and a scale for each output, of w or of y."""

    def function(p, x):
        w, scale = p.w.to(x.dtype), p.scale.to(x.dtype)
        return F.linear(x, w) * scale.view(-1) if after else F.linear(x, w * scale)

    model, scale = Model(function), weight.abs().amax(1, keepdim=True)
    scale /= 127 if kind is torch.int8 else 448
    model.register_buffer("w", (weight / scale).to(kind))
    model.register_buffer("scale", scale)
    return model


@torch.no_grad()
def compared(model, x):
    results = Backend(VERIFIED)
    return model(x), torch.compile(model, backend=results)(x), results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("after", [False, True])
def test_plain_modules(kind, after, dtype):
    layers = [linear(torch.randn(n, k), kind, after) for n, k in ((8, 64), (48, 8))]
    *_, result = compared(nn.Sequential(*layers), torch.randn(5, 64, dtype=dtype))
    assert kinds_of(result) == ["lowrank"]
    assert "made of stored weights" in result.matches[0].notes[-1]


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(name):
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 48)).bfloat16()
    quantization.quantize_(model, getattr(quantization, name)())
    *_, result = compared(model, torch.randn(5, 64, dtype=torch.bfloat16))
    assert kinds_of(result) == ["lowrank"]


@pytest.mark.parametrize("bits", ["Int8", "Intx"])
def test_torchao_weights_that_round_x_stay_as_they_are(bits):
    """One call would multiply x as it is by the plain weight, which is another product."""
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 48))
    group = {} if bits == "Int8" else {"weight_granularity": quantization.PerAxis(0)}
    config = getattr(quantization, f"Int8DynamicActivation{bits}WeightConfig")(**group)
    quantization.quantize_(model, config)
    want, got, result = compared(model, torch.randn(5, 64))
    assert torch.equal(got, want)
    assert not result.matches
    assert any("tensor subclass" in one.reason for one in result.declined)


# torchao's quantized linears, alone and under PEFT's adapters: MX tensors are read as stored.

K, H, N = 640, 384, 512  # scales are padded to blocks of 128 rows and 4 columns


def quantized(config, adapted):
    """Return two linears whose weights are quantized, with adapters or not."""
    model = nn.Sequential(nn.Linear(K, H, bias=False), nn.SiLU(), nn.Linear(H, N)).bfloat16()
    quantization.quantize_(model, config)
    if adapted:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora).bfloat16()
    return model.eval(), torch.randn(4, K, dtype=torch.bfloat16)


def blocks(dtype):
    preference = pytest.importorskip("torchao.quantization.quantize_.common").KernelPreference
    return workflow.MXDynamicActivationMXWeightConfig(
        activation_dtype=dtype, weight_dtype=dtype, kernel_preference=preference.EMULATED
    )


@pytest.mark.parametrize(
    ("dtype", "format", "adapted"),
    [(torch.float8_e4m3fn, "mxfp8", True), (torch.float4_e2m1fn_x2, "mxfp4", False)],
    ids=["mxfp8", "mxfp4"],
)
@torch.no_grad()
def test_blocks_are_read_as_stored(dtype, format, adapted):
    model, x = quantized(blocks(dtype), adapted)
    options = {"target": "trn3", "strict": True}
    made = nmm.rewrite(model, x, options=options)
    assert [one.rule for one in made.matches] == ["lora" if adapted else "quantized"] * 2
    assert {one.info["base_weight"] for one in made.matches} == {format}
    assert any("put in order" in note for note in made.matches[0].notes)
    got = compiled(model, **options, executor="simulator")(x)
    if format == "mxfp8":
        want = model(x)  # which rounds x to MXFP8 as the kernels do
    else:  # this rounds x to four bits; the kernels keep eight
        for linear in (one for one in model.modules() if type(one) is nn.Linear):
            plain = getattr(linear.weight, "dequantize", None)
            if type(linear.weight.data).__name__ == "MXTensor":
                linear.weight = nn.Parameter(plain(), requires_grad=False)
        want = model(x)
    # Of MXFP8 the hidden values differ by a rounding to bfloat16, 2^-8, which turns one in 16 of
    # their roundings to a step of 2^-3: 2^-5 in the mean. Else x and they are rounded by 2^-4 more.
    bound = 2**-5 if format == "mxfp8" else 2**0.5 * 2**-4
    assert (got - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_what_no_kernel_reads_is_said_by_name(name, adapted):
    model, x = quantized(getattr(quantization, name)(), adapted)
    made = nmm.explain(model, x, options={"target": "trn3", "strict": True})
    kind = name.replace("WeightOnlyConfig", "Tensor")
    if adapted:
        said = [note for one in made.matches for note in one.notes]
        assert sum(kind in note and "no kernel reads it" in note for note in said) == 2
    else:
        said = [one for one in made.declined if one.rule == "quantized"]
        assert [(one.code, kind in one.reason) for one in said] == [("few_bits", True)] * 2
