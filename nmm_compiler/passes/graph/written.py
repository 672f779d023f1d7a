"""Names of written memory: what is read behind a write in place reads the write's result.

    y.add_(b); f(y)                 ->  y2 = y.add_(b); f(y2)
    y[:, :n] += b; f(y)             ->  y2 = y[:, :n].add_(b); f(y2)     where that is all of y
    h = zeros(..); h[:] = v; f(h)   ->  f(v)

So a sum in place is read as any other sum. `is_alone` says whether a write may go with the nodes
that a call replaces.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Leaf
from nmm_compiler.passes.graph.effects import ANYTHING
from nmm_compiler.passes.graph.torch_names import is_inplace_name, target_name

_BUFFERS = ("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty")


def follow_writes(c: Canonical) -> bool:
    """Let readers behind a write read what it returns, or what it has put into a buffer; return
    whether any does."""
    position, changed = c.effects.position, False
    for node in c.effects.writers:
        target: Any = node.args[0] if node.args else None
        name = target_name(node) or "::"
        puts = name == "setitem_"
        written: Any = node.args[2] if puts else node
        tensors = all(
            isinstance(one, fx.Node) and c.tensor(one) is not None for one in (target, written)
        )
        own = is_inplace_name(name) and "::" not in name  # another one may change gradients
        if not own or not tensors or isinstance(c.form(target), Leaf):
            continue
        if memory_of(c, target) != memory_of(c, written) and not (puts and _fills(c, node)):
            continue
        late = [user for user in target.users if position[user] > position[node]]
        for user in late:
            user.replace_input_with(target, written)
        for gone in (node, target) if puts else ():
            if not gone.users:
                c.graph.erase_node(gone)
        changed = changed or puts or bool(late)
    return changed


def memory_of(c: Canonical, node: fx.Node) -> tuple[Any, ...]:
    """Return what a tensor is like (dtype, sizes, strides), and which memory it lies in: where it
    begins in which storages."""
    value = c.tensor(node)
    assert value is not None
    like = c.dtype(node), c.sizes(node), tuple(map(views.as_size, value.stride()))
    return like, views.as_size(value.storage_offset()), c.effects.storages(node)


def _fills(c: Canonical, put: Any) -> bool:
    """Return whether a value becomes all of a new buffer, which is like it, and nothing writes to
    the memory of either behind that."""
    buffer, place, value = put.args[:3]
    if target_name(buffer) not in _BUFFERS or memory_of(c, buffer)[0] != memory_of(c, value)[0]:
        return False
    slices = place if isinstance(place, tuple) else (place,)
    for one, size in zip(slices, c.sizes(buffer), strict=False):
        whole = isinstance(one, slice) and one.start in (None, 0) and one.step in (None, 1)
        if not whole or one.stop not in (None, size):
            return False
    position = c.effects.position
    read_before = any(position[user] < position[put] for user in buffer.users)
    touched = ANYTHING | c.effects.storages(buffer) | c.effects.storages(value)
    writers = c.effects.writers.items()
    behind = (storages for one, storages in writers if position[one] > position[put])
    return not read_before and not any(storages & touched for storages in behind)


def is_alone(c: Canonical, writer: fx.Node, nodes: Collection[fx.Node]) -> bool:
    """Return whether the memory that a node writes has names among some nodes only, which nothing
    reads behind it."""
    position, own = c.effects.position, c.effects.writers[writer]
    earlier = (node for node in c.graph.nodes if position[node] < position[writer])
    names = {node for node in earlier if c.effects.storages(node) & own}
    late = any(position[user] > position[writer] for node in names for user in node.users)
    return bool(names) and names.issubset(nodes) and not late
