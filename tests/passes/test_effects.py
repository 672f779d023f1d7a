"""What a node writes, and what moving across it would change."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops.wrap import wrap

from nmm_compiler.passes.graph.effects import (
    ANYTHING,
    Effects,
    graph_writes,
    is_ignorable,
    storages_of,
    written_arguments,
)

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
    "pointwise": (lambda g, x, y, z: g.call_function(torch.mul, (x, y)), ""),
    "method": (lambda g, x, y, z: g.call_method("mul_", (x, y)), "x"),
    "operator": (lambda g, x, y, z: g.call_function(operator.iadd, (x, y)), "x"),
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


def effects_of(make, tensors):
    """Return the effects of x, h, <make>, y, with metadata for the named nodes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    h = graph.call_function(torch.sin, (x,))
    nodes = {"x": x, "h": h, "made": make(graph, x, h)}
    nodes["y"] = graph.call_function(torch.cos, (h,))
    graph.output(nodes["y"])
    effects = Effects(fx.GraphModule(nn.Module(), graph), {nodes[k]: t for k, t in tensors.items()})
    return effects, nodes


def test_a_write_is_seen_wherever_it_stands_between():
    memory = torch.zeros(3)
    tensors = {"x": memory, "h": torch.zeros(3), "made": memory}
    effects, nodes = effects_of(lambda g, x, h: g.call_method("add_", (x, 1.0)), tensors)
    start, write, end = (effects.position[nodes[name]] for name in ("h", "made", "y"))
    assert (start + 1, write + 1) == (write, end)
    assert effects.crossed_write(start, end, [nodes["x"]]).node is nodes["made"]
    assert effects.crossed_write(start, end, [nodes["h"]]) is None
    assert effects.crossed_write(start, end, [nodes["x"]], allowed=[nodes["made"]]) is None
    assert effects.is_written(nodes["x"])
    assert not effects.is_written(nodes["h"])


def test_a_write_to_memory_of_which_nothing_is_known_may_be_to_any():
    tensors = {"h": torch.zeros(3)}  # nothing is known of x
    effects, nodes = effects_of(lambda g, x, h: g.call_method("add_", (x, 1.0)), tensors)
    assert [write.storages for write in effects.writes] == [ANYTHING]
    start, end = effects.position[nodes["h"]], effects.position[nodes["y"]]
    assert effects.crossed_write(start, end, [nodes["h"]]) is not None
    assert effects.is_written(nodes["h"])


def test_an_edge_is_seen_wherever_it_stands_between():
    effects, nodes = effects_of(
        lambda g, x, h: g.call_function(torch._C._set_grad_enabled, (False,)), {}
    )
    start, edge, end = (effects.position[nodes[name]] for name in ("h", "made", "y"))
    assert effects.crossed_edge(start, end) == (nodes["made"], "_set_grad_enabled")
    assert effects.crossed_edge(start, edge) is None
    assert effects.crossed_edge(edge, end) is None


def test_an_assertion_that_somebody_reads_is_a_reader():
    graph = fx.Graph()
    checked = graph.call_function(aten._assert_tensor_metadata.default, (graph.placeholder("x"),))
    assert is_ignorable(checked)
    graph.output(checked)
    assert not is_ignorable(checked)


def test_storages_are_found_in_containers():
    one, two, three = (torch.zeros(2) for _ in range(3))
    nested = storages_of((one, [two, (three.view(1, 2), 7)]))
    assert nested == storages_of(one) | storages_of(two) | storages_of(three)
    assert len(nested) == 3
