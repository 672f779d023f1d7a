"""Effects that a moved computation must not cross: writes, aliases, and the edges of regions.

A fused call runs at the place of the last node of its chain, so it crosses everything between the
first node and that place. Aliases are found by the storages of the metadata tensors, which every
view operation keeps. An unknown Python callable counts as a writer of all its arguments.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from nmm_compiler.passes.graph.torch_names import is_inplace_name, named_arguments, target_name

# The storage identity of unknown memory.
ANYTHING = frozenset((0,))
_FUNCTORCH = re.compile(
    "_increment_nesting|_decrement_nesting|_add_batch_dim|_remove_batch_dim|_wrap_for_grad|"
    "_unwrap_for_grad|_make_dual|_unpack_dual|enter_dual_level|exit_dual_level|_jvp"
)
_ENTERS = re.compile("_increment_nesting|enter_dual_level")
_LEAVES = re.compile("_decrement_nesting|exit_dual_level")
_REGION_PREFIXES = ("_enter_", "_exit_", "_set_", "set_grad_enabled", "lazy_load_decompositions")


def storages_of(value: Any) -> frozenset[int]:
    """Return identities of the storages behind a metadata value, containers included."""
    if isinstance(value, torch.Tensor):
        try:
            return frozenset((value.untyped_storage()._cdata,))
        except (NotImplementedError, RuntimeError):  # subclasses and sparse tensors have none
            return frozenset((id(value),))
    parts = value if isinstance(value, (tuple, list)) else ()
    return frozenset().union(*map(storages_of, parts))


def is_pure(node: Node, effects: Effects) -> bool:
    """Return whether a node computes its value and does nothing else."""
    stored = node.op == "get_attr"
    return not (stored or node in effects.writers or node.is_impure() or region_edge(node))


def _function_name(node: Node) -> str:
    """Return the name that a called function has in Python, "" for other nodes."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if isinstance(name, str) else ""


def region_edge(node: Node) -> str:
    """Return the name of the mode (autocast, grad mode, ...) that the node enters or leaves, or of
    its step of a functorch transform (vmap, grad, jvp); "" for other nodes."""
    short = _function_name(node)
    is_edge = short.startswith(_REGION_PREFIXES) or _FUNCTORCH.search(short)
    return short if is_edge and not isinstance(node.target, torch._ops.OpOverload) else ""


def fetch_attribute(root: nn.Module, target: str) -> Any:
    """Return the attribute at a dotted path, None when it is not there."""
    try:
        return operator.attrgetter(target)(root)
    except AttributeError:
        return None


def upstream(nodes: Iterable[Node], stops: Collection[Any] = ()) -> list[Node]:
    """Return nodes and all that they are computed from, but for `stops` and what is behind them."""
    queue = list(dict.fromkeys(nodes))
    seen = {*queue, *stops}
    for node in queue:
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        queue += new
    return queue


def written_arguments(node: Node, root: nn.Module) -> list[Node]:
    """Return the argument nodes whose memory the node may write."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    inputs = node.all_input_nodes
    if node.op == "call_module":
        module = fetch_attribute(root, str(node.target))
        if node.target == "_guards_fn":  # asserts what Dynamo guards
            return []
        if isinstance(module, GraphModule):
            return inputs if graph_writes(module) else []
        known = type(module).__module__.startswith("torch.nn.modules")
        return inputs if not known or getattr(module, "inplace", False) else []
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        held = (fetch_attribute(root, str(n.target)) for n in inputs if n.op == "get_attr")
        bodies = [body for body in held if isinstance(body, GraphModule)]
        return [] if bodies and not any(map(graph_writes, bodies)) else inputs
    name = target_name(node)
    if name is None:
        return inputs
    given = named_arguments(node)
    written = [given.get("out")]
    if isinstance(target, torch._ops.OpOverload):
        written = [given.get(one.name) for one in target._schema.arguments if one.is_write]
    elif is_inplace_name(name) or given.get("inplace") is True:  # `_foreach_add_` takes a list
        written.insert(0, node.args[0] if node.args else node.kwargs.get("input"))
    elif given.get("training", given.get("use_input_stats", name == "instance_norm")):
        written += [given.get("running_mean"), given.get("running_var")]
    return [one for one in pytree.tree_leaves(written) if isinstance(one, Node)]


def graph_writes(module: GraphModule) -> bool:
    """Return whether any node of the graph, or of a graph inside it, may write into a tensor."""
    return any(written_arguments(node, module) for node in module.graph.nodes)


class Effects:
    """Positions, storages, writes and region edges of one graph, computed in one sweep.

    writers: the storages that each node may write to, by identity. edges: nodes at the edge of a
    region. transformed: nodes inside of a functorch transform.
    """

    def __init__(self, module: GraphModule, values: dict[Node, Any]) -> None:
        self.position = {node: position for position, node in enumerate(module.graph.nodes)}
        self.edges = [node for node in self.position if region_edge(node)]
        self.writers: dict[Node, frozenset[int]] = {}
        self.transformed: set[Node] = set()
        self._values, depth = values, 0
        for node in self.position:
            short = _function_name(node)
            depth += bool(_ENTERS.search(short)) - bool(_LEAVES.search(short))
            if depth > 0:
                self.transformed.add(node)
            written = written_arguments(node, module)
            if written:
                each = (self.storages(one) or ANYTHING for one in written)
                self.writers[node] = frozenset().union(*each)

    def storages(self, node: Node) -> frozenset[int]:
        """Return the identities of the storages that the node's value lives in."""
        return storages_of(self._values.get(node))

    def is_written(self, *nodes: Node) -> bool:
        """Return whether anything in the graph writes the memory that a value of these lives in."""
        own = ANYTHING.union(*map(self.storages, nodes)) if self.writers else frozenset()
        return any(storages & own for storages in self.writers.values())
