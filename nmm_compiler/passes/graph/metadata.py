"""Shapes and dtypes of every value: from the graph's metadata, else by fake-tensor propagation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from nmm_compiler.errors import ModelError
from nmm_compiler.passes.graph.effects import fetch_attribute, region_edge


def value_key(graph: fx.Graph) -> str:
    """Return the graph's metadata key: "example_value" in Dynamo graphs, else "val"."""
    keys = (k for node in graph.nodes for k in ("example_value", "val") if k in node.meta)
    return next(keys, "val")


def collect_values(
    module: fx.GraphModule, example_inputs: Sequence[Any] | None
) -> dict[fx.Node, Any]:
    """Return the metadata value of each node; only missing values are computed.

    Nodes without users in a traced graph only log or assert, so they need no value. Raises
    ModelError when values are missing and there are no inputs to propagate.
    """
    key = value_key(module.graph)
    known = {node: node.meta[key] for node in module.graph.nodes if key in node.meta}
    traced = any(node.op.startswith("call") for node in known)
    rest = [node for node in module.graph.nodes if node not in known and node.op != "output"]
    stored = [node for node in rest if node.op == "get_attr"]
    called = [node for node in rest if node.op != "get_attr" and not region_edge(node)]
    missing = [node for node in called if node.users or not traced]
    if not missing:
        return known | {node: fetch_attribute(module, str(node.target)) for node in stored}
    holders = module.graph.find_nodes(op="placeholder")
    if example_inputs is None and not {*holders}.isdisjoint(missing):
        raise ModelError(
            f"the graph carries no shapes (first missing: node {missing[0].name!r}); pass "
            "example_inputs, for instance nmm_compiler.rewrite(graph, (torch.empty(4, 512),))"
        )
    pairs = zip(holders, example_inputs or (), strict=False)
    inputs = [value for holder, value in pairs if holder not in known]
    fake = (v for v in tree_leaves([*known.values(), *inputs]) if isinstance(v, FakeTensor))
    # Sizes that depend on data (x[mask]) become symbols of the environment.
    mode = next((v.fake_mode for v in fake), None) or FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=ShapeEnv()
    )
    run = _Propagation(module, mode, {*called} - {*missing})
    with mode, torch.no_grad():
        run.run(*map(run.fake, inputs), initial_env=dict(known))
    return {node: value for node, value in run.env.items() if node.op != "output"}


class _Propagation(fx.Interpreter):
    """Computes the missing values on fake tensors, in the fake mode of the known ones.

    The mode has the shape environment of symbolic sizes, so that nothing is specialized. Edges of
    autocast and grad-mode regions are run too: dtypes depend on them.
    """

    def __init__(
        self, module: fx.GraphModule, mode: FakeTensorMode, silent: Collection[fx.Node]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.mode, self.silent = mode, silent

    def fake(self, value: Any) -> Any:
        """Return a tensor as one of the mode, any other value as it is."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self.mode.from_tensor(value, static_shapes=True)
        if isinstance(value, nn.Parameter) and not isinstance(fake, nn.Parameter):
            fake.requires_grad_(value.requires_grad)
        return fake

    def run_node(self, node: fx.Node) -> Any:
        """Compute the value of a node that is not known."""
        return None if node in self.silent else super().run_node(node)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on fake buffers: batch norm counts its calls in one."""
        module = super().fetch_attr(target)
        buffers = {name: self.fake(value) for name, value in module.named_buffers()}
        if not buffers:
            return module(*args, **kwargs)
        return torch.func.functional_call(module, buffers, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        """Return parameters as fake tensors, other attributes as they are."""
        return self.fake(super().fetch_attr(target))
