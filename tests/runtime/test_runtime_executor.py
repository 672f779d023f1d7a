"""Op calls through emitted kernels in the simulator: values, buckets, training, weights, faults."""

import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from kernels.op_calls import every_call, named, of_dtype
from runtime.simulator_launches import noted_launches
from torch.utils._pytree import tree_leaves, tree_map

from nmm_compiler.cache import store
from nmm_compiler.errors import CacheWarning, NeuronSetupError, ShapeError, UnknownNameError
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF
from nmm_compiler.ops import registration
from nmm_compiler.ops.call_options import executor_name, options_of
from nmm_compiler.ops.lower import lower, tokens as tokens_of
from nmm_compiler.ops.references import lowrank_matmul
from nmm_compiler.options import Options
from nmm_compiler.runtime import executor, neuron
from nmm_compiler.runtime.kernels import KERNELS, NoKernelError, bucket, planned_buckets
from nmm_compiler.runtime.weights import PACKS

NMM = torch.ops.nmm
K, R, N = 96, 40, 144


@pytest.fixture(autouse=True)
def empty_tables():
    torch.manual_seed(0)
    KERNELS.clear()
    PACKS.clear()
    yield
    KERNELS.clear()
    PACKS.clear()


@pytest.fixture
def launched(monkeypatch):
    """Return the specs that the simulator runs, in order."""
    return noted_launches(monkeypatch)


def weight(inputs, outputs, layout="row", dtype=torch.bfloat16):
    w = (torch.randn(inputs, outputs) / inputs**0.5).to(dtype)
    return w if layout == "row" else w.t().contiguous()


def check(name, args, kw, m, launched, launches=1):
    """Compare with float64 within the bound that each launch's spec derives."""
    got = getattr(NMM, name)(*args, **kw, executor="simulator")
    assert len(launched) == launches, "the kernel did not run"
    launch = lower(name, args, kw, m)
    operands = [
        t.numpy() if t.dtype == torch.int32 else t.double().numpy() for t in launch.operands
    ]
    each = [
        getattr(NMM, name)(*args, **kw), launch.spec.reference(*operands),
        launch.spec.error_bound(*operands),
    ]  # fmt: skip
    for y, of_pytorch, want, bound in zip(*map(tree_leaves, (got, *each)), strict=True):
        assert (y.shape, y.dtype) == (of_pytorch.shape, of_pytorch.dtype)
        assert y.is_contiguous()
        values = y.double().numpy().reshape(want.shape)
        assert np.all(np.abs(values - want) <= bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("stored", ["row", "col"])
def test_values_are_within_the_derived_bound(dtype, stored, launched):
    x = torch.randn(2, 4, K).to(dtype)
    u, v = weight(K, R, stored, dtype), weight(R, N, stored, dtype)
    bias = torch.randn(N).to(dtype)
    kw = {"u_layout": stored, "v_layout": stored}
    check("lowrank_matmul", (x, u, v, bias), kw, 8, launched)
    assert launched[0].u_layout == launched[0].v_layout == "row"  # transposed once


# MX blocks, which trn3 multiplies, are of larger sizes; the op of few bits has tests of its own.
CALLS = [call for call in every_call() if not call[0].startswith("corrected")]


@pytest.mark.parametrize(("name", "args", "kw"), CALLS, ids=named)
def test_every_op_runs_one_kernel(name, args, kw, launched):
    """Six tokens are padded to a bucket of eight."""
    args = of_dtype(args, torch.bfloat16)
    kw = {key: "bfloat16" if value == "float64" else value for key, value in kw.items()}
    check(name, args, kw, tokens_of(args[0], kw), launched)
    layouts = {getattr(launched[0], f"{of}_layout", "") for of in ("u", "v")}
    assert "col" not in layouts or name == "adapters_matmul"  # whose factors lie as they are


@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_call_cut_into_two_launches_joins_its_tokens(layout, launched, monkeypatch):
    monkeypatch.setattr(KERNELS, "plan", lambda *a: (4, 4))
    u, v = weight(K, R), weight(R, N)
    x = torch.randn(7, K).to(torch.bfloat16)
    given = x.t().contiguous() if layout == "col" else x
    kw = {"x_layout": layout, "out_layout": layout}
    check("lowrank_matmul", (given, u, v), kw, 7, launched, 2)
    launched.clear()
    args = (x, [u, weight(K, 8)], [v, weight(8, 24)], [None, None])
    check("lowrank_matmul_shared_x", args, {"out_layout": layout}, 7, launched, 2)


def test_a_static_shape_runs_its_own_kernel_and_user_buckets_rule():
    spec = lower("matmul", (torch.randn(5, 8), torch.randn(8, 4)), {}, 5).spec
    assert KERNELS.plan(spec, "trn2", Options()) == (8,)
    KERNELS.get(spec, "trn2", Options())
    assert KERNELS.plan(spec, "trn2", Options()) == (5,)
    assert KERNELS.plan(spec, "trn2", Options(buckets=(6, 12))) == (6,)
    assert KERNELS.plan(spec, "trn3", Options()) == (8,)


def test_a_plan_weighs_predicted_times(monkeypatch):
    import dataclasses

    spec = lower("matmul", (torch.randn(640, 8), torch.randn(8, 4)), {}, 640).spec
    asked = []

    def cost(spec, m, target, options):
        asked.append(m)
        return 1.0 + m

    monkeypatch.setattr(KERNELS, "_launch_us", cost)
    assert KERNELS.plan(spec, "trn2", Options()) == (512, 128)
    assert sorted(asked) == [128, 512, 1024]
    asked.clear()
    near = dataclasses.replace(spec, m=1000)  # less than a tile of padding: no question asked
    assert KERNELS.plan(near, "trn2", Options()) == (1024,)
    assert asked == []


def test_no_tokens_are_no_kernel_and_have_no_bucket(launched):
    x = torch.randn(2, 0, K).to(torch.bfloat16)
    y = NMM.lowrank_matmul(x, weight(K, R), weight(R, N), executor="simulator")
    assert y.shape == (2, 0, N)
    assert launched == []
    with pytest.raises(ShapeError, match="at least 1 token"):
        bucket(0)


@pytest.fixture
def auto(monkeypatch):
    """Let executor "auto" run kernels on CPU tensors, in the simulator."""
    monkeypatch.setattr(registration, "NEURON_DEVICES", ("neuron", "xla", "cpu"))
    monkeypatch.setitem(registration.EXECUTORS, "neuron", registration.EXECUTORS["simulator"])


def broken_builds(monkeypatch, family=""):
    """Let no kernel be built, or none of a family; return the specs of those that were tried."""
    from nmm_compiler.codegen import build

    tried, real = [], build.build_kernel

    def broken(spec, *given, **named):
        if family not in ("", spec.family):
            return real(spec, *given, **named)
        tried.append(spec)
        raise ZeroDivisionError("a fault in codegen")

    monkeypatch.setattr(build, "build_kernel", broken)
    return tried


@pytest.mark.parametrize(
    ("dtype", "warned", "raised", "cause"),
    [
        (torch.float64, "no kernel for a call of lowrank_matmul.*float64",
         "'simulator' was asked for.*float64.*'auto'", UnknownNameError),
        (torch.float32, "ZeroDivisionError: a fault in codegen; PyTorch computes",
         "ZeroDivisionError: a fault in codegen", ZeroDivisionError),
    ],
    ids=["a dtype that kernels lack", "a kernel that cannot be built"],
)  # fmt: skip
def test_what_no_kernel_computes(dtype, warned, raised, cause, monkeypatch, launched, auto):
    """Executor "auto" leaves its calls to PyTorch; a named one raises; strict raises the cause."""
    tried = broken_builds(monkeypatch)
    x, u, v = (t.to(dtype) for t in (torch.randn(8, K), weight(K, R), weight(R, N)))
    with pytest.warns(UserWarning, match=warned):
        got = NMM.lowrank_matmul(x, u, v, executor="auto")
    torch.testing.assert_close(got, lowrank_matmul(x, u, v), rtol=0, atol=0)
    with warnings.catch_warnings(action="error"):
        NMM.lowrank_matmul(x, u, v, executor="auto")
    assert len(tried) == (cause is ZeroDivisionError)
    for name in ("simulator", executor_name(Options(executor="simulator", freeze=True))):
        with pytest.raises(NeuronSetupError, match=raised) as found:
            NMM.lowrank_matmul(x, u, v, executor=name)
        assert isinstance(found.value.__cause__, cause)
    strict = executor_name(Options(executor="simulator", strict=True))
    with pytest.raises(cause):
        NMM.lowrank_matmul(x, u, v, executor=strict)
    assert launched == []


def test_a_named_executor_raises_for_a_kernel_that_its_launcher_refuses(monkeypatch):
    refuses = mock.Mock(side_effect=NoKernelError("a spec", neuron.FAILED_FIRST_RUN.format("k")))
    monkeypatch.setattr(registration.EXECUTORS["simulator"], "launcher", refuses)
    x, u, v = torch.randn(8, K), weight(K, R).float(), weight(R, N).float()
    with pytest.raises(NeuronSetupError, match="failed its first run"):
        NMM.lowrank_matmul(x, u, v, executor="simulator")


@pytest.mark.parametrize("how", ["open", "no home", "nul", "too long"])
def test_a_cache_that_may_not_be_used_is_said_once_and_kernels_run(
    how, monkeypatch, tmp_path, launched
):
    """The simulator's rounding shows that a kernel ran: PyTorch's result has other bits."""
    x, u, v = (t.bfloat16() for t in (torch.randn(8, K), weight(K, R), weight(R, N)))
    want = NMM.lowrank_matmul(x, u, v, executor="simulator")
    KERNELS.clear()
    store._OPEN.clear()
    if how == "open":
        tmp_path.chmod(0o755)
    path = {"open": str(tmp_path), "nul": "/tmp/a\0b", "too long": "/tmp/" + "a/" * 3000}.get(how)
    if path is None:
        monkeypatch.delenv("NMM_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "~nobody-of-this-name")
    name = executor_name(Options(executor="simulator", cache=path))
    with warnings.catch_warnings(record=True, action="always") as caught:
        got = NMM.lowrank_matmul(x, u, v, executor=name)
        again = NMM.lowrank_matmul(x[:2], u, v, executor=name)
    assert torch.equal(got, want)
    assert torch.equal(again, want[:2])
    assert len(launched) == 3
    assert [w.category for w in caught] == [CacheWarning]
    assert "kernels are kept in memory" in str(caught[0].message)


def test_ctrl_c_while_building_is_not_swallowed(monkeypatch):
    from nmm_compiler.codegen import build

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build_kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        NMM.lowrank_matmul(
            torch.randn(8, K), weight(K, R).float(), weight(R, N).float(), executor="simulator"
        )


def test_tensors_off_the_cpu_are_refused():
    with pytest.raises(NeuronSetupError, match="executor 'simulator' got tensors on 'meta'"):
        executor._launch_in_simulator(None, [torch.empty(2, device="meta")])


def test_options_travel_in_the_executors_name():
    plain = Options(executor="simulator", target="trn3", inner="eager")
    assert executor_name(plain) == "simulator"
    assert options_of("simulator") == Options()
    tuned = Options(executor="simulator", buckets=(2, 4), freeze=True)
    name = executor_name(tuned)
    assert name == executor_name(
        Options.make({"buckets": [2, 4], "freeze": True}, executor="simulator")
    )
    assert name != executor_name(Options(executor="simulator", buckets=(2, 8), freeze=True))
    assert (options_of(name).buckets, options_of(name).freeze) == ((2, 4), True)
    with pytest.warns(UserWarning, match="options 'feedbeef' of a compiled call are not known"):
        assert options_of("simulator#feedbeef") == Options()


# Backward passes through emitted kernels: which products they launch, and their gradients.

TOKENS = 8


def trained(inputs, outputs, layout="row", dtype=torch.float32, grad=True):
    return weight(inputs, outputs, layout, dtype).requires_grad_(grad)


def sizes(spec):
    return (spec.family, spec.m, spec.k, spec.n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", ["row", "col"])
def test_gradients_of_a_low_rank_product_are_within_derived_bounds(dtype, stored, launched):
    x = torch.randn(TOKENS, K).to(dtype).requires_grad_()
    u, v = trained(K, R, stored, dtype), trained(R, N, stored, dtype)
    kw = {"u_layout": stored, "v_layout": stored}
    check_against_pytorch(NMM.lowrank_matmul, (x, u, v), kw, [x, u, v], launched, 5)
    assert sorted(map(sizes, launched)) == sorted(
        [
            ("matmul", TOKENS, K, R),  # p = x u
            ("matmul", TOKENS, N, R),  # q = g v^T
            ("matmul", TOKENS, R, K),  # dx = q u^T
            ("matmul", K, TOKENS, R),  # du = x^T q
            ("matmul", R, TOKENS, N),  # dv = p^T g
        ]
    )


def check_against_pytorch(op, args, kw, leaves, launched, launches):
    """Compare gradients with autograd through PyTorch's own products; count launches, no copies."""
    outs, wanted = (
        tree_leaves(op(*args, **kw, executor=name)) for name in ("simulator", "reference")
    )
    upstream = [torch.randn_like(y) for y in wanted]
    want = torch.autograd.grad(wanted, leaves, upstream)
    launched.clear()
    copies = PACKS.made
    got = torch.autograd.grad(outs, leaves, upstream)
    trains = all(leaf.requires_grad for leaf in tree_leaves(args) if leaf is not None)
    assert PACKS.made == copies or not trains, "what is trained was copied to transpose it"
    for a, b in zip(got, want, strict=True):
        # Gradients are of size ~10 after at most seven products with sums of at most 144 terms:
        # each moves a result by at most 144 roundings of 2^-24 of its size, and its operands and
        # results are rounded to their dtype once on both sides.
        bound = 7 * (N * FP32_ROUNDOFF + torch.finfo(b.dtype).eps) * max(float(b.abs().max()), 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=bound)
    assert len(launched) == launches, [spec.short() for spec in launched]
    return launched


def test_gradients_of_x_alone_are_low_rank_launches(launched):
    x = torch.randn(TOKENS, K, requires_grad=True)
    u, v = trained(K, R, grad=False), trained(R, N, grad=False)
    (spec,) = check_against_pytorch(NMM.lowrank_matmul, (x, u, v), {}, [x], launched, 1)
    assert sizes(spec) == ("lowrank", TOKENS, N, K)
    assert (spec.u_layout, spec.v_layout) == ("row", "row")  # of frozen weights a copy is kept
    frozen = [[trained(K, R, grad=False), trained(R, K, grad=False)] for _ in range(3)]
    found = check_against_pytorch(NMM.gated_mlp, (x, *frozen), {}, [x], launched, 5)
    assert {spec.family for spec in found} == {"lowrank"}


def test_a_frozen_base_is_part_of_the_launch_that_gives_dx(launched):
    """LoRA: dx = g w^T + scale (g v^T) u^T is one kernel, and no kernel computes dw."""
    x = torch.randn(TOKENS, K, requires_grad=True)
    u, v, w = trained(K, 16), trained(16, N), trained(K, N, "col", grad=False)
    args, kw = (x, u, v, None, w), {"scale": 2.0, "w_layout": "col"}
    found = check_against_pytorch(NMM.lowrank_matmul, args, kw, [x, u, v], launched, 5)
    based = [spec for spec in found if spec.family == "lowrank"]
    assert [(s.base, s.scale, sizes(s)) for s in based] == [(True, 2.0, ("lowrank", TOKENS, N, K))]


LONG = pytest.mark.long
LOW_RANK = (K, R), (R, N), N


@pytest.mark.parametrize(
    ("name", "shapes", "kw", "launches"),
    [
        ("lowrank_matmul", LOW_RANK, {"activation": "silu"}, 6),  # y once more, from p
        ("lowrank_matmul", LOW_RANK, {"inner_activation": "gelu"}, 5),
        ("lowrank_matmul", LOW_RANK, {"x_layout": "col", "out_layout": "col"}, 5),
        ("lowrank_matmul", LOW_RANK, {"scale": 0.5}, 5),
        pytest.param("lowrank_matmul_shared_x", ([(K, R), (K, 24)], [(R, N), (24, N)]), {}, 10,
                     marks=LONG),
        # p; for each v its gradient and q; du and dx of the sum of both q
        pytest.param("lowrank_matmul_shared_u", ((K, R), [(R, N), (R, 48)]), {}, 7, marks=LONG),
        # gate and up: two to recompute, four gradients; down: p, q, dx, du, dv
        ("gated_mlp", ([(K, R), (R, K)],) * 3, {}, 17),
        ("matmul", ((N, K),), {"w_layout": "col", "activation": "relu"}, 3),
    ],
)  # fmt: skip
def test_ops_train_through_kernels_and_functions_and_layouts_stay_around_them(
    name, shapes, kw, launches, launched
):
    x = torch.randn(K, TOKENS) if "x_layout" in kw else torch.randn(TOKENS, K)
    weights = tree_map(
        lambda shape: torch.randn(shape) if shape == N else trained(*shape), shapes,
        is_leaf=lambda part: part == N or isinstance(part[0], int),
    )  # fmt: skip
    args = (x, *weights, [None, None]) if "shared" in name else (x, *weights)
    leaves = [leaf.requires_grad_() for leaf in tree_leaves(args) if leaf is not None]
    check_against_pytorch(getattr(NMM, name), args, kw, leaves, launched, launches)


def test_sums_over_tokens_are_padded_to_a_bucket_unless_the_graph_is_static(launched):
    x = torch.randn(6, K, requires_grad=True)
    u, v = trained(K, R), trained(R, N)
    check_against_pytorch(NMM.lowrank_matmul, (x, u, v), {}, [x, u, v], launched, 5)
    (dv,) = (spec for spec in launched if (spec.m, spec.n) == (R, N))
    assert dv.k == 8
    kept = type(dv)(**{**dv.to_dict(), "k": 6})
    assert KERNELS.plan(kept, "trn2", Options(), "k") == (8,)
    KERNELS.get(kept, "trn2", Options())
    assert KERNELS.plan(kept, "trn2", Options(), "k") == (6,)
    assert KERNELS.plan(kept, "trn2", Options(buckets=(4, 7)), "k") == (7,)


def test_a_backward_kernel_that_cannot_be_built(monkeypatch, launched, auto):
    """Executor "auto" leaves the product to PyTorch with a warning; a named one raises."""
    broken_builds(monkeypatch, "matmul")
    x = torch.randn(TOKENS, K, requires_grad=True)
    u, v = trained(K, R), trained(R, N)
    y = NMM.lowrank_matmul(x, u, v, executor="simulator")
    with pytest.raises(NeuronSetupError, match="ZeroDivisionError: a fault in codegen"):
        torch.autograd.grad(y.sum(), (u,))
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


LADDERS = st.none() | st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(
    lambda steps: tuple(sorted(steps))
)


@given(st.integers(1, 20000), LADDERS)
def test_a_bucket_is_the_smallest_that_holds_the_tokens(tokens, ladder):
    steps = list(ladder) if ladder else [2**i for i in range(13)]
    steps += [steps[-1] * i for i in range(2, 20000 // steps[-1] + 3)]
    assert bucket(tokens, ladder) == min(s for s in steps if s >= tokens)


@given(st.integers(1, 20000), LADDERS, st.floats(0.1, 50), st.floats(0.001, 1))
def test_a_plan_covers_the_tokens_pads_only_at_its_end_and_is_never_dearer(
    tokens, ladder, fixed, each
):
    def cost_us(m):
        return fixed + each * m

    chosen = planned_buckets(tokens, ladder, cost_us)
    assert sum(chosen) >= tokens > sum(chosen[:-1])
    assert sum(map(cost_us, chosen)) <= cost_us(bucket(tokens, ladder))


def test_a_plan_splits_when_padding_costs_more_than_a_launch():
    assert planned_buckets(4097, None, lambda m: 10 + m) == (4096, 1)
    assert planned_buckets(4097, None, lambda m: 10000 + m) == (8192,)
    assert planned_buckets(64, None, lambda m: -m) == (64,)
