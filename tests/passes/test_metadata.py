"""Values of nodes: only what a graph lacks is computed, under the shape environment it has."""

import functools
import types

import models
import pytest
import torch
import torch.nn.functional as F
from models import Backend, kinds_of
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from nmm_compiler.passes.graph.capture import collect_values
from nmm_compiler.passes.rules.base import module_path

SAID = []


def compiled(model, inputs, before, **how):
    """Compile a model and call it for each of the inputs; `before` sees each graph first."""
    found = Backend(before=before)
    call = torch.compile(model, backend=found, **how)
    for x in inputs:
        torch.testing.assert_close(call(*x), model(*x), rtol=1e-4, atol=1e-4)
    return found


def forget(module, lost):
    for node in module.graph.nodes:
        if node.name in lost or ("all" in lost and node.op.startswith("call")):
            node.meta.pop("example_value", None)


Pair = functools.partial(
    models.Model,
    lambda p, x: F.linear(F.linear(x, p.a).reshape(-1, 4), p.b).relu(),
    a=(4, 32),
    b=(32, 4),
)


def log(word):
    SAID.append(word)


@pytest.mark.parametrize("lost", ["linear", "reshape", "linear_1", "all"])
def test_lost_values_of_a_symbolic_graph_come_back_symbolic(lost):
    inputs = [(torch.randn(2, tokens, 32),) for tokens in (3, 5, 8)]
    (found,) = compiled(Pair(), inputs, lambda module, _: forget(module, [lost]), dynamic=True)
    assert kinds_of(found) == ["lowrank"]
    assert not isinstance(found.matches[0].info["m"], int)


def test_a_node_that_only_logs_is_not_run():
    SAID.clear()

    def with_log(module, inputs):
        first = next(n for n in module.graph.nodes if n.op == "call_function")
        with module.graph.inserting_before(first):
            module.graph.call_function(log, ("ran",))
        values = collect_values(module, inputs)
        known = [n for n in module.graph.nodes if "example_value" in n.meta]
        assert all(values[n] is n.meta["example_value"] for n in known)
        assert SAID == []

    compiled(Pair(), [(torch.randn(3, 32),)], with_log)
    assert SAID == ["ran"]


def test_a_partly_known_graph_keeps_what_it_knows():
    module = fx.symbolic_trace(Pair())
    full = collect_values(module, (torch.randn(3, 32),))
    nodes = list(module.graph.nodes)
    for node in nodes:
        if node in full and node.op in ("placeholder", "get_attr"):
            node.meta["val"] = full[node]
    values = collect_values(module, None)
    assert all(values[n] is n.meta["val"] for n in nodes if "val" in n.meta)
    assert all(isinstance(values[n], FakeTensor) for n in nodes if n.op.startswith("call"))
    assert tuple(values[nodes[-2]].shape) == (3, 32)


def test_autocast_holds_while_values_are_computed():
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w)
        return y, F.linear(x, w)

    def dtypes(module, inputs):
        forget(module, ["all"])
        values = collect_values(module, inputs)
        linears = [n for n in module.graph.nodes if n.target is F.linear]
        assert [values[n].dtype for n in linears] == [torch.bfloat16, torch.float32]

    compiled(f, [(torch.randn(3, 32), torch.randn(4, 32))], dtypes)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "said",
    ["L['self'].h.0.mlp", "L['fn'].__dict__['_modules']['h'][0].mlp",
     "L['args'][0].h.0.mlp",  # of a method that something wraps
     "L['self']._modules['h']._modules['0'].mlp"],  # of torch 2.9
)  # fmt: skip
def test_paths_of_modules_are_those_of_the_model(said):
    stack = {"1": (said, torch.nn.Linear)}
    assert module_path(types.SimpleNamespace(meta={"nn_module_stack": stack})) == "h.0.mlp"
