"""Numbers and conditions that decide: each test fails when the one that it names is off by one."""

import pytest
import torch
import torch.nn.functional as F
from models import Model
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nmm_compiler.passes.graph.effects import ANYTHING, Effects
from nmm_compiler.passes.pipeline import run


def graph_of(function, **weights):
    """Return the symbolic trace of a function of (parameters, x)."""

    return fx.symbolic_trace(Model(function, **weights))


def pair(x, a, b):
    return F.linear(F.linear(x, a), b)


# -- layouts: a transpose in the graph costs three of the DMA's ---------------------------------


def test_two_readers_by_dma_are_cheaper_than_one_transpose_in_the_graph():
    """Two chains read y transposed by their DMA (2 n); y in "col" leaves a transpose (3 n)."""

    def f(p, x):
        y = pair(x, p.a, p.b)
        return pair(y, p.c, p.d), pair(y, p.e, p.f).relu(), y.cumsum(-1)

    shapes = {"a": (3, 32), "b": (24, 3), "c": (3, 24), "d": (16, 3), "e": (2, 24), "f": (40, 2)}
    result = run(graph_of(f, **shapes), (torch.randn(6, 32),), {"rules": ["-shared_x"]})
    assert len(result.rewritten) == 3
    choice = next(c for c in result.layouts if c.col_cost)
    assert (choice.layout, choice.row_cost, choice.col_cost) == ("row", 2 * 24, 3 * 24)
    assert result.transposes_after == 0


# -- cost: factors that are as large as the dense matrix are none -------------------------------


@pytest.mark.parametrize(("r", "told"), [(7, 1), (8, 0)])
def test_only_a_chain_that_would_save_is_worth_a_refusal(r, told):
    module = graph_of(lambda p, x: F.linear(F.linear(x, p.a).tanh(), p.b), a=(r, 16), b=(16, r))
    assert len(run(module, (torch.randn(6, 16),)).declined) == told


@pytest.mark.parametrize(("r", "found"), [(7, 1), (8, 0)])
def test_only_a_latent_that_saves_is_an_mla(r, found):
    def f(p, x):
        return F.linear(F.rms_norm(F.linear(x, p.a), (r,), p.g), p.b)

    result = run(graph_of(f, a=(r, 16), b=(16, r), g=(r,)), (torch.randn(6, 16),))
    assert len(result.matches) == found


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
    assert [d.code for d in result.declined] == codes
    assert len(result.rewritten) == (not codes)


def test_a_write_to_unknown_memory_writes_everything():
    module = unknown_write(False)
    x = next(iter(module.graph.nodes))
    effects = Effects(module, {x: torch.randn(6, 32)})
    (write,) = effects.writes
    assert write.storages == ANYTHING
    assert effects.is_written(x)
    last = len(module.graph.nodes)
    assert effects.crossed_write(0, last, [x]) is write
    assert effects.crossed_write(0, last, [x], allowed=[write.node]) is None
    assert effects.crossed_write(write.position, last, [x]) is None


def test_a_write_to_a_list_of_tensors_is_one_to_each():
    def f(p, x):
        h = F.linear(x, p.a)
        torch._foreach_mul_([h], 2.0)
        return F.linear(h, p.b)

    module = graph_of(f, a=(4, 32), b=(32, 4))
    assert [d.code for d in run(module, (torch.randn(6, 32),)).declined] == ["mutation"]


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
    assert [d.code for d in result.declined] == (["device"] if odd else [])
    assert [m.kind for m in result.rewritten] == ([] if odd else ["lowrank"])
