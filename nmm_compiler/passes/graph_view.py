"""The graph before and after a rewrite as pictures: one for each kind of match.

A model repeats its layers, so matches that differ only in their place share a picture. It shows the
nodes of a match with their inputs and readers, and the call that replaces them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import fx

from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.rules.base import Match, module_path
from nmm_compiler.report.graphs import GraphNode, graph
from nmm_compiler.report.parts import Drawing, Line, Part, Section
from nmm_compiler.report.text import counted

_TRANSPOSES = {"t", "transpose", "permute", "mT", "T", "swapaxes", "movedim", "adjoint"}
_MOST_NODES = 40
_MOST_PICTURES = 12


def graph_parts(
    original: fx.GraphModule, rewritten: fx.GraphModule, matches: Iterable[Match]
) -> list[Part]:
    """Return a section with the picture before and after for each kind of match."""
    groups: dict[tuple[str, str], list[Match]] = {}
    for match in matches:
        if match.rewritten:
            place = re.sub(r"\b\d+\b", "*", match.module or match.name)
            sizes = ", ".join(f"{k}={match.info[k]}" for k in "mkrn" if k in match.info)
            groups.setdefault((f"{match.kind} {sizes}", place), []).append(match)
    parts: list[Part] = []
    for (what, place), same in list(groups.items())[:_MOST_PICTURES]:
        before, after = _pictures(original, rewritten, same[0])
        times = f" x {len(same)}" if len(same) > 1 else ""
        parts.append(Section(f"{what} at {place}{times}", (before, after)))
    if len(groups) > _MOST_PICTURES:
        parts.append(Line(f"and {len(groups) - _MOST_PICTURES} more kinds of matches", "note"))
    return parts


def _pictures(
    original: fx.GraphModule, rewritten: fx.GraphModule, match: Match
) -> tuple[Drawing, Drawing]:
    old, new = (_inner(module, match.graph) for module in (original, rewritten))
    fused = {node.name for node in match.nodes}
    olds = {node.name: node for node in old.graph.nodes}
    news = {node.name: node for node in new.graph.nodes}
    shown = [olds[name] for name in fused if name in olds]
    calls = {name for name in match.added if name in news}
    before = _picture(old, shown, fused, "fused")
    after = _picture(new, [news[name] for name in calls], calls, "call")
    around = "with what they read and who reads them"
    texts = [
        f"{when}: {counted(len(nodes), 'node')}, {around}"
        for when, nodes in (("before", shown), ("after", calls))
    ]
    return graph(before, texts[0]), graph(after, texts[1])


def _inner(module: fx.GraphModule, path: str) -> fx.GraphModule:
    found: Any = module.get_submodule(path) if path else module
    return found if isinstance(found, fx.GraphModule) else module


def _picture(
    module: fx.GraphModule, centre: list[fx.Node], marked: set[str], kind: str
) -> list[GraphNode]:
    around = {n for node in centre for n in (node, *node.all_input_nodes, *node.users)}
    around = {node for node in around if node.op != "output"}
    shown = [node for node in module.graph.nodes if node in around][:_MOST_NODES]
    return [
        GraphNode(
            node.name,
            _what(node),
            tuple(n.name for n in node.all_input_nodes),
            kind if node.name in marked and not _turns(node) else
            "transpose" if _turns(node) else "",
            _stored_path(node),
        )
        for node in shown
    ]  # fmt: skip


def _turns(node: fx.Node) -> bool:
    name = node.args[1] if node.target is getattr else target_name(node)
    return name in _TRANSPOSES


def _stored_path(node: fx.Node) -> str:
    """Return the path of a parameter or buffer that is an input of the graph, else nothing.

    Dynamo names it l_self_modules_mlp_modules_up_parameters_weight_: mlp.up.weight.
    """
    parts = re.split(r"_(?:modules|parameters|buffers)_", str(node.target))
    if node.op != "placeholder" or len(parts) < 2:
        return ""
    return ".".join([*parts[1:-1], parts[-1].rstrip("_")])


def _what(node: fx.Node) -> str:
    """Return what a node computes and the shape of its value, in few words."""
    value: Any = node.meta.get("example_value", node.meta.get("val"))
    shape = f" [{', '.join(map(str, value.shape))}]" if hasattr(value, "shape") else ""
    name = target_name(node) or str(getattr(node.target, "__name__", node.target))
    if node.op in ("placeholder", "get_attr"):
        stored = node.op == "get_attr" or _stored_path(node)
        return ("parameter" if stored else "input") + shape
    elif node.op == "call_module":
        name = f"module {node.target}"
    where = module_path(node)
    return f"{name}{shape}" + (f"  in {where}" if where else "")
