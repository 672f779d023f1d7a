"""Writes a match as a Python script, to be attached to an issue.

The nodes that the match took over become a function. The tensors that they read become its
arguments: shapes, strides and dtypes are those of the graph, the numbers are random, so that the
script holds no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._dynamo.debug_utils import NNModuleToString

from nmm_compiler.passes.faults import literal
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.effects import fetch_attribute
from nmm_compiler.passes.graph.metadata import collect_values
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.rules.base import Match
from nmm_compiler.version import VERSION

_SCRIPT = '''"""{match}{where}, alone, with random numbers.

Written by nmm_compiler {version}. It ends with 1 where the match is not found, and raises where the
rewritten graph computes something else. A rule of your own has to be passed as rules=[...].
"""

import torch
import torch.fx
from torch import device, inf, nan, tensor

import nmm_compiler as nmm

{module}

torch.manual_seed(0)
inputs = (
    {inputs},
)
graph = torch.fx.symbolic_trace(Repro().train({training}))
result = nmm.rewrite(graph, inputs, options={{"target": {target!r}}})
print(result)
print(result.diff())
print(f"largest error: {{result.check(*inputs):.3f}} of what rounding explains")
raise SystemExit(not any(match.rule == {rule!r} for match in result.matches))
'''


def reproducer(
    module: fx.GraphModule, match: Match, inputs: Sequence[Any] | None, target: str
) -> str:
    """Return a script that rewrites the nodes of one match alone and checks the results.

    module: the graph before the rewrite. inputs: example inputs, for a graph without shapes; raises
    ModelError for such a graph without them.
    """
    inner: Any = module.get_submodule(match.graph) if match.graph else module
    values = collect_values(inner, inputs)
    canonical = read_graph(inner, values)
    nodes = _with_views(canonical, {node.name for node in match.nodes})
    taken = set(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in taken)
    piece = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in read:
        stored = canonical.is_weight(node) and not canonical.inputs_are_weights
        # `read_graph` reads an argument with this prefix as a parameter.
        copies[node] = piece.placeholder(("p_" if stored else "") + node.name)
    for node in nodes:
        copies[node] = piece.node_copy(node, lambda n: copies[n])
    # assertions of torch.export have no readers
    read_behind = {n for n in nodes if any(u.op == "output" or u.users for u in {*n.users} - taken)}
    kept = [n for n in nodes if n.name == match.name or n in read_behind]
    results = tuple(copies[n] for n in kept)
    piece.output(results[0] if len(results) == 1 else results)
    called = {copies[n]: fetch_attribute(inner, str(n.target)) for n in nodes
              if n.op == "call_module"}  # fmt: skip
    for copy in called:
        copy.target = copy.name  # a path, "layers.0.up", cannot be written down as one module
    made = fx.GraphModule({copy.name: one for copy, one in called.items()}, piece)
    return _SCRIPT.format(
        match=match, version=VERSION, rule=match.rule, target=target,
        where=f" in {match.module}" if match.module else "",
        training=any(one.training for one in called.values()),
        module=NNModuleToString.convert(made).strip(),
        inputs=",\n    ".join(literal(values[node]) for node in read),
    )  # fmt: skip


def _with_views(canonical: Canonical, names: set[str]) -> list[fx.Node]:
    """Return the calls of these names and the views that they read, in order.

    Rules look through views: two transposes of one tensor are one tensor to them.
    """
    taken: set[fx.Node] = set()
    for node in reversed(canonical.graph.nodes):
        is_view = canonical.views.get(node, (node, ()))[0] is not node
        read = any(reader in taken for reader in node.users)
        if node.op.startswith("call") and (node.name in names or (is_view and read)):
            taken.add(node)
    return [node for node in canonical.graph.nodes if node in taken]
