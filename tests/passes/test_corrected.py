"""An fp8 weight with a low-rank branch, as `compress(base="fp8")` and adapters spell it."""

import pytest
import torch
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.lowrank_models.quantize import QuantizedLinear

OPTIONS = {"rules": ["lora"]}


class Corrected(nn.Module):
    """x dequantized^T + s (x a^T) b^T, the base frozen."""

    def __init__(self, k=128, n=256, r=16, bias=True, scale=1.0, format="fp8"):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(n, k, dtype=torch.bfloat16) / k**0.5
        own = nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) if bias else None
        self.base = QuantizedLinear.of(weight, format, own)
        self.down = nn.Linear(k, r, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(r, n, bias=False, dtype=torch.bfloat16)
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


def x(m=8, k=128):
    torch.manual_seed(1)
    return torch.randn(m, k, dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("m", [1, 8, 130])
def test_base_and_branch_are_one_call_that_reads_the_bytes(bias, scale, m):
    model, data = Corrected(bias=bias, scale=scale), x(m)
    made = nmm.rewrite(model, data, options=OPTIONS)
    (match,) = made.matches
    assert match.info["base_weight"] == "fp8"
    assert any("read as stored" in note for note in match.notes)
    calls = [n for n in made.graph_module.graph.nodes if "lowrank_matmul_scaled" in str(n.target)]
    assert len(calls) == 1
    made.check(data)


def test_the_simulator_agrees_with_eager_and_the_branch_has_gradients():
    model, data = Corrected(), x()
    expected = model(data)
    options = {**OPTIONS, "executor": "simulator", "inner": "eager"}
    with torch.no_grad():
        got = torch.compile(model, backend="nmm", options=options)(data)
    scale = expected.abs().max().item()
    # 128 and 16 products in fp32, p, v / s and y rounded to bfloat16: a few halves of 2^-8
    assert (got - expected).abs().max().item() <= 4 * 2**-8 * scale
    model.down.weight.grad = model.up.weight.grad = None
    expected.sum().backward()
    own = [model.down.weight.grad.clone(), model.up.weight.grad.clone()]
    model.down.weight.grad = model.up.weight.grad = None
    torch._dynamo.reset()
    torch.compile(model, backend="nmm", options={**options, "executor": "reference"})(
        data
    ).sum().backward()
    for made, want in zip((model.down.weight.grad, model.up.weight.grad), own, strict=True):
        torch.testing.assert_close(made, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())


@pytest.mark.parametrize(
    ("target", "dtype", "reason"),
    [("trn1", torch.bfloat16, "trn1 has no fp8 kernels"),
     ("trn2", torch.float16, "cast the model to bfloat16")],
)  # fmt: skip
def test_where_no_kernel_reads_the_bytes_the_report_says_so(target, dtype, reason):
    model = Corrected().to(dtype)
    made = nmm.rewrite(model, x().to(dtype), options={**OPTIONS, "target": target})
    (match,) = made.matches
    assert any("dequantized at each call" in n and reason in n for n in match.notes)
    assert "base_weight" not in match.info
