"""What may not be fused, each with its code; the graphs are right in all else.

Of numbers and conditions that decide, each test fails when the one that it names is off by one.
"""

import pytest
import torch
import torch.nn.functional as F
from models import Model, codes_of, kinds_of, trace_and_run
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nmm_compiler.passes.pipeline import run


def chain(p, x):
    return F.linear(F.linear(x, p.a), p.b)


def two(p, x):
    h = F.linear(x, p.a)
    return F.linear(h, p.b), F.linear(h, p.c)


def latent(rank):
    return lambda p, x: F.linear(F.rms_norm(F.linear(x, p.a), (rank,), p.g), p.b)


def tanh_between(p, x):
    return F.linear(F.linear(x, p.a).tanh(), p.b)


@pytest.mark.parametrize(
    ("function", "size", "rank", "kinds", "codes"),
    [
        (chain, 64, 31, ["lowrank"], []),
        (chain, 64, 32, [], ["rank_too_large"]),
        (chain, 64, 33, [], ["rank_too_large"]),
        (two, 48, 31, ["shared_u"], []),
        (two, 48, 32, [], None),
        (latent(7), 16, 7, ["mla"], []),
        (latent(8), 16, 8, [], None),
        # only a chain that would save is worth a refusal
        (tanh_between, 16, 7, [], ["between"]),
        (tanh_between, 16, 8, [], []),
    ],
)
def test_break_even_is_no_gain(function, size, rank, kinds, codes):
    """size x size: at half of it, or 2/3 for two, factors have as many products as the dense."""
    more = {"c": (size, rank), "g": (rank,)}
    model = Model(function, a=(rank, size), b=(size, rank), **more)
    result = trace_and_run(model, torch.randn(5, size))
    assert kinds_of(result) == kinds
    assert codes in (None, codes_of(result))


def test_a_factor_of_fewer_bits_is_widened_and_products_compute_in_one_dtype():
    model = Model(lambda p, x: x @ p.a * p.s @ p.b, a=(32, 4), s=(4,), b=(4, 32))
    model.s.data = model.s.data.bfloat16()
    x = torch.randn(6, 32)
    result = trace_and_run(model, x)
    assert kinds_of(result) == ["lowrank"]
    torch.testing.assert_close(result.graph_module(x), model(x), rtol=1e-5, atol=1e-6)
    model = Model(lambda p, x: (x @ p.a * p.s) @ p.b, a=(32, 4), s=(4,), b=(4, 32))
    model.a.data = model.a.data.bfloat16()
    result = trace_and_run(model, x.bfloat16())
    assert not result.matches
    assert codes_of(result) == ["between"]


def test_an_epilogue_that_promotes_stays_outside():
    model = Model(lambda p, x: chain(p, x) + p.d, a=(4, 32), b=(32, 4), d=(32,)).bfloat16()
    model.d.data = model.d.data.float()
    x = torch.randn(6, 32, dtype=torch.bfloat16)
    result = trace_and_run(model, x)
    (match,) = result.matches
    assert match.name == "linear_1"
    assert result.graph_module(x).dtype == torch.float32


class Wrapped(torch.Tensor):
    """A tensor of which nothing is known."""


@pytest.mark.parametrize("odd", [torch.Tensor.to_sparse, lambda w: w.as_subclass(Wrapped)])
def test_a_weight_that_is_no_plain_tensor_is_no_plain_matrix(odd):
    model = Model(lambda p, x: p.b @ (p.a @ x.t()), a=(4, 32), b=(32, 4))
    model.b = nn.Parameter(odd(model.b.detach()), requires_grad=False)
    assert not trace_and_run(model, torch.randn(6, 32)).matches


# -- effects: memory of which nothing is known may be any --------------------------------------


def unknown_write(written_first):
    """Return a graph that hands something without metadata to a function that may write."""

    def touch(thing):
        return None

    root = nn.Module()
    root.a, root.b = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(32, 4))
    graph = fx.Graph()
    x, box = graph.placeholder("x"), graph.placeholder("box")
    a, b = graph.get_attr("a"), graph.get_attr("b")
    if written_first:
        graph.call_function(touch, (box,))
    h = graph.call_function(F.linear, (x, a))
    if not written_first:
        graph.call_function(touch, (box,))
    graph.output(graph.call_function(F.linear, (h, b)))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(("written_first", "codes"), [(True, []), (False, ["mutation"])])
def test_a_write_to_unknown_memory_between_the_products_is_refused(written_first, codes):
    module = unknown_write(written_first)
    result = run(module, (torch.randn(6, 32), object()))
    assert codes_of(result) == codes
    assert len(result.matches) == (not codes)


# -- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["x", "a", "b", "bias", None])
def test_operands_on_two_devices_are_refused(odd):
    graph = fx.Graph()
    shapes = {"x": (6, 32), "a": (4, 32), "b": (32, 4), "bias": (32,)}
    nodes = {}
    with FakeTensorMode():
        for name, shape in shapes.items():
            title = name if name == "x" else f"l_self_parameters_{name}_"
            nodes[name] = graph.placeholder(title)
            device = "meta" if name == odd else "cpu"
            nodes[name].meta["example_value"] = torch.empty(shape, device=device)
        h = graph.call_function(F.linear, (nodes["x"], nodes["a"]))
        y = graph.call_function(F.linear, (h, nodes["b"], nodes["bias"]))
        h.meta["example_value"] = torch.empty(6, 4)
        y.meta["example_value"] = torch.empty(6, 32)
    graph.output(y)
    result = run(fx.GraphModule(nn.Module(), graph), None)
    assert codes_of(result) == (["device"] if odd else [])
    assert kinds_of(result) == ([] if odd else ["lowrank"])
