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

A region is a set of values connected by pointwise operations: results of calls, and the sums,
scales, activations and casts computed from them. In "col" each operation is emitted again on
[features, tokens] operands: a vector over the features becomes [features, 1], a column over the
tokens [1, tokens], a full operand from elsewhere is transposed. An operation that is written
[features, tokens] in the graph is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import is_whole_feature
from nmm_compiler.passes.chains.safety import readings, real_users
from nmm_compiler.passes.emit.calls import (
    Call,
    Source,
    best_source,
    feature_axis,
    settle,
    source_over_raw,
)
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    Scale,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.graph.effects import ANYTHING
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dims
from nmm_compiler.passes.rules.base import Match

# The name under which faults of layouts are reported and pointwise operations are left alone.
LAYOUT = "layout"

# Element by element, with a form of its own or not; none draws random numbers.
_NAMES = frozenset(
    {"pow", "exp", "abs", "clamp", "sqrt", "square", "leaky_relu", "elu", "softplus", "erf", "mul",
     "div", "sub", "add", "maximum", "minimum", "where", "relu", "log_sigmoid", "selu", "tanh"}
)  # fmt: skip


@dataclass
class Pointwise:
    """An operation of a region; token axis i of its dims is its own dimension i.

    operands: each tensor it reads, as dims over its axes. inside: intermediate values of the calls,
    which no other node may read. Layout fields as in `Call`.
    """

    node: fx.Node
    n: int
    out_dims: Dims
    lead: Dims
    operands: dict[fx.Node, Dims]
    inside: frozenset[fx.Node] = frozenset()
    out_layout: str = "row"
    unread: bool = False
    direct: tuple[tuple[fx.Node, Dims], ...] = ()

    @property
    def final(self) -> fx.Node:
        """Return the node whose value this is."""
        return self.node

    def is_full(self, operand: fx.Node) -> bool:
        """Return whether an operand varies along features and tokens."""
        return self.operands.get(operand) == self.out_dims

    def source_of(self, c: Canonical, operand: fx.Node) -> Source:
        """Return the best source of a full operand from outside the region."""
        dims = self.operands[operand]
        source = best_source(c, operand, dims, self.n, self.node)
        return Source(operand, dims, self.n) if source.key in self.inside else source

    def col_dims(self) -> Dims:
        """Return the dimensions of the value as [features, tokens]."""
        return (feature_axis(self.n), tuple(a for d in self.lead for a in d))

    def replace(self, c: Canonical, editor: Editor) -> None:
        """Emit the operation; its readers read the new value."""
        new = self.emit(c, editor)
        if not self.unread:
            editor.replace(self.node, new)

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the operation on [features, tokens] operands; return what replaces its value."""
        new = {a: self._operand(c, editor, a) for a in self.operands}
        full = next(new[a] for a in self.operands if self.is_full(a))
        value = editor.c.values[full].new_empty(
            editor.c.values[full].shape, dtype=editor.c.values[self.node].dtype
        )
        y = editor.again(self.node, new, value)
        editor.raw[self.node] = (self, y)
        return settle(self, editor, y, self.node, self.col_dims(), self.out_dims)

    def _operand(self, c: Canonical, editor: Editor, operand: fx.Node) -> fx.Node:
        dims = self.operands[operand]
        if not any(dims):  # one element; a tensor of no dimensions promotes dtypes differently
            return editor.reshape(editor.node(operand), (1, 1) if dims else ())
        has_features = any(a.axis == FEATURE for d in dims for a in d)
        has_tokens = any(a.axis != FEATURE for d in dims for a in d)
        want = self.col_dims()
        want = (want[0] if has_features else (), want[1] if has_tokens else ())
        made = editor.raw.get(owner_of(c.base(operand)[0]))
        if made is not None and made[0].out_layout == "col" and self.is_full(operand):
            raw = source_over_raw(c, made[0], Source(operand, dims, self.n))
            if raw is not None:
                return editor.arrange(made[1], raw.dims, want)
        if self.is_full(operand):
            source = self.source_of(c, operand)
            return editor.arrange(editor.node(source.key), source.dims, want)
        return editor.arrange(editor.node(operand), dims, want)


@dataclass
class Region:
    """Values that share a layout: results of calls, and pointwise operations."""

    calls: list[Call]
    pointwise: list[Pointwise]

    @property
    def values(self) -> list[Call | Pointwise]:
        """Return both kinds."""
        return [*self.calls, *self.pointwise]


def grow_regions(c: Canonical, calls: list[Call]) -> list[Region]:
    """Return the regions around the results of calls, in the order of the graph."""
    covered = {n for call in calls for n in call.covered}
    inside = frozenset(covered - {call.final for call in calls})
    made: dict[fx.Node, Call | Pointwise] = {}
    above: dict[fx.Node, fx.Node] = {}

    def top(node: fx.Node) -> fx.Node:
        while above.get(node, node) is not node:
            node = above[node]
        return node

    queue: list[Call | Pointwise] = []
    for call in calls:
        made[call.final] = call
        queue.append(call)
    for value in queue:
        for operand, user in readings(c, value.final):
            if user in covered or user in c.effects.writers:
                continue
            known = made.get(user)
            found = None
            with c.faults.guard("reading the region of", user, LAYOUT):
                read = known if known is not None else _read(c, value, operand, user)
                if isinstance(read, Pointwise) and _reads_raw(c, value, read, operand):
                    found = read
            if found is None or c.faults.is_dropped(LAYOUT, user.name):
                continue
            above[top(user)] = top(value.final)
            if known is None:
                found.inside = inside
                made[user] = found
                queue.append(found)
    regions: dict[fx.Node, Region] = {}
    for node, value in made.items():
        region = regions.setdefault(top(node), Region([], []))
        if isinstance(value, Call):
            region.calls.append(value)
        else:
            region.pointwise.append(value)
    return list(regions.values())


def is_written(c: Canonical, nodes: Iterable[fx.Node]) -> bool:
    """Return whether anything in the graph may write into the memory of the values."""
    if not c.effects.writes:
        return False
    touched = frozenset(ANYTHING).union(*(c.effects.storages(n) for n in nodes))
    return any(write.storages & touched for write in c.effects.writes)


def over_value(c: Canonical, made: Call | Pointwise, value: fx.Node) -> Dims | None:
    """Return a view of a result as dims over the result's tokens and features."""
    return views.compose(c.base(value)[1], made.out_dims)


def _read(
    c: Canonical, made: Call | Pointwise, operand: fx.Node, user: fx.Node
) -> Pointwise | None:
    """Read a user of a result as a pointwise operation of its region; None when it is none."""
    form = c.forms.get(user)
    if not isinstance(form, (Scale, Add, Activation, Cast)) and target_name(user) not in _NAMES:
        return None
    if isinstance(form, Scale) and isinstance(form.factor, Virtual):
        return None  # a product with a diagonal matrix, an einsum
    shape, seen = c.shape(user), over_value(c, made, operand)
    if seen is None or not shape or user in c.virtuals or c.shape(operand) != shape:
        return None
    places = [i for i, dim in enumerate(seen) if any(a.axis == FEATURE for a in dim)]
    if len(places) != 1 or places[0] not in (0, len(shape) - 1):
        return None
    (feature,) = places
    if not is_whole_feature(seen[feature], made.n):
        return None
    dims = tuple(
        () if size == 1 else (Atom(FEATURE if i == feature else i, size, 1),)
        for i, size in enumerate(shape)
    )
    lead = tuple(dim for i, dim in enumerate(dims) if i != feature)
    tokens = sum(bool(dim) for dim in lead)
    if not tokens or (feature == 0 and len(shape) != 2):
        return None
    operands: dict[fx.Node, Dims] = {}
    # A cast may take its dtype from another tensor (`y.type_as(w)`), which is no operand.
    for node in (owner_of(form.value),) if isinstance(form, Cast) else user.all_input_nodes:
        own = c.shape(node)
        if own is None or len(own) > len(shape):
            return None
        aligned: list[views.Dim] = []
        for size, whole, dim in zip(
            own, shape[len(shape) - len(own) :], dims[len(shape) - len(own) :], strict=True
        ):
            if size not in (1, whole):
                return None
            aligned.append(() if size == 1 else dim)
        varying = sum(1 for d in aligned if d and d[0].axis != FEATURE)
        if varying not in (0, tokens):
            return None
        operands[node] = tuple(aligned)
    return Pointwise(user, made.n, dims, lead, operands)


def _reads_raw(c: Canonical, made: Call | Pointwise, user: Pointwise, operand: fx.Node) -> bool:
    """Return whether an operation can take a result as [features, tokens], as it is."""
    if not user.is_full(operand) or user.n != made.n:
        return False
    raw = source_over_raw(c, made, Source(operand, user.operands[operand], user.n))
    wanted = views.coalesce(user.col_dims()[1])
    return raw is not None and views.coalesce(raw.dims[1]) == wanted


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


def assign_layouts(c: Canonical, matches: list[Match]) -> tuple[list[Choice], list[Pointwise]]:
    """Choose x_layout and out_layout of every call, and the layout of what lies between them.

    Return the choices that had an alternative, and the operations to emit again in another layout.
    """
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
    choices: list[Choice] = []
    turned: list[Pointwise] = []
    whole = [call for call in calls if call.is_whole]
    for region in grow_regions(c, [one for call in whole for one in call.results()]):
        with c.faults.guard("laying out", region.values[0].final, LAYOUT):
            choice = _decide(c, region, readers)
            choices += [] if choice is None else [choice]
            if choice is not None and choice.layout == "col":
                turned += region.pointwise
    return choices, sorted(turned, key=lambda made: c.effects.position[made.node])


def _decide(c: Canonical, region: Region, readers: dict[fx.Node, list[Call]]) -> Choice | None:
    """Give a region its cheaper layout and return it; None where there is nothing to choose."""
    row = col = 0
    linked = [(made, reader) for made in region.values for reader in readers.get(made.final, [])]
    fitting = [(m, one) for m, one in linked if source_over_raw(c, m, one.source) is not None]
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
    changes = []  # first decide, then change: after a fault the whole region stays in row order
    for made in region.values if chosen == "col" else ():
        reads = outside[made.final]
        direct = {v: d for v, d in reads if v is not made.final and is_col(d, made.n)}
        met = all(v is not made.final and is_col(d, made.n) for v, d in reads)
        unread = met and all(entry in fitting for entry in linked if entry[0] is made)
        changes.append((made, tuple(direct.items()), unread))
    for made, views_of_it, unread in changes:
        made.out_layout, made.direct, made.unread = "col", views_of_it, unread
    for _, reader in fitting if chosen == "col" else ():
        reader.x_layout = "col"
    return choice


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
