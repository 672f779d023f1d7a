"""The editor, which alone changes a graph: it adds nodes, with metadata, behind a node.

Every new node gets the metadata of the node that it replaces and a value of its own under the
graph's key ("example_value" in Dynamo graphs, else "val"). Rearrangements are emitted from `Dims`:
a reshape to atoms, a permutation, a reshape to the wanted dimensions, each only when needed.

Results keep the strides that the original graph gave them, unless calls of ours are all that reads
them. A fused call may return a contiguous result where the model's was transposed: a copy restores
the old strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.ops.call_options import executor_name
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.passes.chains.safety import Refusal, readings, real_users
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Key, Virtual
from nmm_compiler.passes.graph.effects import is_pure
from nmm_compiler.passes.graph.read_graph import is_distributed
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import FEATURE, Dims, Size

aten = torch.ops.aten
_ALWAYS_SAID = ("layout", "eps", "target", "executor")
_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "from_node", "custom")
# Views that are not possible in every memory order, and readers of it.
STRIDE_READERS = frozenset({"view", "as_strided", "stride", "is_contiguous", "view_as", "data_ptr"})


class NotEmittedError(Exception):
    """A match cannot be written as nodes of the graph; its argument is the refusal that says why.

    Never leaves a pass.
    """


class Editor:
    """Adds nodes behind `at`, the node that they replace, from `begin` on.

    taken: the nodes that go, as matches take them over.
    """

    def __init__(self, c: Canonical, value_key: str, options: Any, taken: set[fx.Node]) -> None:
        self.c, self.graph, self.module = c, c.graph, c.module
        self.value_key, self.options, self.taken = value_key, options, taken
        self.added: list[fx.Node] = []
        self.replaced: dict[fx.Node, fx.Node] = {}
        # Results of calls as kernels make them, by the nodes that they take the place of.
        self.raw: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}

    def begin(self, node: fx.Node) -> None:
        """Replace a node from now on: new nodes, which may read it, stand behind it, in order.

        Other operands are cast to the dtype in which it computes, as autocast does.
        """
        self.at, self._own, value = node, [node], self.c.values.get(node)
        self.dtype = value.dtype if isinstance(value, torch.Tensor) else None

    # -- nodes ----------------------------------------------------------------------------

    def call(
        self,
        operator: Callable[..., Any],
        /,
        *args: Any,
        meta_value: Any = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Add a call of an operator; its metadata value is computed unless it is given."""
        value = meta_value
        if value is None:
            real_args, real_kwargs = fx.map_arg((args, kwargs), self.c.values.get)
            value = operator(*real_args, **real_kwargs)
        return self._add("call_function", operator, args, kwargs, value)

    def kernel(self, name: str, given: Mapping[str, Any], value: Any = None) -> fx.Node:
        """Add a call of an op of ours on the target; given: arguments by name; value: of the node,
        where it is known.

        Keywords that equal their default, but for layouts, and those of another op are left out.
        """
        op, definition = getattr(torch.ops.nmm, name).default, DEFINITIONS[name]
        said = {**given, "target": self.options.target, "executor": executor_name(self.options)}
        args = [said.get(one.name) for one in definition.operands]
        while args and args[-1] is None:
            args.pop()
        kwargs = {
            one: said[one]
            for one, default in definition.keywords.items()
            if one in said and (one.endswith(_ALWAYS_SAID) or said[one] != default)
        }
        if value is None:
            values, keywords = fx.map_arg((args, kwargs), self.c.values.get)
            # DTensor's dispatch says how results are cut; else the op's fake, without dispatch.
            fake = op if is_distributed(values[0]) else definition.of_arguments(definition.fake)
            value = fake(*values, **keywords)
        return self._add("call_function", op, (*args,), kwargs, value)

    def _add(self, kind: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        """Add a node behind those that were added, with its value and the metadata of `at`."""
        with self.graph.inserting_after(self._own[-1]):
            node = self.graph.create_node(kind, target, args, kwargs)
        node.meta |= {name: self.at.meta[name] for name in _COPIED if name in self.at.meta}
        node.meta[self.value_key] = self.c.values[node] = value
        self.added.append(node)
        self._own.append(node)
        return node

    def node(self, key: Key) -> fx.Node:
        """Return the fx node of a value, adding a `get_attr` for a called module's parameter."""
        if not isinstance(key, Virtual):
            while key in self.replaced:
                key = self.replaced[key]
            return key
        assert key.attribute is not None, f"{key} is no value of the graph"
        attribute = self._attributes.get(key.attribute)
        if attribute is None:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                attribute = self.graph.get_attr(key.attribute)
            attribute.meta[self.value_key] = self.c.values[attribute] = key.tensor
            self._attributes[key.attribute] = attribute
        return attribute

    def operand(self, key: Key) -> fx.Node:
        """Return the fx node of a value that a kernel reads, cast to the dtype it computes in;
        numbers of eight bits as they are."""
        node = self.node(key)
        if node in self.c.quantized:
            plain = self.c.values[node].dequantize()
            node = self._add("call_method", "dequantize", (node,), {}, plain)
        old = None if self.dtype is None else self.c.values[node].dtype
        if old == self.dtype or old is None or old.itemsize == 1:
            return node
        return self.call(aten._to_copy.default, node, dtype=self.dtype)

    def hoist(self) -> None:
        """Move `get_attr` nodes to the top, so that a call may stand anywhere."""
        first, *others = self.graph.nodes
        for node in others:
            if node.op == "get_attr":
                first.prepend(node)

    def value(self, node: fx.Node) -> Any:
        """Return a node's metadata value."""
        return self.c.values[node]

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        """Return a node's shape from its metadata."""
        return views.sizes_of(self.value(node))

    # -- sizes ----------------------------------------------------------------------------

    def _symbolic_sizes(self, near: fx.Node) -> dict[Size, tuple[Any, int | None]]:
        """Return the first node, `near` or one above, that holds each symbolic size: a SymInt, or a
        dimension."""
        places: dict[Size, tuple[Any, int | None]] = {}
        above = itertools.takewhile(lambda node: node is not self.at, self.graph.nodes)
        for node in (near, *above):
            value = self.c.values.get(node)
            sizes: Any = value.shape if isinstance(value, torch.Tensor) else ()
            for dim, size in ((None, value), *enumerate(sizes)):
                if isinstance(size, torch.SymInt):
                    places.setdefault(views.as_size(size), (node, dim))
        return places

    # -- rearranging ----------------------------------------------------------------------

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Reshape, unless the shape is there already.

        Symbolic sizes are nodes; -1 is the only one, or one that no node holds.
        """
        if tuple(shape) == self.shape(node):
            return node
        several = sum(not isinstance(size, int) for size in shape) > 1
        known = self._symbolic_sizes(node) if several else {}
        sizes = list[Any]()
        for size in shape:
            held, dim = (size, None) if isinstance(size, int) else known.get(size, (-1, None))
            sizes.append(held if dim is None else self.call(aten.sym_size.int, held, dim))
        if sizes.count(-1) > 1:
            why = f"sizes of a reshape to {list(shape)} stand nowhere in the graph"
            raise NotEmittedError(Refusal("shape", why, self.at))
        return self.call(aten.reshape.default, node, sizes)

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """Permute, unless the order stays the same."""
        if list(order) == sorted(order):
            return node
        return self.call(aten.permute.default, node, list(order))

    def arrange(self, node: fx.Node, have: Dims, want: Dims) -> fx.Node:
        """Turn a value whose dimensions are `have` into one whose dimensions are `want`."""
        if have != want:
            sizes, order = _parts(have, want)
            if order != sorted(order):
                node = self.reshape(node, sizes)
                node = self.permute(node, [order.index(part) for part in range(len(order))])
        return self.reshape(node, views.shape_of(want))

    def like(self, node: fx.Node, original: fx.Node) -> fx.Node:
        """Give a value the strides of the original, unless only calls of ours read it."""
        new, old = self.c.values[node], self.c.values[original]
        if stride_key(new) == stride_key(old):
            return node
        for value, reader in readings(self.c, original):
            strict = value is not original and target_name(value) in STRIDE_READERS
            call = reader in self.taken or (target_name(reader) or "").startswith("nmm::")
            if strict or not call or self.c.effects.is_written(original):
                break
        else:
            return node
        order = sorted(range(old.dim()), key=lambda d: -_magnitude(old.stride()[d]))
        node = self.permute(node, order)
        node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.permute(node, [order.index(d) for d in range(old.dim())])

    # -- replacing ------------------------------------------------------------------------

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every reader of `old` read `new`, with the strides that they depend on.

        Raises ValueError for a value of another dtype, rank or size. Nodes that were added behind
        `old` to compute `new` still read `old`.
        """
        was, now = self.c.tensor(old), self.c.tensor(new)
        if was is not None and now is not None:
            pairs = zip(self.c.sizes(old), self.shape(new), strict=False)
            same = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
            if was.dtype != now.dtype or was.dim() != now.dim() or not same:
                raise ValueError(
                    f"{new.name} is {now.dtype} {list(now.shape)} in place of {old.name}, "
                    f"{was.dtype} {list(was.shape)}; rewrite returns a value of the same shape "
                    "and dtype"
                )
            new = self.like(new, old)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self._own)
        self.replaced[old] = new

    def erase(self, replaced: Collection[fx.Node], read: Collection[fx.Node]) -> None:
        """Erase nodes that nothing reads, but for assertions, last first.

        replaced: those that may go. read: had readers before; they go where they only compute.
        """
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("placeholder", "output"):
                continue
            if real_users(node):
                continue
            if node in replaced or (node in read and is_pure(node, self.c.effects)):
                for assertion in list(node.users):
                    self.graph.erase_node(assertion)
                self.graph.erase_node(node)


# A symbolic size, where strides are sorted: longer than any other.
_LONG = 1 << 30


def _magnitude(stride: Any) -> int:
    """Return a stride as a number to sort by, without a guard on a symbolic one.

    Strides of one tensor are products of its sizes, so that any long sizes give their order.
    """
    if not isinstance(stride, torch.SymInt):
        return int(stride)
    expression = stride.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, _LONG)))


def stride_key(value: torch.Tensor) -> tuple[Any, ...]:
    """Return the strides of dimensions longer than 1, which alone matter."""
    pairs = zip(views.sizes_of(value), value.stride(), strict=True)
    return tuple(views.as_size(stride) for size, stride in pairs if size != 1)


def _parts(have: Dims, want: Dims) -> tuple[list[Size], list[int]]:
    """Return the sizes of the parts that dimensions are to be cut into, in order, and which part
    of what is wanted each of them becomes."""
    have, want = (
        tuple(tuple(a._replace(axis=a.axis - FEATURE) for a in dim) for dim in dims)
        for dims in (have, want)
    )
    sizes: dict[int, Size] = {}
    for atom in itertools.chain(*have):
        sizes[atom.axis] = views.product((atom.size, sizes.get(atom.axis, 1)))
    shape = views.shape_of(have)
    over: Any = views.invert(have, views.identity(shape), sizes)
    wanted: Any = views.compose(want, dict(zip(sizes, over, strict=True)))
    parts = tuple((atom,) for dim in wanted for atom in dim)
    cut: Any = views.invert(parts, views.identity(views.shape_of(parts)), dict(enumerate(shape)))
    atoms = list(itertools.chain(*cut))
    return [atom.size for atom in atoms], [atom.axis for atom in atoms]
