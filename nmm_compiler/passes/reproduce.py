"""Writes a match, or a graph that meets a fault, as a Python program to be attached to an issue.

The nodes that the match took over become a function. The tensors that they read become its
arguments: shapes, strides and dtypes are those of the graph, the numbers are random, so that the
program holds no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.graph.canonical import Diagonal, owner_of
from nmm_compiler.passes.graph.capture import collect_values
from nmm_compiler.passes.graph.effects import fetch_attribute
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.rules.base import Match
from nmm_compiler.version import VERSION

_PROGRAM = '''"""{title} Written by nmm_compiler {version}."""

import torch
import torch.fx
from torch import device, inf, nan, tensor
from torch._dynamo.testing import rand_strided

import nmm_compiler as nmm

{module}

torch.manual_seed(0)
inputs = (
    {inputs},
)
{ending}
'''
_OF_A_MATCH = """graph = torch.fx.symbolic_trace(Repro().train({training}))
result = nmm.rewrite(graph, inputs, options={{"target": {target!r}}})
print(result)
print(result.diff())
print(f"largest error: {{result.check(*inputs):.3f}} of what rounding explains")
raise SystemExit(not any(match.rule == {rule!r} for match in result.matches))"""
_OF_A_FAULT = """options = {{"inner": "eager", "strict": True, "target": {target!r}}}
with torch.no_grad():
    torch.compile(Repro(), backend="nmm", options=options)(*inputs)
print("no fault")"""


def _program(title: str, module: fx.GraphModule, inputs: Any, ending: str) -> str:
    """Return a program that makes a module and random inputs for it, and what it does with them."""
    from torch._dynamo.debug_utils import NNModuleToString  # loads Dynamo's own tests

    return _PROGRAM.format(
        title=title, version=VERSION, ending=ending,
        module=NNModuleToString.convert(module).strip(),
        inputs=",\n    ".join(map(literal, inputs)),
    )  # fmt: skip


def fault_command(module: fx.GraphModule, inputs: Sequence[Any] | None, target: str) -> str:
    """Write a program that compiles a graph alone under strict; return how to run it."""
    ending = _OF_A_FAULT.format(target=target)
    try:
        text = _program("A fault: running this shows it.", module, inputs, ending)
        with tempfile.NamedTemporaryFile(
            "w", prefix="nmm_fault_", suffix=".py", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except Exception:  # no inputs, no text, or no place for it: run the user's own program
        return "your program with options={'strict': True}"
    return f"python {file.name}"


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
    # Rules look through views: two transposes of one tensor are one tensor to them. A diagonal
    # matrix is no matrix of random numbers.
    names = {node.name for node in match.nodes}
    own = [node for node in inner.graph.nodes if node.name in names]
    read_by = {one for node in own for one in node.all_input_nodes}
    viewed = {owner_of(key) for one in read_by for key in canonical.through(one)}
    diagonal = {n for n in read_by | viewed if isinstance(canonical.forms.get(n), Diagonal)}
    both = {*own, *viewed, *diagonal}
    nodes = [n for n in inner.graph.nodes if n in both and n.op.startswith("call")]
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
    piece.output(tuple(copies[n] for n in nodes if n.name == match.name or n in read_behind))
    called = {copies[n]: fetch_attribute(inner, str(n.target)) for n in nodes
              if n.op == "call_module"}  # fmt: skip
    for copy in called:
        copy.target = copy.name  # a path, "layers.0.up", cannot be written down as one module
    program = fx.GraphModule({copy.name: one for copy, one in called.items()}, piece)
    where = f" in {match.module}" if match.module else ""
    title = f"{match}{where}, alone, with random numbers. It ends with 1 where nothing is found."
    training = any(one.training for one in called.values())
    ending = _OF_A_MATCH.format(training=training, target=target, rule=match.rule)
    return _program(title, program, (values[node] for node in read), ending)


def literal(value: Any) -> str:
    """Return Python code for an input like this one: its shape and dtype, with random numbers."""
    if isinstance(value, torch.Tensor):
        size, stride = ([_number(n) for n in part] for part in (value.shape, value.stride()))
        return f"rand_strided({size}, {stride}, {value.dtype})"
    return repr(_number(value) if isinstance(value, torch.SymInt) else value)


def _number(size: Any) -> int:
    """Return a size; one that depends on data counts as 4."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 4
    return int(size)
