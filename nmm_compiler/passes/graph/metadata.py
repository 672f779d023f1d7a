"""Shapes and dtypes of every value: from the graph's metadata, else by fake-tensor propagation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    silent: set[fx.Node] = set()
    missing: list[fx.Node] = []
    stored: dict[fx.Node, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node in known or node.op == "output":
            continue
        if node.op == "get_attr":
            value = fetch_attribute(module, str(node.target))
            if isinstance(value, torch.Tensor):
                stored[node] = value
        elif region_edge(node):
            continue
        elif traced and not node.users:
            silent.add(node)
        else:
            missing.append(node)
    if not missing:
        return known | stored
    inputs: list[Any] = []
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    if example_inputs is not None:
        pairs = zip(holders, example_inputs, strict=False)
        inputs = [value for holder, value in pairs if holder not in known]
    elif any(holder in missing for holder in holders):
        raise ModelError(
            f"the graph carries no shapes (first missing: node {missing[0].name!r}); pass "
            "example_inputs, for instance nmm_compiler.rewrite(graph, (torch.empty(4, 512),))"
        )
    return _Propagation(module, known, silent, inputs).values


class _Propagation(fx.Interpreter):
    """Computes the missing values on fake tensors, in the fake mode of the known ones.

    The mode has the shape environment of symbolic sizes, so that nothing is specialized. Edges of
    autocast and grad-mode regions are run too: dtypes depend on them.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        known: Mapping[fx.Node, Any],
        silent: Collection[fx.Node],
        inputs: Sequence[Any],
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = dict(known)
        self.silent = silent
        fake = (v for v in tree_leaves([*known.values(), *inputs]) if isinstance(v, FakeTensor))
        mode = next((v.fake_mode for v in fake), None)
        # Sizes that depend on data (x[mask]) become symbols of the environment.
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with self.mode, torch.no_grad():
            self.run(*map(self._fake, inputs), initial_env=dict(known))

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self.mode.from_tensor(value, static_shapes=True)
        if isinstance(value, nn.Parameter) and not isinstance(fake, nn.Parameter):
            fake.requires_grad_(value.requires_grad)
        return fake

    def run_node(self, node: fx.Node) -> Any:
        """Compute and keep the value of a node that is not known."""
        if node in self.silent:
            return None
        result = super().run_node(node)
        self.values[node] = result
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on fake buffers: batch norm counts its calls in one."""
        module = super().fetch_attr(target)
        buffers = {name: self._fake(value) for name, value in module.named_buffers()}
        if not buffers:
            return module(*args, **kwargs)
        return torch.func.functional_call(module, buffers, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        """Return parameters as fake tensors, other attributes as they are."""
        return self._fake(super().fetch_attr(target))
