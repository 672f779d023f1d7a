"""Reads a graph into canonical forms: one sweep for Dynamo, export, symbolic_trace and ATen graphs.

Shapes come from metadata, so a `view(-1)` never needs arithmetic. An operation without effect on
values (eval dropout, no-op casts, copies, identities) is a view that rearranges nothing. Each
handler of the table takes a bound call and returns a form, a view as (source, dims), or None for
"not
understood", which leaves the node opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.options import Options
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Canonical,
    Cast,
    Key,
    Leaf,
    Opaque,
    Part,
    Product,
    Result,
    View,
    Virtual,
)
from nmm_compiler.passes.graph.effects import fetch_attribute, is_pure, storages_of
from nmm_compiler.passes.graph.read_operations import Call, read_call, read_module
from nmm_compiler.passes.graph.spelled_out import norm_around, spelled_out
from nmm_compiler.passes.graph.torch_names import (
    changes_gradient,
    is_inplace_name,
    target_name,
)
from nmm_compiler.passes.graph.views import Dims

_LEAVES = ("placeholder", "get_attr")


def read_graph(
    module: fx.GraphModule,
    values: dict[fx.Node, Any],
    stored: Mapping[str, bool] | None = None,
    options: Options | None = None,
    faults: Faults | None = None,
) -> Canonical:
    """Return a graph in canonical forms.

    values: metadata value of each node. stored: in a graph of a higher-order operator, whether the
    model stores the values of its placeholders, by their names. faults: keeps an exception of this
    package at one node.
    """
    c = Canonical(module, values, options, faults)
    c.leaves = {n: _is_stored(c, n, stored or {}) for n in c.graph.nodes if n.op in _LEAVES}
    trained = (*map(c.tensor, c.leaves), *module.parameters())
    c.trains = any(t is not None and t.requires_grad for t in trained)
    called = (n for n in c.graph.nodes if n.op == "call_module")
    modules = [fetch_attribute(module, str(n.target)) for n in called]
    inner = (p for one in modules if isinstance(one, nn.Module) for p in one.parameters())
    own = {n for n, is_stored in c.leaves.items() if is_stored}
    held = any(_is_matrix(c, n) or c.dtype(n) == torch.uint8 for n in own)  # blocks are bytes
    c.inputs_are_weights = not held and not any(p.dim() > 1 for p in inner)
    c.input_matrices = {n for n in c.leaves if n not in own and _is_matrix(c, n, most=2)}
    _sweep(c)
    return c


def read_added(c: Canonical) -> None:
    """Read the nodes that a rewrite has added; the others keep their forms."""
    for node in c.graph.nodes:
        if node.op in _LEAVES and node not in c.leaves:
            c.leaves[node] = _is_stored(c, node, {})
    _sweep(c)


def _sweep(c: Canonical) -> None:
    for node in c.graph.nodes:
        if node not in c.views:
            _visit(c, node)


# -- leaves -----------------------------------------------------------------------------------


def _is_stored(c: Canonical, node: fx.Node, given: Mapping[str, bool]) -> bool:
    """Return whether the model stores a leaf: a parameter, a buffer or an attribute."""
    if node.op == "get_attr":
        c.note_subclass(node, fetch_attribute(c.module, str(node.target)))
        return True
    name = str(node.target)
    named = name.startswith(("p_", "b_")) or name.lower().startswith("l_self_")
    named = named or "_parameters_" in name or "_buffers_" in name
    return given.get(name, named or isinstance(c.values.get(node), nn.Parameter))


def _is_matrix(c: Canonical, node: fx.Node, most: int | None = None) -> bool:
    value = c.tensor(node)
    if value is None or not value.is_floating_point():
        return False
    return value.dim() >= 2 and (most is None or value.dim() <= most)


# -- one node ---------------------------------------------------------------------------------


def _visit(c: Canonical, node: fx.Node) -> None:
    shape = c.shape(node)
    if shape is None:
        c.forms[node] = Opaque(_opaque_name(c, node), ())
        c.views[node] = (node, ())
        if isinstance(c.values.get(node), (tuple, list)) and _shares_constant(c, node):
            c.constant.add(node)
        _note_derived(c, node, False)  # several results, as of a decomposition
        return
    result: Result = None
    try:
        result = _read(c, node)
        if isinstance(result, Product):
            result = c.without_diagonal(node, result)
        if isinstance(result, tuple):
            source = result[0]
            result = _over_base(c, node, *result)
    except Exception as error:  # kept, or raised again
        c.faults.keep(error, "reading", node)
        result = None
        c.virtuals.pop(node, None)
        c.helpers.pop(node, None)
    own = (result, *(c.forms.get(key) for key in c.virtuals.get(node, ())))
    is_product = any(isinstance(form, Product) for form in own)
    _note_derived(c, node, is_product)
    if isinstance(result, tuple):
        c.note_view(node, source, result)
        return
    if (result is None or isinstance(result, Part)) and _shares_constant(c, node):
        result = Leaf(True, result)
    if result is None:
        result = Opaque(_opaque_name(c, node), tuple(node.all_input_nodes))
    c.define(node, result, shape)
    if isinstance(result, Leaf) and (result.stored or c.inputs_are_weights):
        c.constant.add(node)
    elif node.all_input_nodes and all(map(c.is_weight, node.all_input_nodes)):
        if c.inputs_are_weights and not isinstance(result, Cast):
            return  # x is among the inputs too
        if not is_product and is_pure(node, c.effects):
            c.made.add(node)


def _note_derived(c: Canonical, node: fx.Node, is_product: bool) -> None:
    """Note a node that constants alone are the source of."""
    inputs = node.all_input_nodes
    if inputs and all(n in c.constant or n in c.derived for n in inputs):
        c.derived.add(node)
        if is_product or any(n in c.multiplied for n in inputs):
            c.multiplied.add(node)


def _opaque_name(c: Canonical, node: fx.Node) -> str:
    """Return the operation of a node that no form describes, or the class of a called module."""
    if node.op == "call_module":
        return type(fetch_attribute(c.module, str(node.target))).__name__
    return target_name(node) or str(node.target)


def _read(c: Canonical, node: fx.Node) -> Result:
    if node.op in _LEAVES:
        return Leaf(c.leaves[node])
    if node.op == "call_module":
        return read_module(c, node, fetch_attribute(c.module, str(node.target)))
    name = target_name(node) if node.op != "output" else None
    if name is None:
        return None
    result: Result = spelled_out(c, node, name)
    if result is None:
        result = read_call(c, Call(node, name), node.args, node.kwargs)
    if result is None and not is_inplace_name(name):
        result = _by_strides(c, node)
    if not isinstance(result, tuple):
        result = norm_around(c, node, name, result) or result
    return result


def _over_base(c: Canonical, node: fx.Node, source: Key, dims: Dims) -> View | None:
    """Return a rearrangement of `source` as one of its base, or None."""
    base, inner = c.views[source]
    composed = views.compose(dims, inner)
    if composed is None or len(dims) != len(c.sizes(node)):
        return None
    if c.effects.writers and not isinstance(source, Virtual):
        shared = c.effects.storages(node) & c.effects.storages(source)
        if not shared and c.effects.is_written(node, source):
            return None  # a copy and its source may come to differ
    return base, composed


def _by_strides(c: Canonical, node: fx.Node) -> Result:
    """Read an unknown operation as a view when it shares memory with its first argument."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or node in c.effects.writers:
        return None
    if c.trains and changes_gradient(node):
        return None  # the same memory, but other gradients
    old, new = c.tensor(source), c.tensor(node)
    if old is None or new is None or old.dtype != new.dtype:
        return None
    if type(old) is not type(new) or old.layout != torch.strided:
        return None
    if not storages_of(old) & storages_of(new):
        return None
    if views.as_size(old.storage_offset()) != views.as_size(new.storage_offset()):
        return None
    old_sizes, new_sizes = c.sizes(source), c.sizes(node)
    strides = views.strides_of(old), views.strides_of(new)
    dims = views.from_strides(old_sizes, strides[0], new_sizes, strides[1])
    return None if dims is None else (source, dims)


def _shares_constant(c: Canonical, node: fx.Node) -> bool:
    """Return whether the node is a part (slice, chunk) of a weight, in the weight's memory."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in c.constant:
        return False
    own = storages_of(c.values.get(node))
    return bool(own) and own <= c.effects.storages(source) and node not in c.effects.writers
