"""Rules `norm` and `residual`: what stands around our calls moves into them.

    h = rms_norm(x, g); y = nmm.lowrank_matmul(h, u, v)
      ->   y = nmm.lowrank_matmul(x, u, v, ..., g, norm="rms", norm_eps=1e-6)

    y = nmm.lowrank_matmul(x, u, v); z = h + y
      ->   z = nmm.lowrank_matmul(x, u, v, ..., residual=h)

A norm may be one node or spelled out. Several calls that read it each take it in, and it is gone;
a norm that something else reads has to be computed anyway, and stays. A residual may be on either
side. The call has no other reader, and the residual has the sum's shape and dtype: one that is
broadcast, or widens the sum, stays outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.ops.definition import Op
from nmm_compiler.passes.chains.safety import (
    DTYPES,
    Refusal,
    call_ways,
    crossed,
    readings,
    tokens_to_judge,
    unsafe,
)
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Add, Canonical, Key, Norm, Opaque, owner_of
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import Dims, Size
from nmm_compiler.passes.rules.base import Match, Rule


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of an op whose calls may have a norm of x and a residual.

    given: its arguments by name, those that it leaves out too.
    """

    node: fx.Node
    op: Op
    given: Mapping[str, Any]

    @property
    def takes_residual(self) -> bool:
        """Whether a residual can be added, and none is."""
        return "residual" in self.given and self.given["residual"] is None

    def is_row(self, layout: str) -> bool:
        """Return whether its "x_layout" or "out_layout" is row."""
        return bool(self.given[layout] == "row")

    def changed(self, more: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return args and kwargs with other arguments, by name."""
        given = {**self.given, **more}
        args = [given[one.name] for one in self.op.operands]
        while args and args[-1] is None:
            args.pop()
        keywords = {name: value for name, value in more.items() if name in self.op.keywords}
        return tuple(args), {**self.node.kwargs, **keywords}

    def us(self, c: Canonical, more: Mapping[str, Any]) -> float:
        """Return the predicted microseconds of the changed call; infinity without a kernel."""
        from nmm_compiler.ops.lower import lower, tokens

        args, kwargs = fx.map_arg(self.changed(more), lambda n: c.values[n])
        try:
            m = tokens_to_judge(tokens(args[0], kwargs))
            (launch,) = lower(self.op.name, args, kwargs, m).launches
        except (NmmError, ValueError, TypeError):
            return math.inf  # symbolic sizes
        return call_ways(c, launch.spec).fused

    def emit(self, editor: Editor, more: Mapping[str, Any]) -> fx.Node:
        """Emit the changed call."""
        args, kwargs = self.changed(more)
        value = editor.c.values[self.node]
        return editor.call(self.node.target, *args, meta_value=value, **kwargs)  # type: ignore[arg-type]


def kernel_call(node: Key) -> KernelCall | None:
    """Return the call of a product's op that a node is, or None."""
    from nmm_compiler.ops.registration import DEFINITIONS

    space, _, name = (target_name(node) or "" if isinstance(node, fx.Node) else "").partition("::")
    op = DEFINITIONS.get(name) if space == "nmm" else None
    if op is None or op.own == 0:
        return None
    return KernelCall(owner_of(node), op, op.bound(owner_of(node).args, owner_of(node).kwargs))


def _slower(
    c: Canonical,
    call: KernelCall,
    what: str,
    change: Mapping[str, Any],
    value: Key,
    passes: int,
    readers: int = 1,
) -> Refusal | None:
    """Return a refusal where a norm or a sum on its own is predicted to take less than inside.

    change: of the call, with it inside. Alone it moves the bytes of `value` so many times; a load
    and a store start one after the other, its own launch is not counted, and each of its readers
    has its part of it.
    """
    plain, inside = call.us(c, {}), call.us(c, change)
    tensor = c.tensor(value)
    if tensor is None or not math.isfinite(plain + inside):
        return Refusal("slower", f"no kernel takes the {what} in", value)
    features = int(tensor.shape[-1])
    moved = passes * tokens_to_judge(tensor.numel() // features) * features * tensor.element_size()
    start = 2 * (c.chip.dma_start_latency_seconds + c.chip.semaphore_seconds)
    alone = 1e6 * (start + moved / c.chip.memory_bytes_per_second) / readers
    if inside <= plain + alone:
        return None
    reason = (
        f"the call with the {what} inside: {inside:,.1f} us on {c.chip.name}, without "
        f"{plain:,.1f}, the {what} alone {alone:,.1f} (predicted, {c.options.price})"
    )
    return Refusal("slower", reason, value)


class NormInside(Rule):
    """A norm of x inside of the calls that read it."""

    name = "norm"
    ends_at = (Opaque,)
    after_calls = True

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose our calls of a norm."""
        call = kernel_call(node)
        if call is not None and "norm" not in node.kwargs and isinstance(call.given["x"], fx.Node):
            final = graph.base(call.given["x"])[0]
            norm = graph.forms[final]
            if isinstance(norm, Norm) and isinstance(final, fx.Node):
                yield call, final, norm

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check whether the norm can move into all that read it."""
        call, final, norm = candidate
        shape, dtype = graph.sizes(final), graph.dtype(final)
        vectors = [v for v in (norm.weight, norm.bias) if v is not None]
        if dtype not in DTYPES or norm.eps is None or graph.dtype(norm.value) != dtype:
            return None
        for vector in vectors:
            plain = graph.shape(vector) == shape[-1:] and graph.dtype(vector) == dtype
            if not plain or not graph.is_constant(vector):
                return None
        if not _along_features(graph, call, final):
            reason = "the norm is over other dimensions than the features of x"
            return Refusal("shape", reason, final)
        reads = list(readings(graph, final))
        readers = list(dict.fromkeys(reader for _, reader in reads))
        for reader in readers:
            other = kernel_call(reader)
            if other is None or "norm" in reader.kwargs or not _reads_as_x(graph, other, final):
                return Refusal("other_user", f"the norm is also read by {reader.name}", final)
        # inner values of the norm may have other readers: those are computed as before
        seen = {owner_of(key) for value, _ in reads for key in graph.through(value)}
        moved = {*(owner_of(key) for key in graph.through(call.given["x"])), final, call.node}
        operands = [norm.value, *vectors]
        whole = {*graph.helpers.get(final, ()), *moved}
        why = crossed(graph, whole, call.node, operands) or unsafe(
            graph, moved, call.node, operands, redirected=[*readers, *seen]
        )
        if why is not None:
            return why
        keywords: dict[str, Any] = {"norm": norm.kind, "norm_eps": float(norm.eps)}
        if norm.offset:
            keywords["norm_offset"] = norm.offset
        own = [None if v is None else owner_of(v) for v in (norm.weight, norm.bias)]
        if any(node is not None and node.op == "call_module" for node in own):
            own = [None, None]  # parameters of a module that the graph calls
        change = {"norm_gain": own[0], "norm_bias": own[1], **keywords}
        return _slower(graph, call, "norm", change, norm.value, 2, len(readers)) or Match(
            rule=self.name,
            node=call.node,
            nodes=frozenset({call.node}),
            data=(call, norm, keywords),
            info={"norm": norm.kind, "k": int(shape[-1])},
            notes=("the norm is rounded once, to the dtype of x",),
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call on the input of the norm."""
        call, norm, keywords = match.data
        base, dims = graph.base(call.given["x"])
        x = editor.arrange(editor.operand(norm.value), graph.whole(base), dims)
        gain, bias = (None if v is None else editor.operand(v) for v in (norm.weight, norm.bias))
        return call.emit(editor, {"x": x, "norm_gain": gain, "norm_bias": bias, **keywords})


def _along_features(c: Canonical, call: KernelCall, final: fx.Node) -> bool:
    """Return whether the features that a call contracts are the last axis of the norm."""
    last = c.whole(final)[-1:]
    features = c.base(call.given["x"])[1][-1 if call.is_row("x_layout") else 0]
    return bool(last) and features == last[0]


def _reads_as_x(c: Canonical, call: KernelCall, final: fx.Node) -> bool:
    """Return whether a call reads the norm as its x, and as nothing else."""
    read = [n for n in call.node.all_input_nodes if n in c.views and c.base(n)[0] is final]
    return read == [call.given["x"]] and _along_features(c, call, final)


class ResidualInside(Rule):
    """A residual that is added to the result of a call."""

    name = "residual"
    ends_at = (Add,)
    after_calls = True

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose sums of a call and another tensor, in either order."""
        form = graph.forms.get(node)
        for residual, y in form.orders if isinstance(form, Add) else ():
            call = kernel_call(graph.base(y)[0])
            if call is not None and call.takes_residual:
                yield node, call, y, residual

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check shapes and dtypes, the call's readers, and what is written in between."""
        node, call, y, residual = candidate
        in_order = _in_order(graph.base(y)[1], graph.sizes(call.node))
        if not in_order or not call.is_row("out_layout"):
            return Refusal("shape", "the result is rearranged before the sum", node)
        shapes = {graph.shape(key) for key in (node, y, residual)}
        dtypes = {graph.dtype(key) for key in (node, y, residual)}
        if len(shapes) > 1 or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            reason = "the residual has another shape or dtype than the result"
            return Refusal("shape", reason, residual)
        nodes = frozenset({node, call.node, *(owner_of(key) for key in graph.through(y))})
        operands = [*call.node.all_input_nodes, residual]
        more = {"residual": call.node}  # of the shape of the residual
        return (
            unsafe(graph, nodes, node, operands)
            or _slower(graph, call, "sum", more, node, 3)
            or Match(
                rule=self.name,
                node=node,
                nodes=nodes,
                data=(call, y, residual),
                info={"n": int((graph.shape(node) or (0,))[-1])},
            )
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call at the place of the sum, on the residual in the shape of its result."""
        call, y, residual = match.data
        dims = graph.base(y)[1]
        have = graph.whole(call.node)
        added = editor.arrange(editor.operand(residual), dims, have)
        return editor.arrange(call.emit(editor, {"residual": added}), have, dims)


def _in_order(dims: Dims, shape: tuple[Size, ...]) -> bool:
    """Return whether dimensions over a value are its own, split or joined, in their order."""
    if dims == views.identity(shape):
        return True
    atoms = [atom for dim in dims for atom in dim]
    sizes = [size for atom in atoms for size in (atom.size, atom.inner)]
    if not all(isinstance(size, int) for size in (*sizes, *shape)):
        return False
    order = [(atom.axis, -atom.inner) for atom in atoms]
    whole = math.prod(atom.size for atom in atoms) == math.prod(shape)
    return whole and order == sorted(order) and all(atom.axis >= 0 for atom in atoms)
