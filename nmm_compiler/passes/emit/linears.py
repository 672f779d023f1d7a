"""The linears of a call: what each computes, and its operands.

Constants around the products are folded into a kernel's operands: factors, one bias, one scale.
Nodes of the graph compute the folded operands at each call from the stored weights, so they follow
updates of a weight, and gradients reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.passes.chains.chain import Chain, Step, Weight
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.emit.stored import Stored
from nmm_compiler.passes.graph.canonical import Canonical, Key


@dataclass(frozen=True)
class Linear:
    """A chain, and how its weights of few bits are stored, where a kernel reads them so.

    factors: fp8 numbers of u and v, or of the one weight. base: the dense weight of few bits, alone
    or beside the factors.
    """

    chain: Chain
    factors: tuple[Stored, ...] = ()
    base: Stored | None = None

    @property
    def dense(self) -> Weight | None:
        """The dense weight, alone or beside the factors."""
        if self.chain.base is not None:
            return self.chain.base.weight
        return self.chain.u if self.chain.second is None else None

    @property
    def rank(self) -> int:
        """The inner dimension of all its branches, 0 of a dense weight alone."""
        return 0 if self.chain.second is None else self.chain.r

    @property
    def format(self) -> str:
        """The format of the dense weight that is read as it is stored, else ""."""
        return "" if self.base is None else self.base.format

    @property
    def ways(self) -> dict[str, str]:
        """The keywords of its weights, which several linears need alike to be one call."""
        said = {} if self.dense is None else {"w_layout": self.dense.layout}
        if self.chain.second is not None:
            said |= {"u_layout": self.chain.u.layout, "v_layout": self.chain.v.layout}
        return said | ({"format": self.format} if self.format else {})

    @property
    def hidden(self) -> set[Key]:
        """The weights that the call does not read, but the leaves that they are made of."""
        weights = self.chain.factors if self.factors else ()
        if self.base is not None and self.dense is not None:
            weights = (*weights, self.dense)
        return {weight.key for weight in weights}

    def operands(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands; return them by the names that an op of one linear has."""
        chain, base = self.chain, self.base
        if base is not None and chain.second is None:
            made = fold_chain(editor, chain, (base,))
        else:
            parts = (chain, *chain.more)
            made = join(editor, parts, [fold_chain(editor, one, self.factors) for one in parts])
        if chain.second is None:
            made["w"] = made.pop("u")
        elif base is not None and self.dense is not None:
            made["w"] = base.values_node(editor, self.dense)
        elif chain.base is not None:
            made["w"] = weight_node(editor, chain.base.weight)
        if base is not None:
            made["w_scale"] = base.scale_node(editor)
            if self.factors:
                first, last = (one_dim(editor, one.scale, chain.r) for one in self.factors)
                made["branch_scale"] = editor.call(aten.mul.Tensor, first, last)
        return made

    def notes(self, c: Canonical) -> list[str]:
        """Return how its weights are read."""
        read = [key for key in self.chain.weights if key not in self.hidden]
        bits = MX[self.format].bits if self.format in MX else 8
        said = {
            "a factor is dequantized or made of stored weights at each call": any(
                key in c.made or c.base(key)[0] in c.quantized for key in read
            ),
            "the fp8 branch is read as stored: a byte an element": self.base and self.factors,
            f"the {self.format} weight is read as stored: {bits} bits an element": self.format,
            "a kernel rounds x to mxfp8 beside it": self.format in MX,
            "the scales of torchao's weight are put in order at each call": (
                self.base is not None and self.base.is_torchao
            ),
        }
        return [note for note, holds in said.items() if holds]


def fold_chain(editor: Editor, chain: Chain, stored: Sequence[Stored] = ()) -> dict[str, Any]:
    """Fold the steps between and after the products of a chain; stored: its weights as bytes.

    Return u and v, or u alone, in the layouts of the chain, and scale and bias of scale * (x u) v +
    bias; with inner_bias and inner_gain of a function between the products.
    """
    nodes: list[Any]
    if stored:
        pairs = zip(stored, chain.factors, strict=True)
        nodes = [one.values_node(editor, weight) for one, weight in pairs]
    else:
        nodes = [weight_node(editor, weight) for weight in chain.factors]
    u, v = [*nodes, None][:2]  # a dense product has no v
    plain_v = v  # the inner bias is multiplied by v before scales are folded into v
    scale, bias = 1.0, None

    def absorb(steps: Sequence[Step], width: int) -> None:
        nonlocal u, v, scale, bias
        for step in steps:
            if step.kind == "bias":
                assert step.key is not None
                bias = plus(editor, bias, one_dim(editor, step.key, width), step.number)
                continue
            scale *= step.number
            bias = bias if bias is None else times(editor, bias, step.number)
            if step.key is not None:
                size = width if step.kind == "vector" else 1
                factor = one_dim(editor, step.key, size)
                bias = bias if bias is None else editor.call(aten.mul.Tensor, bias, factor)
                u, v = fold(editor, chain, u, v, factor)

    absorb(chain.middle, chain.u.n)
    inner = gain = None
    if chain.inner is not None:
        inner, bias = bias, None
        if chain.gain is not None:
            gain = one_dim(editor, chain.gain, chain.u.n)
    elif bias is not None:
        matrix = plain_v if chain.v.layout == "col" else editor.permute(plain_v, (1, 0))
        bias = editor.call(aten.mv.default, matrix, bias)
    absorb(chain.after, chain.n)
    return {"u": u, "v": v, "scale": scale, "bias": bias, "inner_bias": inner, "inner_gain": gain}


def join(
    editor: Editor, chains: Sequence[Chain], parts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Join folded chains of one x that are added into one: u = [u1 | u2], v = [s1 v1; s2 v2]."""
    first, *others = parts
    if not others:
        return first
    ways = chains[0].u.layout, chains[0].v.layout
    scales = {part["scale"] for part in parts}
    us, vs, bias = [], [], None
    for chain, part in zip(chains, parts, strict=True):
        us.append(in_layout(editor, part["u"], chain.u.layout, ways[0]))
        v = in_layout(editor, part["v"], chain.v.layout, ways[1])
        vs.append(v if len(scales) == 1 else times(editor, v, part["scale"]))
        if part["bias"] is not None:
            bias = plus(editor, bias, part["bias"], 1.0)
    u = editor.call(aten.cat.default, us, 1 if ways[0] == "row" else 0)
    v = editor.call(aten.cat.default, vs, 0 if ways[1] == "row" else 1)
    scale = first["scale"] if len(scales) == 1 else 1.0
    return first | {"u": u, "v": v, "bias": bias, "scale": scale}


def in_layout(editor: Editor, node: fx.Node, have: str, want: str) -> fx.Node:
    """Return a weight of one layout in another one."""
    return node if have == want else editor.permute(node, (1, 0))


def weight_node(editor: Editor, weight: Weight) -> fx.Node:
    """Return the 2-D node of a weight as it is stored."""
    return editor.reshape(editor.operand(weight.key), weight.stored)


def one_dim(editor: Editor, key: Key, size: int) -> fx.Node:
    """Return a constant as the 1-D vector it is."""
    return editor.reshape(editor.operand(key), (size,))


def times(editor: Editor, node: fx.Node, number: float) -> fx.Node:
    """Emit a value times a number."""
    return node if number == 1.0 else editor.call(aten.mul.Tensor, node, number)


def plus(editor: Editor, bias: fx.Node | None, own: fx.Node, number: float) -> fx.Node:
    """Emit a bias plus `number` times a vector."""
    if bias is None:
        return times(editor, own, number)
    return editor.call(aten.add.Tensor, bias, own, alpha=number)


def fold(
    editor: Editor, chain: Chain, u: fx.Node, v: fx.Node, factor: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Multiply the smaller factor by a vector over the rank (or by one number)."""
    over_u = chain.u.k <= chain.v.n
    weight, node = (chain.u, u) if over_u else (chain.v, v)
    rank_is_last = (weight.layout == "row") == over_u
    size = editor.shape(factor)[0]
    if not rank_is_last and size != 1:
        factor = editor.reshape(factor, (size, 1))
    folded = editor.call(aten.mul.Tensor, node, factor)
    return (folded, v) if over_u else (u, folded)
