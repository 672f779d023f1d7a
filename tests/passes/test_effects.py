"""What a node writes."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops.wrap import wrap

from nmm_compiler.passes.graph.effects import graph_writes, written_arguments

aten = torch.ops.aten


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


def node_of(make):
    """Return the node that `make(graph, x, y, z)` adds, and its module."""
    graph = fx.Graph()
    node = make(graph, *(graph.placeholder(name) for name in "xyz"))
    graph.output(None)
    return node, fx.GraphModule(Root(), graph)


WRITES = {
    "method": (lambda g, x, y, z: g.call_method("mul_", (x, y)), "x"),
    "operator": (lambda g, x, y, z: g.call_function(operator.iadd, (x, y)), "x"),
    **{
        name: (lambda g, x, y, z, name=name: g.call_function(getattr(operator, name), (x, y)), "x")
        for name in ("ifloordiv", "imod", "ixor", "ilshift", "irshift", "iand", "ipow")
    },
    "inplace flag": (lambda g, x, y, z: g.call_function(F.relu, (x,), {"inplace": True}), "x"),
    "out": (lambda g, x, y, z: g.call_function(torch.mul, (x, y), {"out": z}), "z"),
    "several outs": (lambda g, x, y, z: g.call_function(torch.sort, (x,), {"out": (y, z)}), "yz"),
    "batch_norm": (lambda g, x, y, z: g.call_function(F.batch_norm, (x, y, z)), ""),
    "batch_norm in training": (
        lambda g, x, y, z: g.call_function(F.batch_norm, (x, y, z), {"training": True}),
        "yz",
    ),
    "instance_norm": (lambda g, x, y, z: g.call_function(F.instance_norm, (x, y, z)), "yz"),
    "instance_norm in eval": (
        lambda g, x, y, z: g.call_function(F.instance_norm, (x, y, z, None, None, False)),
        "",
    ),
    "aten in place": (lambda g, x, y, z: g.call_function(aten.add_.Tensor, (x, y)), "x"),
    "aten out": (lambda g, x, y, z: g.call_function(aten.add.out, (x, y), {"out": z}), "z"),
    "aten": (lambda g, x, y, z: g.call_function(aten.add.Tensor, (x, y)), ""),
    "unknown function": (lambda g, x, y, z: g.call_function(unknown, (x, y)), "xy"),
    "module": (lambda g, x, y, z: g.call_module("relu", (x,)), ""),
    "module in place": (lambda g, x, y, z: g.call_module("relu_", (x,)), "x"),
    "unknown module": (lambda g, x, y, z: g.call_module("own", (x,)), "x"),
    "graph": (lambda g, x, y, z: g.call_module("quiet", (x,)), ""),
    "graph that writes": (lambda g, x, y, z: g.call_module("writing", (x,)), "x"),
    "body": (lambda g, x, y, z: g.call_function(wrap, (g.get_attr("quiet"), x)), ""),
    "body that writes": (lambda g, x, y, z: g.call_function(wrap, (g.get_attr("writing"), x)), "x"),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize("name", WRITES)
def test_what_a_node_writes(name):
    make, wanted = WRITES[name]
    node, module = node_of(make)
    written = [n.name for n in written_arguments(node, module) if n.op == "placeholder"]
    assert written == list(wanted)
    assert graph_writes(module) == bool(wanted)
