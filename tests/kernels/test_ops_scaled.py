"""The ops of fp8 weights: gradients, and what is refused; values are those of `op_calls`."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nmm_compiler.runtime.executor  # noqa: F401  (registers the executors)
from nmm_compiler.errors import ModelError, ShapeError, SpecError

NMM = torch.ops.nmm
M, K, R, N = 6, 256, 136, 192
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


STORED = {"u_layout": "col", "v_layout": "col"}


def factors():
    """Return fp8 weights as linears store them, u and v, and their scales."""
    pair = torch.randn(R, K) / K**0.5, torch.randn(N, R) / R**0.5
    scales = [w.abs().amax(1) / 240.0 for w in pair]
    stored = [(w / s[:, None]).to(torch.float8_e4m3fn) for w, s in zip(pair, scales, strict=True)]
    return stored, scales


@pytest.mark.parametrize("executor", ["reference", "simulator"])
def test_gradients_reach_x_and_the_bias_and_no_fp8_number(executor):
    (u, v), scales = factors()
    x = torch.randn(M, K, dtype=BF16).requires_grad_()
    bias = torch.zeros(N, dtype=BF16).requires_grad_()
    y = NMM.lowrank_matmul_scaled(x, scales, u, v, bias, **STORED, executor=executor)
    y.float().sum().backward()
    wide = u.double().t() * scales[0].double() @ (v.double().t() * scales[1].double())
    want = wide.sum(1).expand(M, K)
    assert float((x.grad.double() - want).norm() / want.norm()) < 2.0**-6
    assert torch.equal(bias.grad, torch.full_like(bias, M))
    own = [scale.clone().requires_grad_() for scale in scales]
    with pytest.raises(ModelError, match="quantize"):
        NMM.lowrank_matmul_scaled(x, own, u, v, **STORED, executor=executor).sum().backward()
    asked = u.clone().requires_grad_()
    with pytest.raises(ModelError, match="train the factors first"):
        NMM.lowrank_matmul_scaled(x, scales, asked, v, **STORED, executor=executor).sum().backward()


def test_what_does_not_fit_is_named():
    (u, v), scales = factors()
    op = functools.partial(NMM.lowrank_matmul_scaled, **STORED)
    x = torch.randn(M, K, dtype=BF16)
    x8 = torch.empty(M, K, dtype=torch.float8_e4m3fn)
    with pytest.raises(SpecError, match="takes a scale"):
        op(x8, scales, u, v)
    with pytest.raises(SpecError, match="takes none"):
        op(x, scales, u, v, x_scale=1.0)
    with pytest.raises(SpecError, match="or call the plain op"):
        op(x, scales, u.to(BF16), v)
    with FakeTensorMode() as mode:
        x, x8, u, v = (mode.from_tensor(t) for t in (x, x8, u, v))
        scales = [mode.from_tensor(scale) for scale in scales]
        with pytest.raises(ShapeError, match="a scale has shape"):
            op(x, scales[::-1], u, v)
        with pytest.raises(ShapeError, match="weights and scales"):
            op(x, scales[:1], u, v)


def test_autocast_leaves_fp8_numbers_alone():
    (u, v), scales = factors()
    with torch.autocast("cpu", dtype=BF16):
        y = NMM.lowrank_matmul_scaled(torch.randn(M, K), scales, u, v, **STORED)
    assert y.dtype == BF16
