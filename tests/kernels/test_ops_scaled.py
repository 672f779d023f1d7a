"""The ops of fp8 weights: values, kernels in the simulator, gradients, shapes, what is refused."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nmm_compiler.runtime.executor  # noqa: F401  (registers the executors)
from nmm_compiler.errors import ModelError, ShapeError, SpecError
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.ops.scaled import SUFFIX

NMM = torch.ops.nmm
M, K, R, N = 6, 256, 136, 192
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def fp8_numbers(h, scale):
    """Return h over a scale as fp8 numbers, saturated at the largest one of both formats."""
    return (h / scale).clamp(-240, 240).to(torch.float8_e4m3fn)


def factor(inputs, outputs, layout="row"):
    """An fp8 weight, its scales, and the numbers that it stands for, inputs first."""
    w = torch.randn(inputs, outputs) / inputs**0.5
    scale = w.abs().amax(0) / 240.0
    stored = (w / scale).to(torch.float8_e4m3fn)
    exact = stored.double() * scale.double()
    return (stored if layout == "row" else stored.t().contiguous()), scale, exact


def calls(layout="row"):
    """Yield (name, arguments behind x and scales, scales, exact result of exact x)."""
    (u, us, eu), (v, vs, ev) = factor(K, R, layout), factor(R, N, layout)
    (u2, us2, eu2), (v2, vs2, ev2) = factor(K, 64, layout), factor(64, N, layout)
    (w, ws, ew) = factor(K, N, layout)
    (d, ds, ed), (d2, ds2, ed2) = factor(N, R, layout), factor(R, K, layout)
    lays = {"u_layout": layout, "v_layout": layout}
    one = {"weight_layout": layout}

    def h(x):
        gate = x @ eu @ ev
        return gate * torch.sigmoid(gate) * (x @ eu2 @ ev2)

    yield "matmul", (w,), [ws], {"w_layout": layout}, lambda x: x @ ew
    yield "lowrank_matmul", (u, v), [us, vs], lays, lambda x: x @ eu @ ev
    yield ("lowrank_matmul_shared_x", ([u, u2], [v, v2], [None, None]), [us, us2, vs, vs2], lays,
           lambda x: torch.cat([x @ eu @ ev, x @ eu2 @ ev2]))  # fmt: skip
    (v3, vs3, ev3) = factor(R, 72, layout)
    yield ("lowrank_matmul_shared_u", (u, [v, v3], [None, None]), [us, vs, vs3], lays,
           lambda x: torch.cat([x @ eu @ ev, x @ eu @ ev3], 1))  # fmt: skip
    gated = ([u, v], [u2, v2])
    yield "gated_mlp_up", gated, [us, vs, us2, vs2], one, h
    yield ("gated_mlp", (*gated, [d, d2]), [us, vs, us2, vs2, ds, ds2], one,
           lambda x: h(x) @ ed @ ed2)  # fmt: skip


def joined(made):
    if isinstance(made, torch.Tensor):
        return made.double()
    return torch.cat([y.double() for y in made], 0 if len({y.shape for y in made}) == 1 else 1)


NAMES = [name.removesuffix(SUFFIX) for name in DEFINITIONS if name.endswith(SUFFIX)]


def call_of(name, layout="row"):
    return next(call for call in calls(layout) if call[0] == name)


def relative(got, want):
    return float((joined(got) - want).norm() / want.norm())


def test_every_family_has_an_op_of_fp8_weights():
    assert [name for name, *_ in calls()] == sorted(NAMES, key=[c[0] for c in calls()].index)


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_multiplies_by_what_the_weights_stand_for(name, layout):
    _, rest, scales, kw, exact = call_of(name, layout)
    op = getattr(NMM, name + SUFFIX)
    x = torch.randn(M, K)
    assert relative(op(x.double(), scales, *rest, **kw), exact(x.double())) < 1e-6
    x8 = fp8_numbers(x, 2.0**-5)
    given = {"x_scale": 2.0**-5, "out_dtype": "float32"}
    got = op(x8, scales, *rest, **kw, **given)
    want = exact(x8.double() * 2.0**-5)
    assert relative(got, want) < 1e-6


@pytest.mark.parametrize("fp8_x", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_the_same(name, fp8_x):
    """Stored as linears store them. The kernel rounds p once to bf16 where the reference does."""
    _, rest, scales, kw, _ = call_of(name, "col")
    op = getattr(NMM, name + SUFFIX)
    x = torch.randn(M, K)
    kw = dict(kw)
    if fp8_x:
        x = fp8_numbers(x, 2.0**-5)
        kw |= {"x_scale": 2.0**-5}
    else:
        x = x.to(BF16)
    wide = op(x.double() if not fp8_x else x, scales, *rest, **kw | (
        {"out_dtype": "float32"} if fp8_x else {}))  # fmt: skip
    got = op(x, scales, *rest, **kw, executor="simulator")
    first = got if isinstance(got, torch.Tensor) else got[0]
    assert first.dtype == BF16
    # bf16 roundings of each intermediate and of the result, 2^-9 each
    assert relative(got, joined(wide)) < 2.0**-7


@pytest.mark.parametrize("executor", ["reference", "simulator"])
def test_gradients_reach_x_and_the_bias_and_no_fp8_number(executor):
    _, (u, v), scales, kw, _ = call_of("lowrank_matmul", "col")
    x = torch.randn(M, K, dtype=BF16).requires_grad_()
    bias = torch.zeros(N, dtype=BF16).requires_grad_()
    y = NMM.lowrank_matmul_scaled(x, scales, u, v, bias, **kw, executor=executor)
    y.float().sum().backward()
    wide = u.double().t() * scales[0].double() @ (v.double().t() * scales[1].double())
    want = wide.sum(1).expand(M, K)
    assert float((x.grad.double() - want).norm() / want.norm()) < 2.0**-6
    assert torch.equal(bias.grad, torch.full_like(bias, M))
    own = [scale.clone().requires_grad_() for scale in scales]
    with pytest.raises(ModelError, match="quantize"):
        NMM.lowrank_matmul_scaled(x, own, u, v, **kw, executor=executor).sum().backward()
    asked = u.clone().requires_grad_()
    with pytest.raises(ModelError, match="train the factors first"):
        NMM.lowrank_matmul_scaled(x, scales, asked, v, **kw, executor=executor).sum().backward()


def test_what_does_not_fit_is_named():
    _, (u, v), scales, _, _ = call_of("lowrank_matmul")
    op = NMM.lowrank_matmul_scaled
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
    _, (u, v), scales, kw, _ = call_of("lowrank_matmul", "col")
    with torch.autocast("cpu", dtype=BF16):
        y = NMM.lowrank_matmul_scaled(torch.randn(M, K), scales, u, v, **kw)
    assert y.dtype == BF16
