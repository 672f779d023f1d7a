"""Fused calls: the kernel call that a match emits; its layouts are assigned later."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.ops.scaled import SUFFIX
from nmm_compiler.passes.chains import eight_bits
from nmm_compiler.passes.chains.chain import Chain
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.chains.steps import Step
from nmm_compiler.passes.emit.editor import Editor, NotEmittedError, aten
from nmm_compiler.passes.emit.fold_factors import (
    bias_of,
    chain_bias,
    fold_chain,
    fold_projection,
    join,
    scales_of,
    stored_node,
    weight_node,
)
from nmm_compiler.passes.emit.operands import Source, best_source, feature_axis, source_over_raw
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, owner_of
from nmm_compiler.passes.graph.distributed import is_distributed
from nmm_compiler.passes.graph.views import Dims, Size


@dataclass
class Call:
    """A kernel call: op name, source, result. Layouts are "row" until `layout` assigns them.

    unread: no node reads the result in the graph's own order. direct: transposed views of the
    result, with their dims, that are equal to the kernel's result. kept: how it reads weights of
    eight bits.
    """

    op: str
    source: Source
    final: fx.Node
    out_dims: Dims
    n: int
    x_layout: str = "row"
    out_layout: str = "row"
    lead: Dims | None = None
    covered: frozenset[fx.Node] = frozenset()
    many: bool = False
    unread: bool = False
    direct: tuple[tuple[fx.Node, Dims], ...] = ()
    kept: eight_bits.Kept = eight_bits.PLAIN

    def results(self) -> tuple[Call, ...]:
        """Return one call per result, each with a layout of its own."""
        return (self,)

    @property
    def is_whole(self) -> bool:
        """Return whether the kernel's result is the value; else it keeps the graph's own order."""
        return True

    def tokens_count(self) -> Size:
        """Return m, the number of tokens."""
        return views.product([a.size for d in self.source.tokens() for a in d])

    def prepare_x(self, editor: Editor) -> fx.Node:
        """Emit the operand in the x layout and fix the order of tokens."""
        node, source = self._resolve(editor)
        if self.x_layout == "col":
            assert self.lead is not None
            return editor.arrange(node, source.dims, (feature_axis(source.k), *self.lead))
        assert self.lead is not None
        if source.is_row():
            return node
        return editor.arrange(node, source.dims, (*self.lead, feature_axis(source.k)))

    def _resolve(self, editor: Editor) -> tuple[fx.Node, Source]:
        """Return the operand's node and its dimensions, and set `lead`."""
        source, node = self.source, None
        made = editor.raw.get(owner_of(editor.c.base(source.key)[0]))
        if made is not None and made[0].out_layout == "col" and self.x_layout == "col":
            raw = source_over_raw(editor.c, made[0], self)
            if raw is not None:
                source, node = raw, made[1]
        if node is None and not source.is_col():
            self.x_layout = "row"
        node = node or editor.operand(source.key)
        tokens = source.tokens()
        flat = tuple(a for d in tokens for a in d)
        if self.x_layout == "col":
            self.lead = (flat,)
        else:
            self.lead = source.dims[:-1] if source.is_row() else tokens
        return node, source

    def result_value(self, editor: Editor, x: fx.Node, n: int) -> Any:
        """Return the metadata value of a result with n features."""
        assert self.lead is not None
        shape = (*views.shape_of(self.lead), n)
        old = editor.c.values[self.final]
        if self.out_layout == "row" and all(isinstance(s, int) for s in shape):
            # Fake operations are slow; the replaced value often is also the result's.
            same = old.dtype == editor.c.values[x].dtype and views.sizes_of(old) == shape
            if same and views.strides_of(old) == views.row_major(shape):
                return old
        lead = [editor.size_value(s, x) for s in shape[:-1]]
        value = editor.c.values[x]
        if self.out_layout == "row":
            return value.new_empty([*lead, n])
        count: Any = 1
        for size in lead:
            count = count * size
        return value.new_empty([n, count])

    def result_dims(self, n: int) -> Dims:
        """Return the dimensions of a result as the kernel makes it."""
        assert self.lead is not None
        if self.out_layout == "row":
            return (*self.lead, feature_axis(n))
        return (feature_axis(n), tuple(a for d in self.lead for a in d))

    def finish(self, editor: Editor, y: fx.Node, final: fx.Node, want: Dims) -> fx.Node:
        """Bring a result to the dimensions and strides of the node it replaces."""
        editor.raw[final] = (self, y)
        return settle(self, editor, y, final, self.result_dims(self.n), want)

    def op_call(
        self,
        editor: Editor,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        value: Any,
    ) -> fx.Node:
        """Emit the op with layouts, target and executor."""
        op = self.op
        if self.kept.stored:
            op += SUFFIX
            args = (args[0], scales_of(editor, self.kept), *args[1:])
        while args and args[-1] is None:
            args = args[:-1]
        options = editor.options
        cut = is_distributed(editor.c.tensor(self.final))
        node = editor.call(
            getattr(torch.ops.nmm, op).default,
            *args,
            meta_value=None if cut else value,
            **keywords,
            x_layout=self.x_layout,
            out_layout=self.out_layout,
            target=options.target,
            executor=options.executor,
        )
        if cut:
            _check_placements(editor, node, self)
        return node


def _check_placements(editor: Editor, node: fx.Node, call: Call) -> None:
    """Refuse a call whose results are cut over devices in another way than those it replaces."""
    made = editor.c.values[node]
    for one, value in zip(call.results(), made if call.many else [made], strict=True):
        want = editor.c.values[one.final].placements
        if value.placements != want:
            raise NotEmittedError(
                Refusal(
                    "device",
                    f"one call returns {value.placements}, the products {want}",
                    one.final,
                )
            )


def settle(
    made: Any, editor: Editor, y: fx.Node, final: fx.Node, have: Dims, want: Dims
) -> fx.Node:
    """Return the value for readers of `final`; views that equal `y` are replaced by it.

    made: a Call or a pointwise operation of a region, whose result `y` has the dimensions `have`.
    """
    for value, dims in made.direct:
        editor.replace(value, editor.like(editor.arrange(y, have, dims), value))
    if made.unread:
        return y
    return editor.like(editor.arrange(y, have, want), final)


@dataclass
class LowRankCall(Call):
    """nmm.lowrank_matmul for a chain. made: names of factors that the graph makes at each call."""

    chain: Chain | None = None
    made: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether nothing outside of the kernel is added to its result or multiplies it."""
        assert self.chain is not None
        return self.chain.addend is None and not self.chain.per_token

    @classmethod
    def of(cls, c: Canonical, chain: Chain) -> LowRankCall:
        """Return the call that a chain becomes."""
        source = best_source(c, chain.first.x, chain.first.x_dims, chain.u.k, owner_of(chain.out))
        return cls(
            op="lowrank_matmul",
            source=source,
            final=owner_of(chain.out),
            out_dims=chain.out_dims,
            n=chain.v.n,
            covered=chain.nodes,
            chain=chain,
            made=tuple(owner_of(key).name for key in _weights(chain) if _is_made(c, key)),
            kept=eight_bits.keep(
                c,
                (chain.u, chain.v),
                c.dtype(owner_of(chain.out)),
                eight_bits.beside_products(chain),
            ),
        )

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        assert self.chain is not None
        m = self.tokens_count()
        u, v = self.chain.u, self.chain.v
        return {
            "m": m if isinstance(m, int) else str(m),
            "k": u.k,
            "r": self.chain.r,
            "n": v.n,
            "u_layout": u.layout,
            "v_layout": v.layout,
            "bias": any(s.kind == "bias" for s in (*self.chain.middle, *self.chain.after)),
            "activation": self.chain.activation,
            "base": self.chain.base is not None,
            "chains": 1 + len(self.chain.more),
            **self._inner(),
            **self.kept.info,
        }

    def _inner(self) -> dict[str, Any]:
        """Return the function between the products."""
        assert self.chain is not None
        return {} if self.chain.inner is None else {"inner": self.chain.inner.name()}

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about rounding and per-call work."""
        assert self.chain is not None
        notes = []
        kinds = {s.kind for part in (self.chain, *self.chain.more) for s in part.middle}
        if "vector" in kinds or any(s.key is not None and s.kind == "scale" for s in self._steps()):
            notes.append("a scale that is a tensor is folded into a factor at each call")
        if "bias" in kinds and self.chain.inner is None:
            notes.append("the inner bias becomes b v, one vector product at each call")
        if any(s.kind == "scale" and s.number != 1.0 for s in self._steps()):
            notes.append("a scalar moved to the epilogue, which moves a rounding")
        if self.chain.more:
            notes.append("the factors of the adapters are joined along the rank at each call")
        notes += [self.kept.note] if self.kept.note else []
        if self.made and not self.kept.stored:
            notes.append("a factor is dequantized or made of stored weights at each call")
        if self.chain.per_token:
            notes.append("a factor for each token multiplies the result, not the inner value")
        if self.chain.addend is not None:
            notes.append("the addend of the last product stays a separate add")
        return tuple(notes)

    def _steps(self) -> tuple[Step, ...]:
        assert self.chain is not None
        return tuple(s for p in (self.chain, *self.chain.more) for s in (*p.middle, *p.after))

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call and what surrounds it; return the node with the final value."""
        chain = self.chain
        assert chain is not None
        x = self.prepare_x(editor)
        if self.kept.stored:
            return self._emit_scaled(editor, x)
        folded = join(editor, [fold_chain(editor, part) for part in (chain, *chain.more)])
        keywords: dict[str, Any] = {}
        w = None
        if chain.base is not None:
            w = weight_node(editor, chain.base.weight)
            keywords["w_layout"] = chain.base.weight.layout
        if folded.scale != 1.0:
            keywords["scale"] = folded.scale
        if chain.activation != "identity":
            keywords["activation"] = chain.activation
        if chain.inner is not None and chain.inner.gain is not None:
            keywords["inner_eps"] = chain.inner.eps
        elif chain.inner is not None:
            keywords["inner_activation"] = chain.inner.activation
        y = self.op_call(
            editor,
            (x, folded.u, folded.v, folded.bias, w, folded.inner_bias, folded.inner_gain),
            {**keywords, "u_layout": chain.u.layout, "v_layout": chain.v.layout},
            self.result_value(editor, x, chain.v.n),
        )
        y = self.finish(editor, y, self.final, self.out_dims)
        for step in chain.per_token:
            y = _times_tokens(editor, y, step, self.out_dims)
        if chain.addend is not None:
            other = editor.node(chain.addend[0])
            more = {} if chain.addend[1] == 1.0 else {"alpha": chain.addend[1]}
            y = editor.call(aten.add.Tensor, y, other, **more)
        return y

    def _emit_scaled(self, editor: Editor, x: fx.Node) -> fx.Node:
        """Emit the call of fp8 weights: its chain has nothing but a bias and an activation."""
        chain = self.chain
        assert chain is not None
        keywords = {"activation": chain.activation} if chain.activation != "identity" else {}
        pairs = zip((chain.u, chain.v), self.kept.stored, strict=True)
        u, v = (stored_node(editor, weight, stored) for weight, stored in pairs)
        y = self.op_call(
            editor,
            (x, u, v, chain_bias(editor, chain)),
            {**keywords, "u_layout": chain.u.layout, "v_layout": chain.v.layout},
            self.result_value(editor, x, chain.v.n),
        )
        return self.finish(editor, y, self.final, self.out_dims)


def _weights(chain: Chain) -> list[Key]:
    own = [*chain.u.keys, *chain.v.keys, *([chain.base.weight.key] if chain.base else [])]
    return own + [key for other in chain.more for key in _weights(other)]


def _is_made(c: Canonical, key: Key) -> bool:
    return key in c.made or c.base(key)[0] in c.quantized


def _times_tokens(editor: Editor, y: fx.Node, step: Step, out_dims: Dims) -> fx.Node:
    """Emit a result times one number for each of its tokens, or for several of them.

    The factor keeps its dtype, as it did between the products.
    """
    assert step.key is not None
    factor = editor.reshape(editor.node(step.key), views.shape_of(step.dims))
    axes = {atom.axis for dim in step.dims for atom in dim}
    if axes:
        tokens = tuple(tuple(a for a in dim if a.axis in axes) for dim in out_dims)
        factor = editor.arrange(factor, step.dims, tokens)
    return editor.call(aten.mul.Tensor, y, factor)


@dataclass
class SharedCall(Call):
    """nmm.lowrank_matmul_shared_x or _shared_u for several chains of one x."""

    members: tuple[LowRankCall, ...] = ()

    @classmethod
    def of(cls, rule: str, members: list[LowRankCall]) -> SharedCall:
        """Return the call that the members become."""
        first = members[0]
        return cls(
            op=f"lowrank_matmul_{rule}",
            source=first.source,
            final=first.final,
            out_dims=first.out_dims,
            n=first.n,
            covered=frozenset(n for m in members for n in m.covered),
            many=True,
            members=tuple(members),
            kept=eight_bits.kept_together(rule, [member.kept for member in members]),
        )

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        each = [member.info() for member in self.members]
        ranks = each[:1] if self.op.endswith("shared_u") else each
        return {
            "m": each[0]["m"],
            "k": each[0]["k"],
            "r": "+".join(str(e["r"]) for e in ranks),
            "n": "+".join(str(e["n"]) for e in each),
            "chains": len(each),
        }

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call; every member's final node is replaced, the first one's is returned."""
        chains = [m.chain for m in self.members if m.chain is not None]
        for chain in chains:
            steps = (*chain.middle, *chain.after)
            own = [*chain.u.keys, *chain.v.keys]
            editor.hoist([*own, *(s.key for s in steps if s.key is not None)])
        x = self.prepare_x(editor)
        firsts = chains[:1] if self.op.endswith("shared_u") else chains
        weights = [*(chain.u for chain in firsts), *(chain.v for chain in chains)]
        if self.kept.stored:
            editor.hoist([key for one in self.kept.stored for key in (one.values, one.scale)])
            pairs = zip(weights, self.kept.stored, strict=True)
            nodes = [stored_node(editor, weight, stored) for weight, stored in pairs]
        else:
            nodes = [weight_node(editor, weight) for weight in weights]
        us, vs = nodes[: len(firsts)], nodes[len(firsts) :]
        biases = [chain_bias(editor, chain) for chain in chains]
        keywords: dict[str, Any] = {"u_layout": chains[0].u.layout, "v_layout": chains[0].v.layout}
        if any(chain.activation != "identity" for chain in chains):
            keywords["activations"] = [chain.activation for chain in chains]
        layouts = [member.out_layout for member in self.members]
        self.out_layout = layouts[0]
        if len(set(layouts)) > 1:
            self.out_layout, keywords["out_layouts"] = "row", layouts
        values = []
        for member in self.members:
            member.x_layout = self.x_layout
            member._resolve(editor)
            values.append(member.result_value(editor, x, member.n))
        first = us[0] if self.op.endswith("shared_u") else us
        y = self.op_call(editor, (x, first, vs, biases), keywords, values)
        results = []
        for index, member in enumerate(self.members):
            part = editor.call(operator.getitem, y, index, meta_value=values[index])
            results.append(member.finish(editor, part, member.final, member.out_dims))
        for member, result in zip(self.members[1:], results[1:], strict=True):
            if not member.unread:
                editor.replace(member.final, result)
        self.unread = self.members[0].unread
        return results[0]

    def results(self) -> tuple[Call, ...]:
        """Return the members."""
        return self.members


@dataclass
class GatedCall(Call):
    """nmm.gated_mlp_up for a gate and an up projection, nmm.gated_mlp with the down projection."""

    gated: Any = None

    @classmethod
    def of(cls, c: Canonical, gated: Any) -> GatedCall:
        """Return the call that the projections become."""
        gate, last = gated.gate, gated.projections()[-1]
        source = best_source(c, gate.first.x, gate.first.x_dims, gate.k, gated.node)
        return cls(
            op="gated_mlp_up" if gated.down is None else "gated_mlp",
            source=source,
            final=gated.node,
            out_dims=gate.out_dims if gated.down is None else last.out_dims,
            n=last.n,
            covered=gated.nodes,
            gated=gated,
            kept=eight_bits.kept_of_gated(c, gated),
        )

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call; n: output features of gate and up."""
        m = self.tokens_count()
        ranks = [p.weights[0].n if p.low_rank else 0 for p in self.gated.projections()]
        return {
            "m": m if isinstance(m, int) else str(m),
            "k": self.source.k,
            "r": "+".join(str(r) if r else "dense" for r in ranks),
            "n": self.gated.gate.n,
            "activation": self.gated.activation,
            "chains": sum(bool(r) for r in ranks),
            **self.kept.info,
        }

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about per-call work."""
        layouts = {w.layout for p in self.gated.projections() for w in p.weights}
        notes = ["weights of both layouts: some are passed transposed"] if len(layouts) > 1 else []
        return (*notes, *([self.kept.note] if self.kept.note else []))

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call and what surrounds it; return the node with the final value."""
        x = self.prepare_x(editor)
        projections = self.gated.projections()
        stored = [w.layout for p in projections for w in p.weights]
        layout = "col" if stored.count("col") * 2 >= len(stored) else "row"
        operands, biases = [], []
        stored_weights = iter(self.kept.stored)
        for projection in projections:
            if self.kept.stored:
                factors = [stored_node(editor, w, next(stored_weights)) for w in projection.weights]
                bias = bias_of(editor, projection)
            else:
                factors, bias = fold_projection(editor, projection)
            biases.append(bias)
            pairs = zip(factors, projection.weights, strict=True)
            operands.append(
                [n if w.layout == layout else editor.permute(n, (1, 0)) for n, w in pairs]
            )
        args = (x, *operands, *biases)
        keywords = {"activation": self.gated.activation, "weight_layout": layout}
        value = self.result_value(editor, x, self.n)
        y = self.op_call(editor, args, keywords, value)
        return self.finish(editor, y, self.final, self.out_dims)
