"""Layouts of the tensors between kernels: one assignment over all calls of a graph.

A tensor that a call makes can lie as [tokens, features] ("row") or [features, tokens] ("col");
either costs the kernel nothing. What costs is a reader that wants the other one. TensorE contracts
over the partition axis, so a kernel that reads "row" transposes x while it loads it (DMA), one that
reads "col" does not; a reader outside wants the order the graph gave it, and another order leaves a
transpose in the graph (a round trip through HBM). Every tensor has one producer and its costs add
up over readers, so the cheapest layout of each tensor is the cheapest assignment. Weights are
handed over as they are stored: their kernels take either layout.

Explicit transposes count too: one before a call is a view that the call looks through, and one
after a call moves into the call's result.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes import views
from nmm_compiler.passes.calls import Call
from nmm_compiler.passes.canonicalize import Canonical
from nmm_compiler.passes.match.base import Match
from nmm_compiler.passes.match.obstacles import real_users
from nmm_compiler.passes.match.stages import is_whole_feature
from nmm_compiler.passes.spellings import target_name
from nmm_compiler.passes.views import Dims

# Cost per element, in units of one element moved: x transposed by DMA while it is loaded, and a
# transpose of its own between kernels, which reads and writes HBM besides.
DMA_TRANSPOSE = 1
GRAPH_TRANSPOSE = 3
TRANSPOSES = frozenset({"permute", "transpose", "t", "T", "mT", "mH", "movedim"})


@dataclass(frozen=True)
class Choice:
    """The layout of one tensor and what either layout would have cost."""

    node: str
    layout: str
    row_cost: int
    col_cost: int

    def __str__(self) -> str:
        return f"{self.node}: {self.layout} (row {self.row_cost}, col {self.col_cost} per token)"


def assign_layouts(c: Canonical, matches: list[Match]) -> list[Choice]:
    """Choose x_layout and out_layout of every call; return the choices that had an alternative."""
    calls = [m.data for m in matches if m.rewritten and isinstance(m.data, Call)]
    readers: dict[fx.Node, list[Call]] = {}
    for call in calls:
        if call.source.is_col():
            call.x_layout = "col"
        base = c.base(call.source.key)[0]
        if isinstance(base, fx.Node):
            readers.setdefault(base, []).append(call)
    for match in matches:
        if match.rewritten and isinstance(match.data, Call) and match.data.final not in readers:
            _absorb_transpose(c, match)
    choices = []
    for call in calls:
        if call.many:
            continue  # its results keep the order of tokens that the graph gave them
        linked = readers.get(call.final, [])
        row = col = 0
        for reader in linked:
            if takes_col(c, call, reader):
                row += DMA_TRANSPOSE * call.n
            else:
                col += GRAPH_TRANSPOSE * call.n
        other = _has_other_reader(c, call, linked)
        if other:
            if is_col(call.out_dims, call.n):
                row += GRAPH_TRANSPOSE * call.n
            elif is_row(call.out_dims, call.n):
                col += GRAPH_TRANSPOSE * call.n
        if not linked and not row:
            continue
        call.out_layout = "col" if col < row else "row"
        if call.out_layout == "col":
            for reader in linked:
                if takes_col(c, call, reader):
                    reader.x_layout = "col"
            call.unread = not other and all(r.x_layout == "col" for r in linked)
        choices.append(Choice(call.final.name, call.out_layout, row, col))
    return choices


def is_row(dims: Dims, n: int) -> bool:
    """Say whether the last dimension is the features."""
    return bool(dims) and is_whole_feature(dims[-1], n)


def is_col(dims: Dims, n: int) -> bool:
    """Say whether the value is [features, tokens] with nothing before the features."""
    real = [d for d in dims if d]
    return len(real) >= 2 and n > 1 and is_whole_feature(real[0], n)


def takes_col(c: Canonical, call: Call, reader: Call) -> bool:
    """Say whether a reader can take the call's result as [features, tokens], as it is."""
    from nmm_compiler.passes.sources import source_over_raw

    return source_over_raw(c, call, reader) is not None


def _has_other_reader(c: Canonical, call: Call, linked: list[Call]) -> bool:
    """Say whether anything but the linked calls reads the call's result, through views."""
    own = {n for other in linked for n in other.covered}
    queue = [call.final]
    while queue:
        for user in real_users(queue.pop()):
            if user in own:
                continue
            if user in c.sources and user not in own:
                queue.append(user)
            else:
                return True
    return False


def _absorb_transpose(c: Canonical, match: Match) -> None:
    """Let the result be what a transpose after the call makes of it, when only that is read."""
    call: Call = match.data
    if call.many or is_row(call.out_dims, call.n):
        return
    node = call.final
    passed: list[fx.Node] = []
    while True:
        users = real_users(node)
        if len(users) != 1 or users[0] not in c.sources or c.sources[users[0]] is not node:
            return
        node = users[0]
        passed.append(node)
        base, over = c.base(node)
        dims = views.compose(over, call.out_dims) if base is call.final else None
        if dims is None or any(a.axis == views.BROADCAST for d in dims for a in d):
            return
        if is_row(dims, call.n):
            call.final, call.out_dims = node, dims
            match.node = node
            match.nodes = match.nodes | frozenset(passed)
            call.covered = match.nodes
            return


def count_transposes(c: Canonical) -> int:
    """Return the transposes in a graph that move an activation's data."""
    count = 0
    for node in c.graph.nodes:
        name = target_name(node)
        if name == "getattr" and len(node.args) > 1:
            name = str(node.args[1])
        if name not in TRANSPOSES or not node.users or node in c.constant or node in c.derived:
            continue
        source = c.sources.get(node)
        over = None if source is None else c.base(source)
        if over is None or source is None:
            count += 1
            continue
        before = [a for d in c.views[source][1] for a in d]
        after = [a for d in c.views[node][1] for a in d]
        count += before != after
    return count
