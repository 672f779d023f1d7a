"""Quantized factors: plain int8 and fp8 modules, torchao's subclasses, after compress."""

import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Backend, kinds_of
from torch import nn


class Quantized(nn.Module):
    """A linear with int8 or fp8 weights and a scale for each output."""

    def __init__(self, weight, kind, after):
        super().__init__()
        largest = 127 if kind is torch.int8 else 448
        scale = weight.abs().amax(1, keepdim=True) / largest
        stored = weight / scale
        self.register_buffer("w", (stored.round() if kind is torch.int8 else stored).to(kind))
        self.register_buffer("scale", scale)
        self.after = after

    def forward(self, x):
        if self.after:  # the scale multiplies the result
            return F.linear(x, self.w.to(x.dtype)) * self.scale.to(x.dtype).view(-1)
        return F.linear(x, self.w.to(x.dtype) * self.scale.to(x.dtype))

    def exact(self):
        return self.w.double() * self.scale.double()


def compiled(model, x):
    results = Backend(VERIFIED)
    with torch.no_grad():
        return model(x), torch.compile(model, backend=results)(x), results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("after", [False, True])
def test_plain_modules(kind, after, dtype):
    torch.manual_seed(0)
    layers = [Quantized(torch.randn(n, k), kind, after) for n, k in ((8, 64), (48, 8))]
    model, x = nn.Sequential(*layers), torch.randn(5, 64, dtype=dtype)
    want, got, result = compiled(model, x)
    assert kinds_of(result) == ["lowrank"]
    assert "made of stored weights" in result.matches[0].notes[-1]
    truth = x.double() @ layers[0].exact().T @ layers[1].exact().T
    had, error = (float((y.double() - truth).abs().max()) for y in (want, got))
    # Scales that move into the next factor are rounded once with it.
    assert error <= 2 * had + torch.finfo(dtype).eps * float(truth.abs().max())


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(name):
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 48))
    model = model.to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, name)())
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    want, got, result = compiled(model, x)
    assert kinds_of(result) == ["lowrank"]
    weights = [layer.weight.detach().dequantize().double() for layer in model]
    truth = x.double() @ weights[0].T @ weights[1].T + model[1].bias.detach().double()
    had, error = (float((y.double() - truth).abs().max()) for y in (want, got))
    assert error <= 2 * had


@pytest.mark.parametrize("bits", ["Int8", "Intx"])
def test_torchao_weights_that_round_x_stay_as_they_are(bits):
    """One call would multiply x as it is by the plain weight, which is another product."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 48))
    group = {} if bits == "Int8" else {"weight_granularity": quantization.PerAxis(0)}
    config = getattr(quantization, f"Int8DynamicActivation{bits}WeightConfig")(**group)
    quantization.quantize_(model, config)
    want, got, result = compiled(model, torch.randn(5, 64))
    assert torch.equal(got, want)
    assert not result.matches
    assert any("tensor subclass" in one.reason for one in result.declined)
