"""Checks after each step of the pipeline; each raises ValueError that says what is wrong.

A check that raises shows a fault of this package: a careful attempt follows, and if that fails, the
graph is not rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.errors import BrokenRuleError
from nmm_compiler.passes.attempt import Attempt
from nmm_compiler.passes.emit.fused_calls import Call
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical_forms import Leaf
from nmm_compiler.passes.layout.regions import Pointwise


def every_node_is_read(attempt: Attempt) -> None:
    """Every node has a form, or is a view of a value that has one."""
    c = attempt.c
    for node in c.graph.nodes:
        if node not in c.views or c.views[node][0] not in c.forms:
            raise ValueError(f"node {node.name} has neither a form nor a view")


def matches_are_apart(attempt: Attempt) -> None:
    """No two matches take over the same node; constants may be shared."""
    c = attempt.c
    owners: dict[fx.Node, Any] = {}
    for match in attempt.matches:
        for node in match.nodes if match.rewritten else ():
            if c.is_weight(node) or isinstance(c.forms.get(node), Leaf):
                continue
            other = owners.setdefault(node, match)
            if other is not match:
                both = f"{match} and {other} both take over node {node.name}"
                if not attempt.built_in:
                    raise BrokenRuleError(attempt.rules[0].name, node.name, both)
                raise ValueError(both)


def _calls(attempt: Attempt) -> Iterator[Call]:
    for match in attempt.matches:
        if match.rewritten and isinstance(match.data, Call):
            yield match.data


def layouts_agree(attempt: Attempt) -> None:
    """A call that reads [features, tokens] gets such a result; only those have transposed
    readers."""
    results: list[Call | Pointwise] = [r for call in _calls(attempt) for r in call.results()]
    results += attempt.turned
    made: dict[Any, Call | Pointwise] = {one.final: one for one in results}
    for one in results:
        if one.out_layout == "row" and (one.direct or one.unread):
            raise ValueError(f"{one.final.name} is [tokens, features] and read as the transpose")
    for call in _calls(attempt):
        if not call.is_whole and (call.out_layout != "row" or call.direct or call.unread):
            raise ValueError(f"{call.final.name} is turned, and changed outside of its kernel")
        source = made.get(attempt.c.base(call.source.key)[0])
        given = call.source.is_col() or (source is not None and source.out_layout == "col")
        if call.x_layout == "col" and not given:
            raise ValueError(f"{call.final.name} reads x as the transpose that nothing makes")


def values_agree(attempt: Attempt) -> None:
    """The replacement of a value has its dtype and rank, and its sizes where both are numbers."""
    values = attempt.c.values
    for old, new in attempt.editor.replaced.items():
        was, now = values.get(old), values.get(new)
        if was is None or now is None or not hasattr(was, "dtype"):
            continue
        pairs = zip(views.sizes_of(was), views.sizes_of(now), strict=False)
        same = all(a == b for a, b in pairs if views.is_static(a) and views.is_static(b))
        if was.dtype != now.dtype or was.dim() != now.dim() or not same:
            raise ValueError(
                f"{new.name} is {now.dtype} {list(now.shape)} in place of {old.name}, "
                f"{was.dtype} {list(was.shape)}"
            )


def added_nodes_are_read(attempt: Attempt) -> None:
    """Every node that a rewrite added has a value and a reader."""
    for node in attempt.editor.added:
        if node.graph is not attempt.module.graph or node._erased:
            continue
        if node not in attempt.c.values:
            raise ValueError(f"the new node {node.name} has no value")
        if not node.users and attempt.built_in:
            raise ValueError(f"nothing reads the new node {node.name}")
