"""The torch ops: values, gradients, shapes, casts, batches, and what a call costs."""

import contextlib
import functools
import sys

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.judge import several
from kernels.op_calls import (
    TOKENS,
    K,
    N,
    R,
    calls,
    every_call,
    fixed,
    fp8,
    named,
    of_dtype,
    weight,
)
from nmm_compiler.errors import ModelError, ShapeError, SpecError, UnknownNameError
from nmm_compiler.lowrank_models.modules import QuantizedLinear
from nmm_compiler.ops import registration
from nmm_compiler.ops.lower import lower, tokens as tokens_of
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.runtime.executor import _operand

NMM = torch.ops.nmm


def operands():
    """Return x, u and v in float64."""
    return weight(TOKENS, K), weight(K, R) / K**0.5, weight(R, N) / R**0.5


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


# One op of each class: those of a class are traced by the same functions.
TRACED = {type(op): name for name, op in DEFINITIONS.items()} | {None: "lowrank_matmul"}


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_opcheck(name, kernel_executor):
    _, operands, keywords = next(call for call in calls() if call[0] == name)
    args = tree_map_only(torch.Tensor, learned, operands)
    for executor in ("reference", "counting"):
        given = {**keywords, "executor": executor}
        tests = ["test_autograd_registration", "test_faketensor"]
        if name in TRACED.values() and (executor == "reference" or name == "lowrank_matmul"):
            tests.append("test_aot_dispatch_dynamic")
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


def is_exact(name, operands, keywords):
    """Return whether nothing is rounded on the way to a kernel.

    MX blocks take larger weights than those, branches beside fp8 are divided by its scales, and
    the op rotates in float32.
    """
    branches = len(operands) == 13 and keywords.get("format") == "fp8"
    return not (name.startswith("corrected") or "rotates" in keywords or branches)


@pytest.mark.parametrize(
    ("name", "operands", "keywords"), [call for call in every_call() if is_exact(*call)], ids=named
)
def test_the_float64_reference_of_a_kernel_is_that_of_its_op(name, operands, keywords):
    """Of numbers that 16 bits hold: what the spec means that a call is lowered to."""
    of_fp8 = name.endswith("_scaled") or "format" in keywords
    dtype = torch.float16 if of_fp8 else torch.float32
    of_kernel = of_dtype(operands, dtype)
    narrow = {k: "float32" if v == "float64" else v for k, v in keywords.items()}
    launch = lower(name, of_kernel, narrow, tokens_of(operands[0], keywords))
    made = launch.spec.reference(*(np.asarray(_operand(t)) for t in launch.operands))
    wanted = tree_leaves(registration.OPS[name](*of_dtype(operands, torch.float64), **keywords))
    for got, want in zip(several(made), wanted, strict=True):
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-11, atol=1e-13)


def test_token_dimensions_are_free():
    _, u, v = operands()
    for shape in [(K,), (1, K), (0, K), (2, 3, K), (2, 0, 3, K)]:
        x = torch.randn(shape, dtype=torch.float64)
        got = NMM.lowrank_matmul(x, u, v)
        assert got.shape == (*shape[:-1], N)
        torch.testing.assert_close(got, x @ u @ v, rtol=1e-12, atol=1e-12)
    x = torch.randn(3, K, 5, dtype=torch.float64).transpose(1, 2)
    torch.testing.assert_close(NMM.lowrank_matmul(x, u, v), x @ u @ v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("lowrank_matmul", {"u": weight(4, R)}, ShapeError, "features of x and u: 8 and 4"),
        ("lowrank_matmul", {"v_layout": "row"}, ShapeError, "rank of u and v: 4 and 12"),
        ("lowrank_matmul", {"bias": weight(4)}, ShapeError, r"shape \(4,\); pass \[12\]"),
        ("lowrank_matmul", {"u_layout": "rows"}, UnknownNameError, "did you mean 'row'"),
        ("lowrank_matmul", {"x": weight(2, K).half()}, SpecError, "float16"),
        ("lowrank_matmul", {"executor": "referense"}, UnknownNameError,
         "unknown executor 'referense'; did you mean 'reference'"),
        ("lowrank_matmul", {"norm": "rms", "norm_gain": weight(5)}, ShapeError, "gain has shape"),
        ("lowrank_matmul", {"residual": weight(1, N)}, ShapeError, "residual has shape"),
        ("lowrank_matmul", {"norm_gain": weight(K)}, SpecError, "belong to a norm"),
        ("lowrank_matmul", {"norm": "rms", "norm_gain": weight(K).half()}, SpecError, "dtypes"),
        ("gated_mlp_up", {"gate": [weight(K, R), weight(R, 5)]}, ShapeError, "gate and up: 5 and"),
        ("gated_mlp_up", {"gate": [weight(K, R)] * 3}, ShapeError, "3 weights"),
        ("adapters_matmul", {"index": torch.zeros(3).long()}, ShapeError, "each of 6 tokens"),
        ("adapters_matmul", {"gains": weight(3)}, ShapeError, "ranks add up to 4"),
        ("adapters_matmul", {"u": weight(5, R)}, ShapeError, "features of x and u"),
        ("adapters_matmul", {"v": weight(R, N).bfloat16()}, SpecError, "dtypes"),
        ("experts", {"gate_up_bias": weight(2, 9)}, ShapeError, "gate_up_bias has shape"),
        ("experts", {"down": weight(2, 5, K)}, ShapeError, "half of gate_up's outputs"),
        ("experts", {"gates": weight(TOKENS, 1)}, ShapeError, "index and gates"),
        ("experts", {"index": torch.full((TOKENS, 2), 2)}, IndexError, "none of 2 experts"),
        ("lowrank_matmul_scaled", {"x": fp8(weight(2, K))}, SpecError, "takes a scale"),
        ("lowrank_matmul_scaled", {"x_scale": 1.0}, SpecError, "takes none"),
        ("lowrank_matmul_scaled", {"u": weight(R, K)}, SpecError, "or call the plain op"),
        ("lowrank_matmul_scaled", {"scales": [fixed(N), fixed(R)]}, ShapeError, "scale of u has"),
        ("lowrank_matmul_scaled", {"scales": [fixed(R)]}, ShapeError, "weights and scales"),
        ("corrected_matmul", {"format": "int4"}, UnknownNameError, "format"),
        ("corrected_matmul", {"w": weight(N, 32)}, SpecError, "pass bytes, uint8"),
        ("corrected_matmul", {"w_scale": torch.ones(N, 1).byte()}, ShapeError, "outputs and"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name, changes, error, words):
    """While a graph is traced, but for what no trace asks for."""
    op = DEFINITIONS[name]
    _, operands, keywords = next(call for call in calls() if call[0] == name)
    given = op.bound(operands, {**keywords, **changes})
    traced = error is not IndexError and "executor" not in changes
    with FakeTensorMode() if traced else contextlib.nullcontext() as fake:
        if traced:
            given = tree_map_only(torch.Tensor, fake.from_tensor, given)
        args = [given.pop(operand.name) for operand in op.operands]
        with pytest.raises(error, match=words):
            registration.OPS[name](*args, **given)


@pytest.mark.parametrize("executor", ["reference", "counting"])
def test_autocast_casts_the_same_eagerly_and_compiled(executor, kernel_executor):
    """Gradients arrive in the dtype of the weights."""
    x, u, v = given = [t.float().requires_grad_() for t in operands()]

    def call(x):
        return NMM.lowrank_matmul(x, u, v, executor=executor)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = call(x)
        plain = (x @ u) @ v
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
        # as PyTorch does: float64 is left alone
        wide = NMM.matmul(x.double(), u.double(), executor=executor)
    assert eager.dtype == compiled.dtype == plain.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    torch.testing.assert_close(eager, plain, rtol=0, atol=0)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    got, want = (torch.autograd.grad(y.float().sum(), given) for y in (eager, plain))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        # Both round each product once to bf16 (unit 2^-9); sums of at most 12 terms of size ~1.
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_vmap_over_inputs_is_one_kernel_call(kernel_executor):
    _, u, v = operands()
    x = weight(5, TOKENS, K)
    got = torch.vmap(lambda a: NMM.lowrank_matmul(a, u, v, executor="counting"))(x)
    torch.testing.assert_close(got, x @ u @ v, rtol=1e-12, atol=1e-12)
    assert kernel_executor == ["lowrank_matmul"]


def test_vmap_over_weights_and_layouts_is_right():
    x, us, v = weight(K, TOKENS), weight(5, K, R), weight(R, N)
    got = torch.vmap(lambda u: NMM.lowrank_matmul(x, u, v, x_layout="col", out_layout="col"))(us)
    torch.testing.assert_close(got, (x.t() @ us @ v).transpose(1, 2), rtol=1e-12, atol=1e-12)
    xs = weight(K, TOKENS, 5)
    got = torch.vmap(
        lambda a: NMM.lowrank_matmul_shared_x(a, [us[0]], [v], [None], x_layout="col"), in_dims=2
    )(xs)
    torch.testing.assert_close(got[0], xs.permute(2, 1, 0) @ us[0] @ v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("executor", ["reference", "counting"])
def test_forward_mode_and_second_order_through_torch_func(executor, kernel_executor):
    """A custom op with only a backward rule gives a zero tangent here; this one must not."""
    x, u, v = operands()
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
    given = tuple(t.requires_grad_() for t in operands())
    assert torch.autograd.gradgradcheck(
        lambda *a: NMM.lowrank_matmul(*a, activation="silu", executor="counting"),
        given,
        fast_mode=True,  # of random directions
    )


def test_op_stays_one_node_when_traced_without_gradients():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(NMM.lowrank_matmul, tracing_mode="fake")(*operands()).graph
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


@torch.no_grad()
def test_a_call_on_the_cpu_enters_few_python_functions():
    """What a call costs beyond two linears is its Python: `benchmarks/speed.py` prints the time."""
    x, u, v = torch.randn(1, 16), torch.randn(8, 16), torch.randn(16, 8)
    op = NMM.lowrank_matmul.default
    kw = {"u_layout": "col", "v_layout": "col", "target": "trn2", "executor": "auto"}
    entered = python_frames(lambda: op(x, u, v, **kw))
    assert len(entered) <= 5, entered


def test_experts_of_mx_blocks_run_in_the_simulator():
    """As the weights multiplied out, with branches beside them."""
    x = weight(TOKENS, 128).bfloat16()
    index, gates = torch.arange(2 * TOKENS).reshape(TOKENS, 2) % 3 - 1, torch.rand(TOKENS, 2)
    stacks = [QuantizedLinear.of(weight(n, 128) / 11, "mxfp4") for n in (512, 256)]
    values, scales = ([t.reshape(2, -1, t.shape[-1]) for t in ts] for ts in zip(
        *((one.values, one.scale) for one in stacks), strict=True))  # fmt: skip
    us, vs = [weight(2, R, 128) / 20] * 2, [weight(2, 256, R), weight(2, 128, R)]
    branches = [t.bfloat16() for pair in zip(us, vs, strict=True) for t in pair]
    call = functools.partial(
        torch.ops.nmm.experts, x, *values, index, gates, None, None, *scales, *branches,
        format="mxfp4", weight_layout="col", factor_layout="col",
    )  # fmt: skip
    wanted = call()
    made = call(target="trn3", executor="simulator")
    assert (made - wanted).float().norm() <= 0.08 * wanted.float().norm()


# The ops of fp8 weights: gradients, and what is refused; values are those of `op_calls`.

INPUTS, RANK, OUTPUTS = 256, 136, 192
BF16 = torch.bfloat16


STORED = {"u_layout": "col", "v_layout": "col"}


def factors():
    """Return fp8 weights as linears store them, u and v, and their scales."""
    pair = torch.randn(RANK, INPUTS) / INPUTS**0.5, torch.randn(OUTPUTS, RANK) / RANK**0.5
    scales = [w.abs().amax(1) / 240.0 for w in pair]
    stored = [(w / s[:, None]).to(torch.float8_e4m3fn) for w, s in zip(pair, scales, strict=True)]
    return stored, scales


@pytest.mark.parametrize("executor", ["reference", "simulator"])
def test_gradients_of_fp8_numbers_and_their_scales_are_refused(executor):
    (u, v), scales = factors()
    x = torch.randn(TOKENS, INPUTS, dtype=BF16)
    own = [scale.clone().requires_grad_() for scale in scales]
    with pytest.raises(ModelError, match="quantize"):
        NMM.lowrank_matmul_scaled(x, own, u, v, **STORED, executor=executor).sum().backward()
    asked = u.clone().requires_grad_()
    with pytest.raises(ModelError, match="train the factors first"):
        NMM.lowrank_matmul_scaled(x, scales, asked, v, **STORED, executor=executor).sum().backward()


def test_autocast_leaves_fp8_numbers_alone():
    (u, v), scales = factors()
    with torch.autocast("cpu", dtype=BF16):
        y = NMM.lowrank_matmul_scaled(torch.randn(TOKENS, INPUTS), scales, u, v, **STORED)
    assert y.dtype == BF16


def test_features_of_x_stay_whole_under_a_norm():
    from torch.distributed.tensor import Partial, Replicate, Shard

    op = DEFINITIONS["lowrank_matmul"]
    rule = op.of_arguments(op.sharding)
    x, u, v = weight(2, 3, K), weight(K, R), weight(R, N)
    plain = rule(x, u, v)
    normed = rule(x, u, v, *[None] * 4, weight(K), None, weight(2, 3, N), norm="rms")
    assert any(ins[0] == Shard(2) for _, ins in plain)
    assert not any(ins[0] == Shard(2) for _, ins in normed)
    for (out,), ins in normed:
        assert ins[-3:] == [Replicate(), None, out]
    assert any(out == Partial() for (out,), _ in normed)
