"""The torch ops: values, gradients, shapes, casts, batches, and what a call costs."""

import contextlib
import functools
import sys

import numpy as np
import pytest
import torch
from judge import several
from op_calls import calls, every_call, named, of_dtype
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from nmm_compiler.errors import ModelError, ShapeError, SpecError, UnknownNameError
from nmm_compiler.lowrank_models.quantize import QuantizedLinear
from nmm_compiler.ops import registration
from nmm_compiler.ops.lower import lower
from nmm_compiler.ops.lower import tokens as tokens_of
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.runtime.executor import _operand

NMM = torch.ops.nmm
M, K, R, N = 6, 16, 4, 12


def weight(inputs, outputs, layout="row", dtype=torch.float64, grad=True):
    w = torch.randn(inputs, outputs, dtype=dtype) / inputs**0.5
    return (w if layout == "row" else w.t().contiguous()).requires_grad_(grad)


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


def learned(t):
    """Return a copy of an operand; what is not fixed takes gradients."""
    return t.clone().requires_grad_(t.dtype == torch.float64 and not hasattr(t, "fixed"))


@pytest.mark.parametrize("name", sorted(registration.DEFINITIONS))
def test_opcheck(name, kernel_executor):
    _, operands, keywords = next(call for call in calls() if call[0] == name)
    args = tree_map_only(torch.Tensor, learned, operands)
    for executor in ("reference", "counting"):
        given = {**keywords, "executor": executor}
        tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if executor == "counting" and name != "lowrank_matmul":  # all ops go this way
            tests.pop()
        if not name.endswith("_scaled"):  # this one multiplies operands, and PyTorch has no fp8 mul
            tests.append("test_schema")
        torch.library.opcheck(registration.OPS[name], args, given, test_utils=tests)


@pytest.mark.parametrize(
    ("name", "operands", "keywords"), [*every_call(), *every_call(0)], ids=named
)
def test_kernels_have_the_values_and_gradients_of_the_references(
    name, operands, keywords, kernel_executor
):
    """Each result alone is differentiated; no tokens give zeros.

    What has no gradient in PyTorch has none from kernels.
    """
    args = tree_map_only(torch.Tensor, learned, operands)
    leaves = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]

    def computed(executor):
        results = tree_leaves(registration.OPS[name](*args, **keywords, executor=executor))
        gradients = [
            torch.autograd.grad(y.sum(), leaves, allow_unused=True, retain_graph=True)
            for y in results
            if leaves
        ]
        return results, gradients

    (want, expected), (got, found) = computed("reference"), computed("counting")
    assert len(kernel_executor) >= 1
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert all(y.is_contiguous() for y in got)
    for a, b in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.any() or operands[0].numel() == 0
            # At most seven products in float64, each with sums of at most 64 terms.
            bound = 7 * 64 * torch.finfo(torch.float64).eps * float(b.norm())
            torch.testing.assert_close(a, b, rtol=0, atol=bound)


# MX blocks and branches beside fp8 take larger weights than those; the op rotates in float32.
REFERENCES = [
    call for call in every_call()
    if not call[0].startswith("corrected") and "rotates" not in call[2]
]  # fmt: skip


@pytest.mark.parametrize(("name", "operands", "keywords"), REFERENCES, ids=named)
def test_the_float64_reference_of_a_kernel_is_that_of_its_op(name, operands, keywords):
    """Of numbers that 16 bits hold: what the spec means that a call is lowered to."""
    dtype = torch.float16 if name.endswith("_scaled") else torch.float32
    of_kernel = of_dtype(operands, dtype)
    narrow = {k: "float32" if v == "float64" else v for k, v in keywords.items()}
    (launch,) = lower(name, of_kernel, narrow, tokens_of(operands[0], keywords)).launches
    made = launch.spec.reference(*(np.asarray(_operand(t)) for t in launch.operands))
    wanted = tree_leaves(registration.OPS[name](*of_dtype(operands, torch.float64), **keywords))
    for got, want in zip(several(made), wanted, strict=True):
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-11, atol=1e-13)


def test_token_dimensions_are_free():
    u, v = weight(K, R), weight(R, N)
    for shape in [(K,), (1, K), (0, K), (2, 3, K), (2, 0, 3, K)]:
        x = torch.randn(shape, dtype=torch.float64)
        got = NMM.lowrank_matmul(x, u, v)
        assert got.shape == (*shape[:-1], N)
        torch.testing.assert_close(got, x @ u @ v, rtol=1e-12, atol=1e-12)
    x = torch.randn(3, K, 5, dtype=torch.float64).transpose(1, 2)
    torch.testing.assert_close(NMM.lowrank_matmul(x, u, v), x @ u @ v, rtol=1e-12, atol=1e-12)


X, U, V = torch.randn(2, 8), torch.randn(8, 4), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("name", "args", "keywords", "error", "words"),
    [
        ("lowrank_matmul", (X, V, V), {}, ShapeError, "features of x and u: 8 and 4"),
        ("lowrank_matmul", (X, U, V), {"v_layout": "col"}, ShapeError, "rank of u and v: 4 and 6"),
        ("lowrank_matmul", (X, U, V, torch.randn(4)), {}, ShapeError, r"shape \(4,\); pass \[6\]"),
        ("lowrank_matmul", (X, U, V), {"u_layout": "rows"}, UnknownNameError, "did you mean 'row'"),
        ("lowrank_matmul", (X.half(), U, V), {}, SpecError, "float16"),
        ("gated_mlp_up", (X, [U, V], [U]), {}, ShapeError, "gate and up: 6 and 4"),
        ("gated_mlp_up", (X, [U, V, V], [U]), {}, ShapeError, "3 weights"),
        ("lowrank_matmul", (X, U, V), {"executor": "referense"}, UnknownNameError,
         "unknown executor 'referense'; did you mean 'reference'"),
        ("lowrank_matmul", (X, U, V), {"activation": "silo"}, UnknownNameError, "mean 'silu'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(name, args, keywords, error, words):
    """While a graph is traced, but for what no trace asks for."""
    traced = not keywords.keys() & {"executor", "activation"}
    with FakeTensorMode() if traced else contextlib.nullcontext() as fake:
        if traced:
            args = tree_map_only(torch.Tensor, fake.from_tensor, args)
        with pytest.raises(error, match=words):
            registration.OPS[name](*args, **keywords)


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


# The ops whose weights an index chooses: references, kernels, gradients, what they refuse.

EXPERTS = torch.ops.nmm.experts


def ADAPTERS(*args, u_layout="col", **keywords):
    return torch.ops.nmm.adapters_matmul(*args, u_layout=u_layout, **keywords)


def adapters(dtype=torch.float32, groups=3, tokens=(2, 4)):
    """Return x, index, u, v, gains, bias, w."""
    torch.manual_seed(0)
    x = torch.randn(*tokens, 64, dtype=dtype)
    u, v = torch.randn(groups * 8, 64, dtype=dtype) / 8, torch.randn(groups * 8, 96, dtype=dtype)
    index = torch.arange(x[..., 0].numel()).reshape(tokens) % (groups + 1) - 1
    gains = torch.arange(1, groups + 1).float()
    return x, index, u, v, gains, torch.randn(96, dtype=dtype), torch.randn(64, 96, dtype=dtype) / 8


def experts(dtype=torch.float32, groups=4, tokens=5, top_k=2, layout="row", n=48):
    """Return x, gate_up, down, index, gates, gate_up_bias, down_bias."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 64, dtype=dtype)
    up, down = (torch.randn(groups, a, b, dtype=dtype) / 8 for a, b in ((64, 2 * n), (n, 64)))
    if layout == "col":
        up, down = up.mT.contiguous(), down.mT.contiguous()
    index = torch.rand(tokens, groups).argsort(-1)[:, :top_k]
    index[0, 0] = -1
    gates = torch.rand(tokens, top_k)
    biases = torch.randn(groups, 2 * n, dtype=dtype), torch.randn(groups, 64, dtype=dtype)
    return x, up, down, index, gates, *biases


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("form", ["fp8", "mxfp4", "factors", "fp8+8", "mxfp8+8", "+8"])
def test_experts_in_other_forms(form, clamped):
    """Alike in eager PyTorch, traced, and in the simulator, as the weights multiplied out."""
    x, up, down, index, gates, *biases = experts(torch.bfloat16, layout="col", n=32)
    form, _, rank = form.partition("+")
    kept, call = {}, {"format": form, "weight_layout": "col", "factor_layout": "col"}
    for name, weight in (("gate_up", up), ("down", down)):
        groups, n, k = weight.shape
        if rank or form == "factors":
            u, v = torch.randn(groups, 8, k) / 8, torch.randn(groups, n, 8) / 8
            call[f"{name}_u"] = u.bfloat16()
            call[f"{name}_v" if rank else name] = v.bfloat16()
            kept[name] = v.bfloat16().float() @ u.bfloat16().float()
        if form != "factors":
            base = [QuantizedLinear.of(one, form) for one in weight] if form else []
            wide = torch.stack([one.dequantized(torch.float32) for one in base]) if form else weight
            kept[name] = wide.float() + kept.get(name, 0)
            values = torch.stack([one.values for one in base]) if form else weight
            scales = torch.stack([one.scale for one in base]) if form else None
            if form == "fp8":
                values, scales = values.view(torch.float8_e4m3fn), scales.squeeze(-1)
            call |= {name: values} | ({f"{name}_scale": scales} if form else {})
    said = {"limit": 7.0, "slope": 1.702, "plus": 1.0} if clamped else {}
    if form.startswith("mx"):
        call = {name: filled(one, name, biases) for name, one in call.items()}
        biases[0] = filled(biases[0].unsqueeze(-1), "gate_up_bias", biases).squeeze(-1)
    names = ("gate_up_bias", "down_bias")
    call |= dict(zip(names, biases, strict=True))
    first, second = call.pop("gate_up"), call.pop("down")
    args = (x, first, second, index, gates)
    wide = dict(zip(names, experts(torch.bfloat16, layout="col", n=32)[5:], strict=True))
    wanted = EXPERTS(x.float(), kept["gate_up"], kept["down"], index, gates,
                     **{name: one.float() for name, one in wide.items()},
                     weight_layout="col", **said)  # fmt: skip
    made = EXPERTS(*args, **call, **said)
    traced = torch.compile(lambda *a: EXPERTS(*a, **call, **said), backend="eager")(*args)
    target = "trn3" if form.startswith("mx") else "trn2"
    simulated = EXPERTS(*args, **call, **said, target=target, executor="simulator")
    for one, limit in (
        (made, 0.02),
        (traced, 0.02),
        (simulated, 0.08 if target == "trn3" else 0.02),
    ):
        assert (one.float() - wanted).norm() <= limit * wanted.norm()


def filled(one, name, biases):
    """Fill up with zeros what MX weights take in whole 128s."""
    if not isinstance(one, torch.Tensor):
        return one
    if name in ("gate_up", "gate_up_scale", "gate_up_v", "gate_up_bias"):
        one = torch.cat([torch.nn.functional.pad(h, (0, 0, 0, 96)) for h in one.chunk(2, 1)], 1)
    inputs = {"gate_up": 64, "gate_up_scale": 64, "down": 32, "down_scale": 32, "down_u": 32}
    if name in inputs:
        whole = one.shape[-1] * 128 // inputs[name]
        one = torch.nn.functional.pad(one, (0, whole - one.shape[-1]))
    return one.contiguous()


@pytest.mark.parametrize(
    ("op", "operands", "place", "wrong", "error", "words"),
    [
        (ADAPTERS, adapters, 1, torch.zeros(3).long(), ShapeError, "each of 8 tokens"),
        (ADAPTERS, adapters, 4, torch.ones(5), ShapeError, "ranks add up to 24"),
        (ADAPTERS, adapters, 2, torch.zeros(24, 60), ShapeError, "features of x and u"),
        (ADAPTERS, adapters, 3, torch.zeros(24, 96).bfloat16(), SpecError, "dtypes"),
        (EXPERTS, experts, 1, torch.zeros(4, 64, 90), ShapeError, "gate_up_bias has shape"),
        (EXPERTS, experts, 2, torch.zeros(4, 40, 64), ShapeError, "half of gate_up's outputs"),
        (EXPERTS, experts, 4, torch.zeros(5, 1), ShapeError, "index and gates"),
    ],
)
def test_shapes_that_do_not_fit(op, operands, place, wrong, error, words):
    given = list(operands())
    given[place] = wrong
    with FakeTensorMode() as mode, pytest.raises(error, match=words):
        op(*map(mode.from_tensor, given))


def test_an_expert_that_is_none_is_an_error():
    args = list(experts())
    args[3][2, 0] = 4
    with pytest.raises(IndexError, match="none of 4 experts"):
        EXPERTS(*args)


# The ops of fp8 weights: gradients, and what is refused; values are those of `op_calls`.

TOKENS, INPUTS, RANK, OUTPUTS = 6, 256, 136, 192
BF16 = torch.bfloat16


STORED = {"u_layout": "col", "v_layout": "col"}


def factors():
    """Return fp8 weights as linears store them, u and v, and their scales."""
    pair = torch.randn(RANK, INPUTS) / INPUTS**0.5, torch.randn(OUTPUTS, RANK) / RANK**0.5
    scales = [w.abs().amax(1) / 240.0 for w in pair]
    stored = [(w / s[:, None]).to(torch.float8_e4m3fn) for w, s in zip(pair, scales, strict=True)]
    return stored, scales


@pytest.mark.parametrize("executor", ["reference", "simulator"])
def test_gradients_reach_x_and_the_bias_and_no_fp8_number(executor):
    (u, v), scales = factors()
    x = torch.randn(TOKENS, INPUTS, dtype=BF16).requires_grad_()
    bias = torch.zeros(OUTPUTS, dtype=BF16).requires_grad_()
    y = NMM.lowrank_matmul_scaled(x, scales, u, v, bias, **STORED, executor=executor)
    y.float().sum().backward()
    wide = u.double().t() * scales[0].double() @ (v.double().t() * scales[1].double())
    want = wide.sum(1).expand(TOKENS, INPUTS)
    assert float((x.grad.double() - want).norm() / want.norm()) < 2.0**-6
    assert torch.equal(bias.grad, torch.full_like(bias, TOKENS))
    own = [scale.clone().requires_grad_() for scale in scales]
    with pytest.raises(ModelError, match="quantize"):
        NMM.lowrank_matmul_scaled(x, own, u, v, **STORED, executor=executor).sum().backward()
    asked = u.clone().requires_grad_()
    with pytest.raises(ModelError, match="train the factors first"):
        NMM.lowrank_matmul_scaled(x, scales, asked, v, **STORED, executor=executor).sum().backward()


def test_what_does_not_fit_is_named():
    (u, v), scales = factors()
    op = functools.partial(NMM.lowrank_matmul_scaled, **STORED)
    x = torch.randn(TOKENS, INPUTS, dtype=BF16)
    x8 = torch.empty(TOKENS, INPUTS, dtype=torch.float8_e4m3fn)
    with pytest.raises(SpecError, match="takes a scale"):
        op(x8, scales, u, v)
    with pytest.raises(SpecError, match="takes none"):
        op(x, scales, u, v, x_scale=1.0)
    with pytest.raises(SpecError, match="or call the plain op"):
        op(x, scales, u.to(BF16), v)
    with FakeTensorMode() as mode:
        x, x8, u, v = (mode.from_tensor(t) for t in (x, x8, u, v))
        scales = [mode.from_tensor(scale) for scale in scales]
        with pytest.raises(ShapeError, match="a scale of u has shape"):
            op(x, scales[::-1], u, v)
        with pytest.raises(ShapeError, match="weights and scales"):
            op(x, scales[:1], u, v)


def test_autocast_leaves_fp8_numbers_alone():
    (u, v), scales = factors()
    with torch.autocast("cpu", dtype=BF16):
        y = NMM.lowrank_matmul_scaled(torch.randn(TOKENS, INPUTS), scales, u, v, **STORED)
    assert y.dtype == BF16


# Calls of the ops with a norm of x and a residual: values, kernels, placements, refusals.


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 4).to(dtype)


ROWS, GAIN, BIAS = random(2, 3, 12), random(12, seed=1), random(12, seed=2)
DOWN, UP, RESIDUAL = random(12, 5), random(5, 8), random(2, 3, 8)
NONE = (None,) * 4


def test_what_does_not_fit_is_refused_while_tracing():
    meta = [t.to("meta") for t in (ROWS, DOWN, UP)]
    for more, keywords, error, words in (
        ((GAIN[:5],), {"norm": "rms"}, ShapeError, "norm_gain has shape"),
        ((GAIN, None, RESIDUAL[:1]), {"norm": "rms"}, ShapeError, "residual has shape"),
        ((GAIN,), {}, SpecError, "belong to a norm"),
        ((GAIN,), {"norm": "rsm"}, UnknownNameError, "did you mean 'rms'"),
        ((GAIN.float(),), {"norm": "rms"}, SpecError, "dtypes"),
    ):
        with pytest.raises(error, match=words):
            DEFINITIONS["lowrank_matmul"].fake(*meta, *NONE, *more, **keywords)


def test_features_of_x_stay_whole_under_a_norm():
    from torch.distributed.tensor import Partial, Replicate, Shard

    rule = DEFINITIONS["lowrank_matmul"].sharding
    plain = rule(ROWS, DOWN, UP)
    normed = rule(ROWS, DOWN, UP, *NONE, GAIN, None, RESIDUAL, norm="rms")
    assert any(ins[0] == Shard(2) for _, ins in plain)
    assert not any(ins[0] == Shard(2) for _, ins in normed)
    for (out,), ins in normed:
        assert ins[-3:] == [Replicate(), None, out]
    assert any(out == Partial() for (out,), _ in normed)
