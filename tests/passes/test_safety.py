"""Graphs in which a fusion would be wrong: moved reads, shared memory, hidden readers, views."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from models import Backend, Pair, kinds_of, trace_and_run
from torch import fx, nn

from nmm_compiler.options import Options
from nmm_compiler.passes.pipeline import run

torch.manual_seed(0)
A, B = torch.randn(4, 32) / 6, torch.randn(32, 4) / 2
W = torch.randn(32, 32) / 6


Model = functools.partial(models.Model, a=A, b=B, w=W)


def both(function, x=None):
    """Return (result, original outputs, rewritten outputs), inputs compared after the run too."""
    x = torch.randn(6, 32) if x is None else x
    module = fx.symbolic_trace(Model(function))
    result = run(module, (x.clone(),))
    one, two = x.clone(), x.clone()
    with torch.no_grad():
        want, got = module(one), result.graph_module(two)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return result


def lin(p, x):
    return F.linear(F.linear(x, p.a), p.b)


def copied_then_written(p, x):
    y = x.t().contiguous().t()
    x.mul_(2.0)
    return lin(p, y) + x


def written_copy(p, x):
    y = x.clone()
    y.view(-1).mul_(2.0)
    return F.linear(x, p.w) + lin(p, y)


def copy_outlives_a_write(p, x):
    z = x + 0.0
    y = z.clone()
    z.mul_(2.0)
    return F.silu(lin(p, z)) * F.linear(y, p.w)


def weight_written_between(p, x):
    h = F.linear(x, p.a)
    p.b.data.mul_(2.0)
    return F.linear(h, p.b)


def written_through_out(p, x):
    h = F.linear(x, p.a)
    torch.relu(h.neg()).add_(1.0)
    torch.mul(h, 2.0, out=h)
    return F.linear(h, p.b)


def sum_into_the_input(p, x):
    x += lin(p, x)
    return x * 2


FUNCTIONS = {
    copied_then_written: None, written_copy: ["lowrank"], copy_outlives_a_write: ["lowrank"],
    written_through_out: [], sum_into_the_input: None,
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_reads_and_writes_are_those_of_the_graph(function):
    found = [m.kind for m in both(function).matches]
    assert FUNCTIONS[function] in (None, found)


def test_write_to_a_weight_between_is_refused():
    module = fx.symbolic_trace(Model(weight_written_between))
    assert not run(module, (torch.randn(6, 32),)).matches


def test_two_symbolic_sizes_and_a_result_passed_as_columns():
    model = Model(lambda p, x: lin(p, F.silu(lin(p, x)) * lin(p, x)))
    results = Backend(Options(rules=("-gated_mlp",)))
    compiled = torch.compile(model, backend=results, dynamic=True)
    for tokens in (3, 5):
        x = torch.randn(tokens + 2, tokens, 32)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert kinds_of(results[0]) == ["gated_mlp_up", "lowrank"]
    assert results[0].matches[1].info["x_layout"] == "col"


def test_sizes_that_no_input_has():
    def f(p, x):
        padded = F.pad(x, (0, 0, 0, x.shape[1] % 4, 0, x.shape[0] % 3))
        z = padded.transpose(0, 1)
        return lin(p, z.reshape(-1, padded.shape[0], 32)), F.linear(F.linear(z, p.a), p.b).relu()

    model = Model(f)
    compiled = torch.compile(model, backend=lambda m, i: run(m, i).graph_module, dynamic=True)
    for shape in ((4, 6), (5, 7)):
        x = torch.randn(*shape, 32)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def _hooked(p, x):
    h = F.linear(x, p.a)
    h.register_hook(lambda gradient: gradient * 3)
    return F.linear(h, p.b)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (lambda p, x: F.linear(F.linear(x, p.a).detach(), p.b) + x, []),
        (lambda p, x: F.linear(F.linear(x, p.a).data, p.b) + x, []),
        (_hooked, []),
        (lambda p, x: lin(p, x.detach()) + x, ["lowrank"]),
        (lambda p, x: F.linear(F.linear(x, p.a.detach()), p.b), ["lowrank"]),
        (lambda p, x: F.linear(x, p.w).detach() + lin(p, x), ["lowrank"]),
    ],
    ids=["detached middle", "data", "hook", "detached x", "detached weight", "detached base"],
)
def test_gradients_stop_where_the_model_stops_them(function, kinds):
    model, found = Model(function), Backend()
    leaves = [p for n, p in model.named_parameters()]
    gradients = []
    for call in (model, torch.compile(model, backend=found, dynamic=False)):
        x = torch.arange(6.0 * 32).view(6, 32).sin().requires_grad_()
        loss = call(x).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *leaves], allow_unused=True))
    assert kinds_of(found[0]) == kinds
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def _vmapped(p, x):
    return lin(p, torch.func.vmap(lambda row: lin(p, row))(lin(p, x)))


def _around(p, x):
    h = F.linear(x, p.a)
    y = torch.func.vmap(torch.sin)(x)
    return F.linear(h, p.b) + y


def _tangent(p, x):
    _, tangent = torch.func.jvp(lambda z: lin(p, z), (x,), (torch.ones_like(x),))
    return lin(p, x) + tangent


def _gradient(p, x):
    return lin(p, x) + torch.func.grad(lambda z: lin(p, z).sum())(x)


def _checkpoint_inside(p, x):
    from torch.utils.checkpoint import checkpoint

    inner = torch.func.vmap(lambda row: checkpoint(lambda z: lin(p, z), row, use_reentrant=False))
    return lin(p, x) + inner(x)


@pytest.mark.parametrize(
    ("function", "chains", "left"),
    [
        (_vmapped, 2, 1),
        (_around, 0, 1),
        (_tangent, 1, 1),
        (_gradient, 1, 1),
        (_checkpoint_inside, 1, 0),
    ],
)
def test_only_what_a_transform_holds_is_left_alone(function, chains, left):
    model, found = Model(function), Backend()
    x = torch.randn(6, 32)
    try:
        got = torch.compile(model, backend=found, dynamic=False)(x)
    except torch._dynamo.exc.TorchDynamoException:
        pytest.skip("this torch does not trace the transform")
    torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    assert sum(r.chains for r in found) == chains
    assert sum(d.code == "region" for r in found for d in r.declined) == left


def test_tensor_subclass_weight_is_refused():
    class Wrapped(torch.Tensor):
        pass

    model = Model(lin)
    model.b = nn.Parameter(B.clone().as_subclass(Wrapped))
    found = trace_and_run(model, torch.randn(6, 32))
    assert not found.matches


aten = torch.ops.aten
# Views and casts that read a second tensor for its shape or dtype only.
TWO_TENSOR = (
    *((name, "call_method") for name in ("view_as", "reshape_as", "expand_as", "type_as", "to")),
    *((name, "call_function") for name in ("view_as", "reshape_as", "expand_as", "type_as")),
    ("reshape of size", "call_method"),
)


def beside(kind, name, role, dtype):
    """Return y = b(a(x)) and a w beside it; both turned, so that y is best made [n, m]."""

    def function(p, x):
        y = p.pair(x)
        one, two = (p.w, y) if role == "asked" else (y, p.w)
        if kind == "call_function":
            z = getattr(aten, name).default(one, two)
        elif name == "reshape of size":
            z = one.reshape(two.size())
        else:
            z = getattr(one, name)(two)
        return z.t().cumsum(0), y.t().cumsum(0)

    return models.Model(function, pair=Pair(32, 3, 24), w=torch.randn(6, 24, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("role", ["asked", "viewed"])
@pytest.mark.parametrize(("name", "kind"), TWO_TENSOR)
def test_two_tensor_view_is_one_of_the_tensor_that_it_views(kind, name, role, dtype):
    model, x = beside(kind, name, role, dtype), torch.randn(6, 32)
    result = trace_and_run(model, x, strict=True)
    assert kinds_of(result) == ["lowrank"]
    torch.testing.assert_close(result.graph_module(x), model(x), rtol=1e-5, atol=1e-5)


def test_two_tensor_cast_does_not_turn_the_tensor_it_asks():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 3, bias=False), nn.Linear(3, 24)

        def forward(self, x, w):
            return self.b(self.a(x)).type_as(w).cumsum(0)

    x, w = torch.randn(6, 32), torch.randn(6, 24, dtype=torch.float64)
    result = trace_and_run(Cast(), x, w, strict=True)
    (holder,) = (n for n in result.graph_module.graph.nodes if n.name == "w")
    assert [user.name for user in holder.users] == ["type_as"]
    assert result.transposes_after == 0
