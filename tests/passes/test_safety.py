"""Graphs in which a fusion would be wrong: moved reads, shared memory, hidden readers, views."""

import copy
import functools
import operator

import models
import pytest
import torch
import torch.nn.functional as F
from models import Backend, Pair, kinds_of, trace_and_run
from torch import fx, nn
from torch._higher_order_ops.wrap import wrap
from torch.utils import _pytree as pytree

from nmm_compiler.options import Options
from nmm_compiler.passes.graph.effects import graph_writes, written_arguments
from nmm_compiler.passes.pipeline import run

aten = torch.ops.aten
torch.manual_seed(0)
A, B = torch.randn(4, 32) / 6, torch.randn(32, 4) / 2


Model = functools.partial(models.Model, a=A, b=B, w=(torch.randn(32, 32) / 6))


@torch.no_grad()
def both(function):
    """Return the result; outputs are compared, and inputs after the run too."""
    x = torch.randn(6, 32)
    module = fx.symbolic_trace(Model(function))
    result = run(module, (x.clone(),))
    one, two = x.clone(), x.clone()
    want, got = copy.deepcopy(module)(one), copy.deepcopy(result.graph_module)(two)
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


def written_between_equal_products(p, x):
    one = lin(p, x)
    x.mul_(2.0)
    return one, lin(p, x)


def list_written(p, x):
    h = F.linear(x, p.a)
    torch._foreach_mul_([h], 2.0)
    return F.linear(h, p.b)


def product_into_an_output(p, x):
    z = torch.zeros_like(x)
    return torch.mm(F.linear(x, p.a), p.b.t(), out=z) + z


def product_into_a_middle(p, x):
    z = torch.zeros_like(x[:, :4])
    return F.linear(torch.mm(x, p.a.t(), out=z), p.b) + z.sum()


def base_subtracted(p, x):
    return lin(p, x) - F.linear(x, p.w)


FUNCTIONS = {
    copied_then_written: None, written_copy: ["lowrank"], copy_outlives_a_write: ["lowrank"],
    written_through_out: [], sum_into_the_input: None, weight_written_between: [],
    written_between_equal_products: ["lowrank", "lowrank"], list_written: [],
    product_into_an_output: [], product_into_a_middle: [], base_subtracted: ["lowrank"],
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_reads_and_writes_are_those_of_the_graph(function):
    found = [m.kind for m in both(function).matches]
    assert FUNCTIONS[function] in (None, found)


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


@torch.no_grad()
def _copied(x):
    return x.clone()


def test_a_copy_stops_gradients_where_weights_are_inputs_as_x_is():
    x, u, v = (torch.randn(n, m, requires_grad=True) for n, m in ((16, 64), (64, 8), (8, 96)))
    compiled = torch.compile(lambda x, u, v: _copied(x) @ u @ v, backend=Backend())
    compiled(x, u, v).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (lambda p, x: F.linear(F.linear(x, p.a).detach(), p.b) + x, []),
        (lambda p, x: F.linear(F.linear(x, p.a).data, p.b) + x, []),
        (_hooked, []),
        (lambda p, x: lin(p, x.detach()) + x, ["lowrank"]),
        (lambda p, x: F.linear(F.linear(x, p.a.detach()), p.b), ["lowrank"]),
        (lambda p, x: F.linear(x, p.w).detach() + lin(p, x), ["lowrank"]),
        (lambda p, x: lin(p, _copied(x)) + x, ["lowrank"]),
    ],
    ids=[
        "detached middle",
        "data",
        "hook",
        "detached x",
        "detached weight",
        "detached base",
        "copied x",
    ],
)
def test_gradients_stop_where_the_model_stops_them(function, kinds):
    model, found, gradients = Model(function), Backend(), []
    for call in (model, torch.compile(model, backend=found, dynamic=False)):
        x = torch.arange(6.0 * 32).view(6, 32).sin().requires_grad_()
        loss = call(x).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True))
    assert kinds_of(found[0]) == kinds
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def _around(p, x):
    h = F.linear(x, p.a)
    y = torch.func.vmap(torch.sin)(x)
    return F.linear(h, p.b) + y


def _tangent(p, x):
    _, tangent = torch.func.jvp(lambda z: lin(p, z), (x,), (torch.ones_like(x),))
    return lin(p, x) + tangent


def _checkpoint_inside(p, x):
    from torch.utils.checkpoint import checkpoint

    inner = torch.func.vmap(lambda row: checkpoint(lambda z: lin(p, z), row, use_reentrant=False))
    return lin(p, x) + inner(x)


@pytest.mark.parametrize(
    ("function", "chains", "left"),
    [
        (lambda p, x: lin(p, torch.func.vmap(lambda row: lin(p, row))(lin(p, x))), 2, 1),
        (_around, 0, 1),
        (_tangent, 1, 1),
        (lambda p, x: lin(p, x) + torch.func.grad(lambda z: lin(p, z).sum())(x), 1, 1),
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
    def cast(x, w):
        return F.linear(F.linear(x, A), B).type_as(w).cumsum(0)

    x, w = torch.randn(6, 32), torch.randn(6, 32, dtype=torch.float64)
    result = trace_and_run(cast, x, w, strict=True)
    (holder,) = (n for n in result.graph_module.graph.nodes if n.name == "w")
    assert [user.name for user in holder.users] == ["type_as"]
    assert result.transposes_after == 0


# What a node writes.


class Own(nn.Module):
    def forward(self, x):
        return x


def body(write):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("add_" if write else "add", (x, 1.0)))
    return fx.GraphModule(nn.Module(), graph)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu, self.relu_, self.own = nn.ReLU(), nn.ReLU(inplace=True), Own()
        self.writing, self.quiet = body(True), body(False)


def unknown(x, y):
    return x + y


IN_PLACE = ("iadd", "ifloordiv", "imod", "ixor", "ilshift", "irshift", "iand", "ipow")
# Of each node: what it calls, its arguments of x, y and z, its keywords, and what it writes.
WRITES = {
    "method": ("call_method", "mul_", "xy", {}, "x"),
    "method of any object": ("call_method", "__eq__", "xy", {}, ""),
    **{name: ("call_function", getattr(operator, name), "xy", {}, "x") for name in IN_PLACE},
    "inplace flag": ("call_function", F.relu, "x", {"inplace": True}, "x"),
    "out": ("call_function", torch.mul, "xy", {"out": "z"}, "z"),
    "several outs": ("call_function", torch.sort, "x", {"out": ("y", "z")}, "yz"),
    "batch_norm": ("call_function", F.batch_norm, "xyz", {}, ""),
    "batch_norm in training": ("call_function", F.batch_norm, "xyz", {"training": True}, "yz"),
    "batch_norm of torch": (
        "call_function", torch.batch_norm, ("x", None, None, *"yz", True, 0.1, 1e-5, False), {},
        "yz"),
    "instance_norm": ("call_function", F.instance_norm, "xyz", {}, "yz"),
    "instance_norm in eval": (
        "call_function", F.instance_norm, (*"xyz", None, None, False), {}, ""),
    "aten in place": ("call_function", aten.add_.Tensor, "xy", {}, "x"),
    "aten out": ("call_function", aten.add.out, "xy", {"out": "z"}, "z"),
    "aten": ("call_function", aten.add.Tensor, "xy", {}, ""),
    "unknown function": ("call_function", unknown, "xy", {}, "xy"),
    "module": ("call_module", "relu", "x", {}, ""),
    "module in place": ("call_module", "relu_", "x", {}, "x"),
    "unknown module": ("call_module", "own", "x", {}, "x"),
    "graph": ("call_module", "quiet", "x", {}, ""),
    "graph that writes": ("call_module", "writing", "x", {}, "x"),
    "body": ("call_function", wrap, ("quiet", "x"), {}, ""),
    "body that writes": ("call_function", wrap, ("writing", "x"), {}, "x"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize("name", WRITES)
def test_what_a_node_writes(name):
    kind, target, args, keywords, wanted = WRITES[name]
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "xyz"}
    if target is wrap:
        nodes[args[0]] = graph.get_attr(args[0])
    given, named = pytree.tree_map(lambda key: nodes.get(key, key), (tuple(args), keywords))
    node = graph.create_node(kind, target, given, named)
    graph.output(None)
    module = fx.GraphModule(Root(), graph)
    written = [n.name for n in written_arguments(node, module) if n.op == "placeholder"]
    assert written == list(wanted)
    assert graph_writes(module) == bool(wanted)


@pytest.mark.parametrize("name", ["__iadd__", "__iand__", "__imatmul__", "__setitem__", "add_"])
def test_methods_that_write_are_known_by_their_names(name):
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert written_arguments(graph.call_method(name, (x, x)), torch.nn.Module()) == [x]
