"""Layouts of the tensors between kernels: one assignment over all calls of a graph.

The result of a call is [tokens, features] ("row") or [features, tokens] ("col"), and the kernel
makes either at the same cost. A reader that needs the other order has a cost. TensorE contracts
over the partition axis, so a kernel that reads "row" transposes x while it loads it (DMA), and one
that reads "col" does not. A reader that is no kernel needs the order of the original graph, and
another order leaves a transpose in the graph (a round trip through HBM). Pointwise operations take
either order, so results and the values computed from them element by element share a layout
(`regions`). Two regions are connected only by calls, whose x and result have independent layouts,
so each region is minimized alone. Weights are passed as they are stored: their kernels take either
layout.

Explicit transposes count too: one before a call is a view that the call reads through, and the
kernel makes one after a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.linear_map import is_whole_feature
from nmm_compiler.passes.chains.safety import real_users
from nmm_compiler.passes.emit.fused_calls import Call
from nmm_compiler.passes.emit.operands import source_over_raw
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.layout.regions import (
    LAYOUT,
    Pointwise,
    Region,
    grow_regions,
    is_written,
    over_value,
    readings,
)
from nmm_compiler.passes.rules.base import Match

# Cost per element, in units of one element moved: x transposed by DMA while it is loaded, and a
# transpose of its own between kernels, which reads and writes HBM besides.
DMA_TRANSPOSE = 1
GRAPH_TRANSPOSE = 3
TRANSPOSES = frozenset({"permute", "transpose", "t", "T", "mT", "mH", "movedim"})


@dataclass(frozen=True)
class Choice:
    """The layout of one tensor, or of a region, and the costs of both layouts.

    node: the first call's result. through: pointwise operations that share the layout.
    """

    node: str
    layout: str
    row_cost: int
    col_cost: int
    through: int = 0

    def __str__(self) -> str:
        more = f", with {self.through} pointwise operations" if self.through else ""
        costs = f"row {self.row_cost}, col {self.col_cost} per token"
        return f"{self.node}: {self.layout} ({costs}{more})"


@dataclass(frozen=True)
class Layouts:
    """The choices that had an alternative, and the operations to emit again in another layout."""

    choices: list[Choice]
    turned: list[Pointwise]


def assign_layouts(c: Canonical, matches: list[Match]) -> Layouts:
    """Choose x_layout and out_layout of every call, and the layout of what lies between them."""
    calls = [m.data for m in matches if m.rewritten and isinstance(m.data, Call)]
    readers: dict[fx.Node, list[Call]] = {}
    for call in calls:
        if call.source.is_col():
            call.x_layout = "col"
        base = c.base(call.source.key)[0]
        if isinstance(base, fx.Node):
            readers.setdefault(base, []).append(call)
    for match in matches:
        call = match.data
        absorbs = match.rewritten and isinstance(call, Call) and call.is_whole
        if absorbs and call.final not in readers:
            with c.faults.guard("absorbing a transpose into", match.node, LAYOUT):
                _absorb_transpose(c, match)
    layouts = Layouts([], [])
    whole = [call for call in calls if call.is_whole]
    for region in grow_regions(c, [one for call in whole for one in call.results()]):
        # First decide, then change: after a fault the whole region stays in row order.
        with c.faults.guard("laying out", region.values[0].final, LAYOUT):
            decision = _decide(c, region, readers)
            if decision is not None:
                decision.carry_out(region, layouts)
    layouts.turned.sort(key=lambda made: c.effects.position[made.node])
    return layouts


@dataclass(frozen=True)
class _Decision:
    """The layout of a region; in "col" its readers of x, its direct views, and its unread values.

    direct and unread have one entry per value of the region.
    """

    choice: Choice
    turned_readers: list[Call]
    direct: list[tuple[tuple[fx.Node, Dims], ...]]
    unread: list[bool]

    def carry_out(self, region: Region, layouts: Layouts) -> None:
        """Give the region its layout."""
        layouts.choices.append(self.choice)
        if self.choice.layout == "row":
            return
        for reader in self.turned_readers:
            reader.x_layout = "col"
        for made, direct, unread in zip(region.values, self.direct, self.unread, strict=True):
            made.out_layout, made.direct, made.unread = "col", direct, unread
        layouts.turned.extend(region.pointwise)


def _decide(c: Canonical, region: Region, readers: dict[fx.Node, list[Call]]) -> _Decision | None:
    """Return the cheaper layout of a region, None where there is nothing to choose."""
    row = col = 0
    linked = [(made, reader) for made in region.values for reader in readers.get(made.final, [])]
    fitting = [(made, reader) for made, reader in linked if takes_col(c, made, reader)]
    for made, reader in linked:
        if (made, reader) not in fitting:
            col += GRAPH_TRANSPOSE * made.n
        elif isinstance(made, Call) or not is_col(made.out_dims, made.n):
            row += DMA_TRANSPOSE * made.n  # an operation written as [features, tokens] stays so
    outside = {made.final: _outside_reads(c, made, region, linked) for made in region.values}
    for made in region.values:
        for dims in dict(outside[made.final]).values():
            if is_col(dims, made.n):
                row += GRAPH_TRANSPOSE * made.n
            elif is_row(dims, made.n) or is_row(made.out_dims, made.n):
                col += GRAPH_TRANSPOSE * made.n
    own = {made.final for made in region.values}
    seen: set[fx.Node] = set()
    for operation in region.pointwise:
        for operand in filter(operation.is_full, operation.operands):
            base = c.base(operand)[0]
            if base in seen or not isinstance(base, fx.Node):
                continue
            turned = is_col(operation.out_dims, operation.n)
            if base in own:
                row += GRAPH_TRANSPOSE * operation.n * (turned and operand is not base)
                continue
            seen.add(base)
            if operation.source_of(c, operand).is_col():
                row += GRAPH_TRANSPOSE * operation.n * (not turned)
            else:
                col += GRAPH_TRANSPOSE * operation.n
    if not linked and not row:
        return None
    chosen = "col" if col < row and not is_written(c, own) else "row"
    choice = Choice(region.values[0].final.name, chosen, row, col, len(region.pointwise))
    direct, unread = [], []
    for made in region.values:
        reads = outside[made.final]
        turned_views = {v: d for v, d in reads if v is not made.final and is_col(d, made.n)}
        direct.append(tuple(turned_views.items()))
        met = all(v is not made.final and is_col(d, made.n) for v, d in reads)
        unread.append(met and all(entry in fitting for entry in linked if entry[0] is made))
    return _Decision(choice, [reader for _, reader in fitting], direct, unread)


def _outside_reads(
    c: Canonical, made: Call | Pointwise, region: Region, linked: list[tuple[Any, Call]]
) -> list[tuple[fx.Node, Dims]]:
    """Return the views of a value that others than its region and its calls read, with dims."""
    inside = {n for value, call in linked if value is made for n in call.covered}
    operations = {operation.node: operation for operation in region.pointwise}
    found = []
    for value, user in readings(c, made.final):
        operation = operations.get(user)
        if user in inside or (operation is not None and operation.is_full(value)):
            continue
        storages = c.effects.storages
        if user.op == "output" and storages(value) & storages(made.final):
            # That reader depends on strides: the view stays, in the value's memory. A copy has its
            # own.
            found.append((made.final, made.out_dims))
            continue
        dims = over_value(c, made, value)
        found.append((value, made.out_dims if dims is None else dims))
    return found


def is_row(dims: Dims, n: int) -> bool:
    """Return whether the last dimension is the features."""
    return bool(dims) and is_whole_feature(dims[-1], n)


def is_col(dims: Dims, n: int) -> bool:
    """Return whether the value is [features, tokens] with nothing before the features."""
    real = [d for d in dims if d]
    return len(real) >= 2 and n > 1 and is_whole_feature(real[0], n)


def takes_col(c: Canonical, made: Call | Pointwise, reader: Call) -> bool:
    """Return whether a reader can take a result as [features, tokens], as it is."""
    return source_over_raw(c, made, reader) is not None


def _absorb_transpose(c: Canonical, match: Match) -> None:
    """Make the result transposed where only a transpose of it is read."""
    call: Call = match.data
    if call.many or is_row(call.out_dims, call.n):
        return
    node = call.final
    passed: list[fx.Node] = []
    while True:
        users = real_users(node)
        if len(users) != 1 or not c.is_view_of(users[0], node):
            return
        node = users[0]
        passed.append(node)
        if any(user.op == "output" for user in node.users):
            return  # the caller gets a transposed view, which costs nothing
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
    """Return the transposes in a graph that move an activation's data.

    A transposed view that is only returned moves no data: the caller gets its strides.
    """
    count = 0
    for node in c.graph.nodes:
        if all(user.op == "output" for user in node.users):
            continue
        name = target_name(node)
        if name == "getattr" and len(node.args) > 1:
            name = str(node.args[1])
        if name not in TRANSPOSES or node in c.constant or node in c.derived:
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
