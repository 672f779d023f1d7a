"""The torch ops: values, gradients, shapes, casts, batches, and what a call costs."""

import sys

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF
from nmm_compiler.ops import references, registration

NMM = torch.ops.nmm
M, K, R, N = 6, 16, 4, 12


def weight(inputs, outputs, layout="row", dtype=torch.float64, grad=True):
    w = torch.randn(inputs, outputs, dtype=dtype) / inputs**0.5
    return (w if layout == "row" else w.t().contiguous()).requires_grad_(grad)


def inputs_first(w, layout):
    return w if layout == "row" else w.t()


def as_layout(t, layout):
    return t if layout == "row" else t.t()


def make_x(layout="row", dtype=torch.float64, grad=True):
    x = torch.randn(M, K, dtype=dtype)
    return as_layout(x, layout).contiguous().requires_grad_(grad)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def kernel_executor():
    """Register an executor that computes in the reference, as a kernel executor is called."""
    calls = []

    def run(name, args, kwargs):
        calls.append(name)
        with torch.no_grad():
            return registration.DEFINITIONS[name].reference(*args, **kwargs)

    registration.EXECUTORS["counting"] = run
    yield calls
    del registration.EXECUTORS["counting"]


CASES = {
    **{name: (True, False, {"activation": name}) for name in references.ACTIVATIONS},
    **{
        layout: (True, True, {layout: "col"})
        for layout in ("x_layout", "out_layout", "u_layout", "v_layout", "w_layout")
    },
    "scaled": (True, False, {"scale": 0.5}),
    "scaled-col": (True, False, {"scale": 0.5, "out_layout": "col"}),
    "lora": (True, True, {"scale": 2.0, "activation": "silu"}),
    "plain": (False, False, {}),
}
"""Whether there are a bias and a base, and keywords."""


@pytest.mark.parametrize(("biased", "based", "kw"), CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("executor", ["reference", "counting"])
def test_lowrank_matmul_equals_its_formula_and_gradients(
    biased, based, kw, executor, kernel_executor
):
    layouts = {k: kw.get(k, "row") for k in ("x_layout", "u_layout", "v_layout", "w_layout")}
    x = make_x(layouts["x_layout"])
    u = weight(K, R, layouts["u_layout"])
    v = weight(R, N, layouts["v_layout"])
    bias = torch.randn(N, dtype=torch.float64, requires_grad=True) if biased else None
    w = weight(K, N, layouts["w_layout"]) if based else None
    operands = [t for t in (x, u, v, bias, w) if t is not None]

    def formula():
        rows = as_layout(x, layouts["x_layout"])
        low = rows @ inputs_first(u, layouts["u_layout"]) @ inputs_first(v, layouts["v_layout"])
        y = kw.get("scale", 1.0) * low
        if w is not None:
            y = y + rows @ inputs_first(w, layouts["w_layout"])
        if bias is not None:
            y = y + bias
        y = references.activate(y, kw.get("activation", "identity"))
        return y.t() if kw.get("out_layout") == "col" else y

    got = NMM.lowrank_matmul(x, u, v, bias, w, **kw, executor=executor)
    want = formula()
    assert got.is_contiguous()
    assert bool(kernel_executor) == (executor == "counting")
    check_with_gradients(got, want, operands)


def check_with_gradients(got, want, operands):
    """float64 throughout: 16 products of size ~1 leave no more than a few times 1e-15."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, operands, upstream, retain_graph=True),
        torch.autograd.grad(want, operands, upstream, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("executor", ["reference", "counting"])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_shared_ops_equal_separate_products(executor, layout, kernel_executor):
    x = make_x(layout)
    us, vs = [weight(K, R), weight(K, 3)], [weight(R, N), weight(3, 5)]
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rows = as_layout(x, layout)
    kw = {"x_layout": layout, "out_layout": layout, "executor": executor}

    got = NMM.lowrank_matmul_shared_x(
        x, us, vs, [None, bias], activations=["silu", "identity"], **kw
    )
    want = [functional.silu(rows @ us[0] @ vs[0]), rows @ us[1] @ vs[1] + bias]
    want = [as_layout(y, layout) for y in want]
    check_with_gradients(
        got[0].sum() + got[1].square().sum(),
        want[0].sum() + want[1].square().sum(),
        [x, *us, *vs, bias],
    )

    others = [weight(R, N), weight(R, 5)]
    got = NMM.lowrank_matmul_shared_u(x, us[0], others, [None, bias], **kw)
    want = [as_layout(rows @ us[0] @ v + b, layout) for v, b in zip(others, (0, bias), strict=True)]
    check_with_gradients(
        got[0].sum() + got[1].square().sum(),
        want[0].sum() + want[1].square().sum(),
        [x, us[0], *others, bias],
    )


@pytest.mark.parametrize("executor", ["reference", "counting"])
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_ops_equal_their_formula(executor, layout, activation, kernel_executor):
    x = make_x()
    gate = [weight(K, R, layout), weight(R, N, layout)]
    up = [weight(K, N, layout)]
    down = [weight(N, R, layout), weight(R, K, layout)]
    b1, b2, b3 = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (N, N, K))
    g = [inputs_first(w, layout) for w in (*gate, *up, *down)]
    kw = {"weight_layout": layout, "executor": executor, "activation": activation}
    middle = references.activate(x @ g[0] @ g[1] + b1, activation) * (x @ g[2] + b2)

    got = NMM.gated_mlp_up(x, gate, up, b1, b2, out_layout="col", **kw)
    check_with_gradients(got, middle.t(), [x, *gate, *up, b1, b2])
    got = NMM.gated_mlp(x, gate, up, down, b1, b2, b3, **kw)
    check_with_gradients(got, middle @ g[3] @ g[4] + b3, [x, *gate, *up, *down, b1, b2, b3])


def test_unasked_gradients_are_not_computed(kernel_executor):
    """LoRA trains the factors alone: the frozen dense weight gets no gradient product."""
    x, u, v = make_x(grad=False), weight(K, R), weight(R, N)
    w = weight(K, N, grad=False)
    y = NMM.lowrank_matmul(x, u, v, None, w, scale=2.0, executor="counting")
    with torch.profiler.profile() as profile:
        y.sum().backward()
    products = sum(e.count for e in profile.key_averages() if e.key == "aten::mm")
    assert products == 4  # x u again, its gradient through v, and one each for u and v
    assert w.grad is None
    assert x.grad is None


def scaled_args(x, u, v, dense):
    """Arguments of the ops of fp8 weights."""
    u, v, dense = (t.detach().to(torch.float8_e4m3fn) for t in (u, v, dense))
    w = dense.t().contiguous()
    us, vs, ks = torch.ones(R), torch.ones(N), torch.ones(K)
    return {
        "matmul_scaled": (x, [us], u),
        "lowrank_matmul_scaled": (x, [us, vs], u, v),
        "lowrank_matmul_shared_x_scaled": (x, [us, us, vs, vs], [u, u], [v, v], [None, None]),
        "lowrank_matmul_shared_u_scaled": (x, [us, vs, vs], u, [v, v], [None, None]),
        "gated_mlp_up_scaled": (x, [us, vs, vs], [u, v], [w]),
        "gated_mlp_scaled": (x, [us, vs, vs, ks], [u, v], [w], [dense]),
    }


def example_calls(tokens=M):
    """Return operands for a call of each op in float32, by its name."""
    x = torch.randn(tokens, K, requires_grad=True)
    u, v, other, dense = (
        weight(inputs, outputs, dtype=torch.float32)
        for inputs, outputs in ((K, R), (R, N), (K, N), (N, K))
    )
    us, vs = ([t, t.detach().clone().requires_grad_()] for t in (u, v))
    heads = (torch.randn(1, count, tokens, 4, requires_grad=True) for count in (4, 2, 2))
    return {
        "lowrank_matmul": (x, u, v),
        "lowrank_matmul_shared_x": (x, us, vs, [None, None]),
        "lowrank_matmul_shared_u": (x, u, vs, [None, None]),
        "gated_mlp_up": (x, [u, v], [other]),
        "gated_mlp": (x, [u, v], [other], [dense]),
        "matmul": (x, u),
        "matmul_as_stored": (x, u),
        "attention": tuple(heads),
        **scaled_args(x, u, v, dense),
        **stored_and_chosen_args(x, u, v),
    }


def stored_and_chosen_args(x, u, v):
    """Arguments of the ops of MX weights, and of weights that an index chooses."""
    tokens = x.shape[0]
    wide = torch.randn(tokens, 64, requires_grad=True)
    stored = torch.randint(0, 256, (N, 32), dtype=torch.uint8), torch.full((N, 2), 127).byte()
    one, two = (torch.arange(tokens * count).reshape(tokens, count) % 2 for count in (1, 2))
    square = torch.randint(0, 256, (3, 64, 32), dtype=torch.uint8)
    powers = torch.full((3, 64, 2), 122).byte()  # 2 ** -5
    us, vs = ([weight(*of, dtype=torch.float32), None] for of in ((64, R), (R, 64)))
    expert = [  # as `weight` has them: sums near 1, which float32 gives in any order to 1e-5
        (torch.randn(2, *of) / of[0] ** 0.5).requires_grad_() for of in ((K, 8), (4, K))
    ]
    return {
        "corrected_matmul": (wide, *stored),
        "corrected_matmul_shared_x": (
            wide,
            list(square[:2]),
            list(powers[:2]),
            [us[0], None],
            [vs[0], None],
            [None, None],
        ),
        "corrected_mlp": (wide, list(square), list(powers), [*us, us[0]], [*vs, vs[0]]),
        "adapters_matmul": (x, one.flatten(), u, v, torch.ones(2)),
        "experts": (x, *expert, two, torch.ones(tokens, 2)),
    }


@pytest.mark.parametrize("name", sorted(registration.DEFINITIONS))
def test_opcheck(name, kernel_executor):
    args = example_calls()[name]
    for executor in ("reference", "counting"):
        given = {"executor": executor}
        tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if not name.endswith("_scaled"):  # this one multiplies operands, and PyTorch has no fp8 mul
            tests.append("test_schema")
        torch.library.opcheck(registration.OPS[name], args, given, test_utils=tests)


@pytest.mark.parametrize("tokens", [0, M])
@pytest.mark.parametrize("name", sorted(registration.DEFINITIONS))
def test_an_operand_without_a_gradient_in_pytorch_has_none_from_kernels(
    name, tokens, kernel_executor
):
    """Each result alone is differentiated; no tokens give zeros."""
    args = example_calls(tokens)[name]
    leaves = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]

    def gradients(executor):
        results = tree_leaves(registration.OPS[name](*args, executor=executor))
        return [
            torch.autograd.grad(y.sum(), leaves, allow_unused=True, retain_graph=True)
            for y in results
        ]

    want, kernels = gradients("reference"), gradients("counting")
    assert len(kernel_executor) >= 1
    for got, expected in zip(sum(kernels, ()), sum(want, ()), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert got.any() or tokens == 0
            # At most seven products in float32, each with sums of at most K terms.
            bound = 7 * K * FP32_ROUNDOFF * float(expected.norm())
            torch.testing.assert_close(got, expected, rtol=0, atol=bound)


def test_token_dimensions_are_free():
    u, v = weight(K, R), weight(R, N)
    for shape in [(K,), (1, K), (0, K), (2, 3, K), (2, 0, 3, K)]:
        x = torch.randn(shape, dtype=torch.float64)
        got = NMM.lowrank_matmul(x, u, v)
        assert got.shape == (*shape[:-1], N)
        torch.testing.assert_close(got, x @ u @ v, rtol=1e-12, atol=1e-12)
    x = torch.randn(3, K, 5, dtype=torch.float64).transpose(1, 2)
    torch.testing.assert_close(NMM.lowrank_matmul(x, u, v), x @ u @ v, rtol=1e-12, atol=1e-12)


def test_operands_that_do_not_chain_are_named_when_traced():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x, u, v = torch.randn(2, 8), torch.randn(8, 4), torch.randn(4, 6)
        with pytest.raises(ShapeError, match="features of x and u: 8 and 4"):
            NMM.lowrank_matmul(x, v, v)
        with pytest.raises(ShapeError, match="rank of u and v: 4 and 6"):
            NMM.lowrank_matmul(x, u, v, v_layout="col")
        with pytest.raises(ShapeError, match=r"bias has shape \(4,\); pass \[6\]"):
            NMM.lowrank_matmul(x, u, v, torch.randn(4))
        with pytest.raises(UnknownNameError, match="did you mean 'row'"):
            NMM.lowrank_matmul(x, u, v, u_layout="rows")
        with pytest.raises(SpecError, match="float16"):
            NMM.lowrank_matmul(x.half(), u, v)
        with pytest.raises(ShapeError, match="gate and up: 6 and 4"):
            NMM.gated_mlp_up(x, [u, v], [u])
        with pytest.raises(ShapeError, match="3 weights"):
            NMM.gated_mlp_up(x, [u, v, v], [u])


def test_unknown_executor_and_activation_are_named():
    x, u, v = make_x(), weight(K, R), weight(R, N)
    with pytest.raises(
        UnknownNameError, match="unknown executor 'referense'; did you mean 'reference'"
    ):
        NMM.lowrank_matmul(x, u, v, executor="referense")
    with pytest.raises(UnknownNameError, match="did you mean 'silu'"):
        NMM.lowrank_matmul(x, u, v, activation="silo")


@pytest.mark.parametrize("executor", ["reference", "counting"])
def test_autocast_casts_the_same_eagerly_and_compiled(executor, kernel_executor):
    x, u, v = (t.float().detach() for t in (make_x(), weight(K, R), weight(R, N)))

    def call(x):
        return NMM.lowrank_matmul(x, u, v, executor=executor)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = call(x)
        plain = (x @ u) @ v
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    assert eager.dtype == compiled.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(eager, plain, rtol=0, atol=0)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as PyTorch does: float64 is left alone
        assert NMM.matmul(x.double(), u.double(), executor=executor).dtype == torch.float64


def test_autocast_gradients_arrive_in_the_weights_dtype(kernel_executor):
    x, u, v = (t.float().detach().requires_grad_() for t in (make_x(), weight(K, R), weight(R, N)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = NMM.lowrank_matmul(x, u, v, executor="counting")
        want = (x @ u) @ v
    for a, b in zip(
        torch.autograd.grad(got.float().sum(), [x, u, v]),
        torch.autograd.grad(want.float().sum(), [x, u, v]),
        strict=True,
    ):
        assert a.dtype == torch.float32
        # Both round each product once to bf16 (unit 2^-9); sums of at most 16 terms of size ~1.
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_vmap_over_inputs_is_one_kernel_call(kernel_executor):
    x, u, v = torch.randn(5, M, K, dtype=torch.float64), weight(K, R), weight(R, N)
    u, v = u.detach(), v.detach()
    got = torch.vmap(lambda a: NMM.lowrank_matmul(a, u, v, executor="counting"))(x)
    torch.testing.assert_close(got, x @ u @ v, rtol=1e-12, atol=1e-12)
    assert kernel_executor == ["lowrank_matmul"]


def test_vmap_over_weights_and_layouts_is_right():
    x, us, v = (
        torch.randn(K, M, dtype=torch.float64),
        torch.randn(5, K, R, dtype=torch.float64),
        weight(R, N).detach(),
    )
    got = torch.vmap(lambda u: NMM.lowrank_matmul(x, u, v, x_layout="col", out_layout="col"))(us)
    torch.testing.assert_close(got, (x.t() @ us @ v).transpose(1, 2), rtol=1e-12, atol=1e-12)
    xs = torch.randn(K, M, 5, dtype=torch.float64)
    got = torch.vmap(
        lambda a: NMM.lowrank_matmul_shared_x(a, [us[0]], [v], [None], x_layout="col"), in_dims=2
    )(xs)
    torch.testing.assert_close(got[0], xs.permute(2, 1, 0) @ us[0] @ v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("executor", ["reference", "counting"])
def test_forward_mode_and_second_order_through_torch_func(executor, kernel_executor):
    """A custom op with only a backward rule gives a zero tangent here; this one must not."""
    x, u, v = (t.detach() for t in (make_x(), weight(K, R), weight(R, N)))
    tangent = torch.randn_like(x)

    def call(x):
        return NMM.lowrank_matmul(x, u, v, activation="silu", executor=executor)

    def plain(x):
        return functional.silu(x @ u @ v)

    got, want = (torch.func.jvp(f, (x,), (tangent,)) for f in (call, plain))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    got, want = (torch.func.hessian(lambda a, f=f: f(a).sum())(x[:1]) for f in (call, plain))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("executor", ["reference", "counting"])
def test_forward_mode_on_dual_tensors(executor, kernel_executor):
    from torch.autograd import forward_ad

    x, u, v = (t.detach() for t in (make_x(), weight(K, R), weight(R, N)))
    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        y = NMM.lowrank_matmul(forward_ad.make_dual(x, tangent), u, v, executor=executor)
        got = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(got, tangent @ u @ v, rtol=1e-12, atol=1e-12)


def test_double_backward_through_a_kernel(kernel_executor):
    x, u, v = make_x(), weight(K, R), weight(R, N)
    assert torch.autograd.gradgradcheck(
        lambda *a: NMM.lowrank_matmul(*a, activation="silu", executor="counting"), (x, u, v)
    )


def test_op_stays_one_node_when_traced_without_gradients():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, u, v = (t.detach() for t in (make_x(), weight(K, R), weight(R, N)))
    graph = make_fx(NMM.lowrank_matmul, tracing_mode="fake")(x, u, v).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [
        NMM.lowrank_matmul.default
    ]


def python_frames(call):
    """Return the names of the Python functions that one call enters."""
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]  # the first is `call` itself


def test_a_call_on_the_cpu_enters_few_python_functions():
    """What a call costs beyond two linears is its Python: `benchmarks/speed.py` prints the time."""
    x, u, v = torch.randn(1, 16), torch.randn(8, 16), torch.randn(16, 8)
    op = NMM.lowrank_matmul.default
    kw = {"u_layout": "col", "v_layout": "col", "target": "trn2", "executor": "auto"}
    with torch.no_grad():
        entered = python_frames(lambda: op(x, u, v, **kw))
    assert len(entered) <= 5, entered
