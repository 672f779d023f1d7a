"""Pointwise operations between kernels: they work in either layout, so their values share one.

A region is a set of values connected by pointwise operations: results of calls, and the sums,
scales, activations and casts computed from them. All values of a region have one layout.
In "col" each operation is emitted again on [features, tokens] operands: a vector over the features
becomes [features, 1], a column over the tokens [1, tokens], a full operand from elsewhere is
transposed. An operation that is written [features, tokens] in the graph is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.chains.linear_map import is_whole_feature
from nmm_compiler.passes.chains.safety import real_users
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.emit.fused_calls import Call, settle
from nmm_compiler.passes.emit.operands import (
    Source,
    best_source,
    feature_axis,
    source_over_raw,
)
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Activation, Add, Cast, Scale, owner_of
from nmm_compiler.passes.graph.effects import ANYTHING
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dims

# The name under which faults of layouts are reported and pointwise operations are left alone.
LAYOUT = "layout"

# Element by element, with a form of its own or not; none draws random numbers.
_NAMES = frozenset(
    {"pow", "exp", "abs", "clamp", "sqrt", "square", "leaky_relu", "elu", "softplus", "erf", "mul",
     "div", "sub", "add", "maximum", "minimum", "where", "relu", "log_sigmoid", "selu", "tanh"}
)  # fmt: skip


@dataclass
class Reader:
    """The fields of a reader that `source_over_raw` needs: the value it reads and its
    dimensions."""

    source: Source


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
            raw = source_over_raw(c, made[0], Reader(Source(operand, dims, self.n)))
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


def readings(c: Canonical, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (the value or a view of it, a node that computes with it)."""
    queue = [node]
    while queue:
        value = queue.pop()
        for user in real_users(value):
            if c.is_view_of(user, value):
                queue.append(user)
            else:
                yield value, user


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
    raw = source_over_raw(c, made, Reader(Source(operand, user.operands[operand], user.n)))
    wanted = views.coalesce(user.col_dims()[1])
    return raw is not None and views.coalesce(raw.dims[1]) == wanted
