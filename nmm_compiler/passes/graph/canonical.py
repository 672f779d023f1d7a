"""Spellings to canonical forms: one table for Dynamo, export, symbolic_trace and ATen graphs.

`canonicalize(module, values)` sweeps the graph once and gives each node either a form (product,
scale, add, ...) or a view over the node it rearranges. Shapes come from metadata, so a `view(-1)`
never needs arithmetic, and what is looked through (eval dropout, no-op casts, copies, identities)
is a view that rearranges nothing. Each handler of the table takes a bound call and returns a
form, a view as (source, dims), or None for "not understood", which leaves the node opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from nmm_compiler.options import Options
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.activations import Spelled
from nmm_compiler.passes.graph.canonical_forms import Form, Key, Leaf, Opaque, Virtual
from nmm_compiler.passes.graph.effects import ANYTHING, Effects, fetch_attribute, storages_of
from nmm_compiler.passes.graph.torch_names import (
    Call,
    changes_gradient,
    is_inplace_name,
    target_name,
)
from nmm_compiler.passes.graph.views import Dims, Size

View = tuple[Key, Dims]
Result = Form | View | None
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_LEAVES = ("placeholder", "get_attr")
Handler = Callable[["Canonical", Call], Result]


class Canonical:
    """A graph in canonical forms.

    forms: form of each base value. views: for each key, (base, dims). users of fx nodes are read
    from the graph itself. `values` holds the metadata tensor of each node, `options` what the user
    asked for: the target, the buckets.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: dict[fx.Node, Any],
        sources: dict[str, str] | None = None,
        options: Options | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.module, self.graph, self.values = module, module.graph, values
        self.faults = faults or Faults()
        self.options = options or Options()
        self.forms: dict[Key, Form] = {}
        self.views: dict[Key, View] = {}
        self.sources: dict[Key, Key] = {}
        self.virtuals: dict[fx.Node, list[Virtual]] = {}
        # Further nodes that make a value, for forms that several nodes spell together.
        self.helpers: dict[Key, frozenset[fx.Node]] = {}
        self._shapes: dict[fx.Node, tuple[Size, ...]] = {}
        self.effects = Effects(module, values)
        self.constant: set[Key] = set()
        self.derived: set[fx.Node] = set()
        self.subclasses: dict[fx.Node, str] = {}
        self.spelled = Spelled(self)
        self._given = sources or {}
        self.leaves = {n: self._source(n) for n in self.graph.nodes if n.op in _LEAVES}
        trained = (*map(self.tensor, self.leaves), *module.parameters())
        self.trains = any(t is not None and t.requires_grad for t in trained)
        called = (n for n in self.graph.nodes if n.op == "call_module")
        stored = any(map(self._is_stored_matrix, self.leaves)) or any(map(self._holds, called))
        self.inputs_are_weights = not stored
        # Inputs that could be factors: adapters that are handed over beside x.
        self.input_matrices = {n for n in self.leaves if self._is_input_matrix(n)}
        for node in self.graph.nodes:
            self._visit(node)

    # -- what is known of a value ---------------------------------------------------------

    def tensor(self, key: Key) -> torch.Tensor | None:
        """Return the metadata tensor of a node, None when it is not a tensor."""
        value = key.tensor if isinstance(key, Virtual) else self.values.get(key)
        return value if isinstance(value, torch.Tensor) else None

    def shape(self, key: Key) -> tuple[Size, ...] | None:
        """Return the shape, with symbolic sizes as expressions; None for no tensor."""
        if isinstance(key, Virtual):
            return key.shape
        found = self._shapes.get(key)
        if found is None:
            value = self.tensor(key)
            if value is None:
                return None
            found = self._shapes[key] = views.sizes_of(value)
        return found

    def dtype(self, key: Key) -> torch.dtype | None:
        """Return the dtype, None for no tensor."""
        if isinstance(key, Virtual):
            return key.dtype
        value = self.tensor(key)
        return None if value is None else value.dtype

    def base(self, key: Key) -> View:
        """Return (base, dims): what the value is a rearrangement of."""
        return self.views[key]

    def form(self, key: Key) -> Form:
        """Return the form of the base that the value is a rearrangement of."""
        return self.forms[self.views[key][0]]

    def is_constant(self, key: Key) -> bool:
        """Say whether the value comes from outside the graph, by nothing but views."""
        return key in self.constant

    # -- building -------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        shape = self.shape(node)
        if shape is None:
            self.forms[node] = Opaque(target_name(node) or str(node.target), ())
            self.views[node] = (node, ())
            if isinstance(self.values.get(node), (tuple, list)) and self._shares_constant(node):
                self.constant.add(node)
            return
        result: Result = None
        understood = False
        with self.faults.guard("reading", node):
            result = self._read(node)
            if isinstance(result, tuple):
                source = result[0]
                result = self._over_base(node, *result)
            understood = True
        if not understood:
            result = None
            self.virtuals.pop(node, None)
            self.helpers.pop(node, None)
        inputs = node.all_input_nodes
        if inputs and all(n in self.constant or n in self.derived for n in inputs):
            self.derived.add(node)
        if isinstance(result, tuple):
            self.views[node] = result
            self.sources[node] = source
            if source in self.constant:
                self.constant.add(node)
            return
        if result is None and self._shares_constant(node):
            result = Leaf("part of a weight")
        if result is None:
            result = Opaque(target_name(node) or str(node.target), tuple(node.all_input_nodes))
        self.define(node, result, shape)
        stored = isinstance(result, Leaf) and result.source != "input"
        if stored or (isinstance(result, Leaf) and self.inputs_are_weights):
            self.constant.add(node)

    def _over_base(self, node: fx.Node, source: Key, dims: Dims) -> View | None:
        """Return a rearrangement of `source` as one of its base, None where it is no such view."""
        base, inner = self.views[source]
        composed = views.compose(dims, inner)
        if composed is None or len(dims) != len(self.shape(node) or ()):
            return None
        return None if self._is_written_copy(node, source) else (base, composed)

    def read_added(self) -> None:
        """Read the nodes that a rewrite has added since; what stood before keeps its form."""
        for node in self.graph.nodes:
            if node not in self.views:
                if node.op in _LEAVES:
                    self.leaves[node] = self._source(node)
                self._visit(node)

    def define(self, key: Key, form: Form, shape: tuple[Size, ...]) -> None:
        """Give a value its form, as a base of its own."""
        self.forms[key] = form
        self.views[key] = (key, views.identity(shape))

    def virtual(self, owner: fx.Node, label: str, form: Form, shape: tuple[Size, ...]) -> Virtual:
        """Add a value that `owner` computes on its way."""
        dtype = self.dtype(owner)
        assert dtype is not None
        key = Virtual(owner, label, shape, dtype)
        self.virtuals.setdefault(owner, []).append(key)
        self.define(key, form, shape)
        return key

    def attribute(self, owner: fx.Node, name: str, tensor: torch.Tensor) -> Virtual:
        """Add a parameter of the module that `owner` calls."""
        shape = tuple(tensor.shape)
        key = Virtual(owner, name, shape, tensor.dtype, f"{owner.target}.{name}", tensor)
        self.define(key, Leaf("parameter"), shape)
        self.constant.add(key)
        return key

    def viewed(self, owner: fx.Node, label: str, source: Key, dims: Dims) -> Key:
        """Add a rearrangement of `source` that `owner` makes on its way."""
        base, inner = self.views[source]
        composed = views.compose(dims, inner)
        dtype = self.dtype(source)
        assert composed is not None
        assert dtype is not None
        key = Virtual(owner, label, views.shape_of(dims), dtype)
        self.views[key] = (base, composed)
        self.sources[key] = source
        if source in self.constant:
            self.constant.add(key)
        return key

    def _read(self, node: fx.Node) -> Result:
        if node.op in _LEAVES:
            return Leaf(self.leaves[node])
        if node.op == "call_module":
            from nmm_compiler.passes.graph.torch_modules import read_module

            return read_module(self, node, fetch_attribute(self.module, str(node.target)))
        if node.op == "output":
            return None
        name = target_name(node)
        if name is None:
            return None
        from nmm_compiler.passes.graph.read_operations import TABLE

        handler = TABLE.get(name)
        result: Result = self.spelled.visit(node, name)
        if result is None and handler is not None:
            result = handler(self, Call(node, name))
        if result is None and not is_inplace_name(name):
            result = self._by_strides(node)
        return result

    def _source(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            value = fetch_attribute(self.module, str(node.target))
            if isinstance(value, torch.Tensor) and type(value) not in PLAIN:
                self.subclasses[node] = type(value).__name__
            return "parameter" if isinstance(value, nn.Parameter) else "attribute"
        name = str(node.target)
        if name in self._given:
            return self._given[name]
        value = self.values.get(node)
        if isinstance(value, nn.Parameter):
            return "parameter"
        if "_parameters_" in name or name.startswith("p_"):
            return "parameter"
        if "_buffers_" in name or name.startswith("b_"):
            return "buffer"
        return "attribute" if name.lower().startswith("l_self_") else "input"

    def _is_stored_matrix(self, node: fx.Node) -> bool:
        value = self.tensor(node)
        kept = value is not None and value.dim() >= 2 and value.is_floating_point()
        return kept and self.leaves[node] != "input"

    def _holds(self, node: fx.Node) -> bool:
        """Say whether a called module has matrices of its own."""
        called = fetch_attribute(self.module, str(node.target))
        return isinstance(called, nn.Module) and any(p.dim() > 1 for p in called.parameters())

    def _is_input_matrix(self, node: fx.Node) -> bool:
        value = self.tensor(node) if self.leaves[node] == "input" else None
        return value is not None and value.dim() == 2 and value.is_floating_point()

    def _by_strides(self, node: fx.Node) -> Result:
        """Read an unknown operation as a view when it shares memory with its first argument."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node in self._writers():
            return None
        if self.trains and changes_gradient(node):
            return None  # the same memory, but other gradients
        old, new = self.tensor(source), self.tensor(node)
        if old is None or new is None or old.dtype != new.dtype:
            return None
        if type(old) is not type(new) or old.layout != torch.strided:
            return None
        if not storages_of(old) & storages_of(new):
            return None
        as_sizes = [views.as_size(s) for s in (old.storage_offset(), new.storage_offset())]
        if as_sizes[0] != as_sizes[1]:
            return None
        dims = views.from_strides(
            self.shape(source) or (),
            views.strides_of(old),
            self.shape(node) or (),
            views.strides_of(new),
        )
        return None if dims is None else (source, dims)

    def _shares_constant(self, node: fx.Node) -> bool:
        """Say whether the node is a part (slice, chunk) of a weight, in the weight's memory."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.constant:
            return False
        own = storages_of(self.values.get(node))
        return bool(own) and own <= self.effects.storages(source) and node not in self._writers()

    def _is_written_copy(self, node: fx.Node, source: Key) -> bool:
        """Say whether a copy and its source may come to differ, because either is written."""
        if not self.effects.writes or isinstance(source, Virtual):
            return False
        own, old = self.effects.storages(node), self.effects.storages(source)
        if own & old:
            return False
        both = own | old | ANYTHING
        return any(write.storages & both for write in self.effects.writes)

    def is_view_of(self, node: fx.Node, value: Key) -> bool:
        """Say whether `node` rearranges `value` itself.

        A node of several operands rearranges one of them at most: `w.view_as(y)` and `w.to(y)` are
        views of w, and computations for whoever asks about y.
        """
        key = self.sources.get(node)
        while isinstance(key, Virtual) and key in self.sources:
            key = self.sources[key]  # a step that the node makes on its way
        return key is value

    def through(self, key: Key) -> list[Key]:
        """Return the value and the rearrangements below it, down to but without its base."""
        seen: list[Key] = []
        while key in self.sources:
            seen.append(key)
            key = self.sources[key]
        return seen

    def _writers(self) -> frozenset[fx.Node]:
        return self.effects.writers
