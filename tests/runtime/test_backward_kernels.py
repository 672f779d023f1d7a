"""Backward passes through emitted kernels: which products they launch, and their gradients."""

import numpy as np
import pytest
import torch
from runtime.simulator_launches import noted_launches, with_empty_tables
from torch.utils._pytree import tree_leaves

from nmm_compiler.errors import NeuronSetupError
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF, gamma
from nmm_compiler.ops import registration
from nmm_compiler.ops.call_options import executor_name
from nmm_compiler.options import Options
from nmm_compiler.runtime.kernels import KERNELS
from nmm_compiler.runtime.weights import PACKS

NMM = torch.ops.nmm
M, K, R, N = 8, 96, 40, 144


@pytest.fixture(autouse=True)
def empty_tables():
    yield from with_empty_tables()


@pytest.fixture
def launched(monkeypatch):
    """Return the specs that the simulator runs, in order."""
    return noted_launches(monkeypatch, lambda kernel: kernel.spec)


def weight(inputs, outputs, layout="row", dtype=torch.float32, grad=True):
    w = (torch.randn(inputs, outputs) / inputs**0.5).to(dtype)
    return (w if layout == "row" else w.t().contiguous()).requires_grad_(grad)


def sizes(spec):
    return (spec.family, spec.m, spec.k, spec.n)


def times(left, right, unit):
    """Return (value, error) of a product of two such pairs, stored once with roundoff `unit`."""
    (a, da), (b, db) = left, right
    value = a @ b
    error = np.abs(a) @ db + da @ (np.abs(b) + db)
    error += gamma(a.shape[1] + 2) * ((np.abs(a) + da) @ (np.abs(b) + db))
    return value, error + unit * (np.abs(value) + error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", ["row", "col"])
def test_gradients_of_a_low_rank_product_are_within_derived_bounds(dtype, stored, launched):
    """The bound of each gradient follows its two products, the intermediate rounded once."""
    x = torch.randn(M, K).to(dtype).requires_grad_()
    u, v = weight(K, R, stored, dtype), weight(R, N, stored, dtype)
    upstream = torch.randn(M, N).to(dtype)
    y = NMM.lowrank_matmul(x, u, v, u_layout=stored, v_layout=stored, executor="simulator")
    launched.clear()
    copies = PACKS.made
    found = torch.autograd.grad(y, (x, u, v), upstream)
    assert PACKS.made == copies, "a weight or an activation was copied to transpose it"
    assert sorted(map(sizes, launched)) == sorted(
        [
            ("matmul", M, K, R),  # p = x u
            ("matmul", M, N, R),  # q = g v^T
            ("matmul", M, R, K),  # dx = q u^T
            ("matmul", K, M, R),  # du = x^T q
            ("matmul", R, M, N),  # dv = p^T g
        ]
    )
    unit = torch.finfo(dtype).eps / 2

    def exact(t):
        a = t.detach().double().numpy()
        return a, np.zeros_like(a)

    def turned(pair):
        return pair[0].T, pair[1].T

    xs, g = exact(x), exact(upstream)
    us, vs = (exact(w if stored == "row" else w.t()) for w in (u, v))
    p, q = times(xs, us, unit), times(g, turned(vs), unit)
    wanted = times(q, turned(us), unit), times(turned(xs), q, unit), times(turned(p), g, unit)
    for grad, operand, (value, bound) in zip(found, (x, u, v), wanted, strict=True):
        assert grad.shape == operand.shape
        assert grad.dtype == dtype
        as_rows = grad if operand is x or stored == "row" else grad.t()
        assert np.all(np.abs(as_rows.double().numpy() - value) <= bound)


def grads_of(call, leaves, upstream):
    outs = call()
    outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
    return torch.autograd.grad(outs, leaves, upstream[: len(outs)])


def check_against_pytorch(op, args, kw, leaves, launched, launches):
    """Compare fp32 gradients with autograd through PyTorch's own products; count launches."""
    want_outs = op(*args, **kw)
    many = isinstance(want_outs, (list, tuple))
    upstream = [torch.randn_like(y) for y in (want_outs if many else [want_outs])]
    want = grads_of(lambda: op(*args, **kw), leaves, upstream)
    outs = op(*args, **kw, executor="simulator")
    launched.clear()
    got = torch.autograd.grad(list(outs) if many else [outs], leaves, upstream)
    for a, b in zip(got, want, strict=True):
        # Gradients are of size ~10 after at most seven products with sums of at most 144 terms:
        # each moves a result by at most 144 roundings of 2^-24 of its size.
        scale = float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=7 * N * FP32_ROUNDOFF * max(scale, 1.0))
    assert len(launched) == launches, [spec.short() for spec in launched]
    return launched


def test_gradients_of_x_alone_are_one_low_rank_launch(launched):
    x = torch.randn(M, K, requires_grad=True)
    u, v = weight(K, R, grad=False), weight(R, N, grad=False)
    (spec,) = check_against_pytorch(NMM.lowrank_matmul, (x, u, v), {}, [x], launched, 1)
    assert sizes(spec) == ("lowrank", M, N, K)
    assert (spec.u_layout, spec.v_layout) == ("row", "row")  # of frozen weights a copy is kept


def test_a_frozen_base_is_part_of_the_launch_that_gives_dx(launched):
    """LoRA: dx = g w^T + scale (g v^T) u^T is one kernel, and no kernel computes dw."""
    x = torch.randn(M, K, requires_grad=True)
    u, v, w = weight(K, 16), weight(16, N), weight(K, N, "col", grad=False)
    args, kw = (x, u, v, None, w), {"scale": 2.0, "w_layout": "col"}
    found = check_against_pytorch(NMM.lowrank_matmul, args, kw, [x, u, v], launched, 5)
    based = [spec for spec in found if spec.family == "lowrank"]
    assert [(s.base, s.scale, sizes(s)) for s in based] == [(True, 2.0, ("lowrank", M, N, K))]


@pytest.mark.parametrize(
    ("kw", "launches"),
    [
        ({"activation": "silu"}, 6),  # y once more, from p
        ({"inner_activation": "gelu"}, 5),
        ({"x_layout": "col", "out_layout": "col"}, 5),
        ({"scale": 0.5}, 5),
    ],
    ids=str,
)
def test_functions_scales_and_layouts_stay_around_the_kernels(kw, launches, launched):
    x = torch.randn(M, K) if kw.get("x_layout") != "col" else torch.randn(K, M)
    x.requires_grad_()
    u, v, bias = weight(K, R), weight(R, N), torch.randn(N, requires_grad=True)
    leaves = [x, u, v, bias]
    check_against_pytorch(NMM.lowrank_matmul, (x, u, v, bias), kw, leaves, launched, launches)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "shapes", "kw", "launches"),
    [
        pytest.param("lowrank_matmul_shared_x", ([(K, R), (K, 24)], [(R, N), (24, N)]), {}, 10,
                     marks=LONG),
        # p; for each v its gradient and q; du and dx of the sum of both q
        pytest.param("lowrank_matmul_shared_u", ((K, R), [(R, N), (R, 48)]), {}, 7, marks=LONG),
        # gate and up: two to recompute, four gradients; down: p, q, dx, du, dv
        ("gated_mlp", ([(K, R), (R, K)],) * 3, {}, 17),
        ("matmul", ((N, K),), {"w_layout": "col", "activation": "relu"}, 3),
    ],
)  # fmt: skip
def test_other_ops_train_through_kernels(name, shapes, kw, launches, launched):
    x = torch.randn(M, K, requires_grad=True)
    weights = [weight(*s) if isinstance(s, tuple) else [weight(*one) for one in s] for s in shapes]
    args = (x, *weights, [None, None]) if "shared" in name else (x, *weights)
    leaves = [x, *tree_leaves(weights)]
    check_against_pytorch(getattr(NMM, name), args, kw, leaves, launched, launches)


def test_the_gradient_of_x_through_a_frozen_gated_mlp(launched):
    x = torch.randn(M, K, requires_grad=True)
    frozen = [[weight(K, R, grad=False), weight(R, K, grad=False)] for _ in range(3)]
    found = check_against_pytorch(NMM.gated_mlp, (x, *frozen), {}, [x], launched, 5)
    assert {spec.family for spec in found} == {"lowrank"}


def test_sums_over_tokens_are_padded_to_a_bucket_unless_the_graph_is_static(launched):
    x = torch.randn(6, K, requires_grad=True)
    u, v = weight(K, R), weight(R, N)
    check_against_pytorch(NMM.lowrank_matmul, (x, u, v), {}, [x, u, v], launched, 5)
    (dv,) = (spec for spec in launched if (spec.m, spec.n) == (R, N))
    assert dv.k == 8
    kept = type(dv)(**{**dv.to_dict(), "k": 6})
    assert KERNELS.plan(kept, "trn2", Options(), "k") == (8,)
    KERNELS.keep_static(kept, "trn2")
    assert KERNELS.plan(kept, "trn2", Options(), "k") == (6,)
    assert KERNELS.plan(kept, "trn2", Options(buckets=(4, 7)), "k") == (7,)


def test_a_backward_kernel_that_cannot_be_built(monkeypatch, launched):
    """Executor "auto" leaves the product to PyTorch with a warning; a named one raises."""
    from nmm_compiler.codegen import build

    real = build.build_kernel

    def broken(spec, target, schedule=None, *, options=None):
        if spec.family == "matmul":
            raise ZeroDivisionError("a fault in codegen")
        return real(spec, target, schedule, options=options)

    monkeypatch.setattr(build, "build_kernel", broken)
    x = torch.randn(M, K, requires_grad=True)
    u, v = weight(K, R), weight(R, N)
    y = NMM.lowrank_matmul(x, u, v, executor="simulator")
    with pytest.raises(NeuronSetupError, match="ZeroDivisionError: a fault in codegen"):
        torch.autograd.grad(y.sum(), (u,))
    monkeypatch.setattr(registration, "NEURON_DEVICES", ("neuron", "xla", "cpu"))
    monkeypatch.setitem(registration.EXECUTORS, "neuron", registration.EXECUTORS["simulator"])
    KERNELS.clear()
    y = NMM.lowrank_matmul(x, u, v, executor=executor_name(Options()))
    launched.clear()
    with pytest.warns(UserWarning, match="no kernel for MatmulSpec.*PyTorch computes"):
        got = torch.autograd.grad(y.sum(), (x, u, v))
    want = torch.autograd.grad((x @ u @ v).sum(), (x, u, v))
    assert launched == []
    for a, b in zip(got, want, strict=True):
        # two products of at most N terms, summed in another order
        torch.testing.assert_close(a, b, rtol=0, atol=2 * N * FP32_ROUNDOFF * float(b.abs().max()))
