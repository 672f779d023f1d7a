"""Layouts of the tensors between kernels.

The result of a call is [tokens, features] ("row") or [features, tokens] ("col"), and the kernel
makes either at the same cost. TensorE contracts over the partition axis, so a kernel that reads
"row" transposes x while it loads it, and one that reads "col" does not. So a result is "col" where
calls that can read it so are all that reads it, and where it is [features, tokens] in the graph.
Weights are passed as they are stored: their kernels take either layout.

An explicit transpose before a call is a view that the call reads through, and the kernel makes a
copy in another order that is all that reads the result.
"""

from __future__ import annotations

from torch import fx

from nmm_compiler.passes.chains.chain import is_whole_feature
from nmm_compiler.passes.chains.safety import readings, real_users
from nmm_compiler.passes.emit.calls import Call, source_over_raw
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Key
from nmm_compiler.passes.graph.read_graph import TURNED
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.rules.base import Match

# The name under which faults of layouts are reported.
LAYOUT = "layout"


def assign_layouts(c: Canonical, matches: list[Match]) -> None:
    """Choose out_layout of every call, and let those that read a turned result read it so.

    Raises ValueError for a result that is turned and that no kernel makes alone.
    """
    matches = [match for match in matches if isinstance(match.data, Call)]
    calls: list[Call] = [match.data for match in matches]
    readers: dict[Key, list[Match]] = {}
    for match, call in zip(matches, calls, strict=True):
        readers.setdefault(c.base(call.source.key)[0], []).append(match)
    for match, call in zip(matches, calls, strict=True):
        if call.is_whole and call.final not in readers:
            with c.faults.guard("absorbing a transpose into", match.node, LAYOUT):
                _absorb_transpose(c, match)
    for call in calls:
        for result in call.results() if call.is_whole else ():
            with c.faults.guard("laying out", result.final, LAYOUT):
                _decide(c, result, readers.get(result.final, []))
    for call in calls:
        if call.out_layout == "col" and not call.is_whole:
            raise ValueError(f"{call.final.name} is turned, and changed outside of its kernel")


def _decide(c: Canonical, result: Call, readers: list[Match]) -> None:
    """Choose the layout of a result that these calls read."""
    if c.effects.is_written(result.final):
        return
    fitting = [one for one in readers if source_over_raw(c, result, one.data.source) is not None]
    covered = {node for match in fitting for node in match.nodes}
    only_read_so = bool(fitting) and all(user in covered for _, user in readings(c, result.final))
    if only_read_so or is_col(result.out_dims, result.n):
        result.out_layout = "col"
        for reader in (match.data for match in fitting):
            reader.turned = True
            for one in (reader, *reader.members):  # each has token axes of its own
                one.source = source_over_raw(c, result, one.source) or one.source


def is_col(dims: Dims, n: int) -> bool:
    """Return whether the value is [features, tokens] with nothing before the features."""
    real = [d for d in dims if d]
    return len(real) >= 2 and n > 1 and is_whole_feature(real[0], n)


def _absorb_transpose(c: Canonical, match: Match) -> None:
    """Let the kernel make the copy in another order that is all that reads its result."""
    call: Call = match.data
    node, passed = call.final, list[fx.Node]()
    while not call.members:
        users = real_users(node)
        if len(users) != 1 or c.sources.get(users[0]) is not node:
            return
        node = users[0]
        passed.append(node)
        base, over = c.base(node)
        dims = views.compose(over, call.out_dims) if base is call.final else None
        if dims is None or any(a.axis == views.BROADCAST for d in dims for a in d):
            return
        if not c.effects.storages(node) & c.effects.storages(match.node):
            call.final, call.out_dims = node, dims
            match.node = node
            match.nodes |= frozenset(passed)
            return


def count_transposes(c: Canonical) -> int:
    """Return the transposes in a graph that move an activation's data."""
    return sum(_moves_data(c, node) for node in c.graph.nodes if target_name(node) in TURNED)


def _moves_data(c: Canonical, node: fx.Node) -> bool:
    """Return whether a transpose moves an activation's data.

    A view that is only returned moves none: the caller gets its strides.
    """
    returned = all(user.op == "output" for user in node.users)
    if returned or node in c.constant or node in c.derived:
        return False
    source = c.sources.get(node)
    before = None if source is None else [a for dim in c.views[source][1] for a in dim]
    return before != [a for dim in c.views[node][1] for a in dim]
