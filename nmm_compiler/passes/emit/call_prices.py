"""What the kernel of a call computes; every rule whose match is a call has it priced."""

from __future__ import annotations

from typing import Any

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.passes.chains.linear_map import Weight
from nmm_compiler.passes.chains.prices import tokens_to_judge
from nmm_compiler.passes.emit.fused_calls import Call, GatedCall, LowRankCall, SharedCall
from nmm_compiler.passes.emit.ranks_call import RowsCall
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.distributed import is_distributed, local_part


def spec_of(c: Canonical, call: Call) -> KernelSpec:
    """Return what the kernel of a call computes, its operands as the runtime passes them.

    Of tensors that are cut over devices: what it computes on one of them.
    """
    dtype = str(c.dtype(call.final)).removeprefix("torch.")
    m, k = _rows(c, call)
    common: dict[str, Any] = {"m": m, "k": k, "dtype": dtype}
    if call.kept.stored:
        common |= {"dtype": FP8, "scales": "channel", "x_dtype": dtype}
    if isinstance(call, LowRankCall):
        assert call.chain is not None
        chain = call.chain
        r = chain.r if chain.more else _sizes(c, chain.u)[1]
        has: dict[str, Any] = {"base": chain.base is not None, "activation": chain.activation}
        if chain.inner is not None and chain.inner.gain is not None:
            has |= {"inner_norm": True, "inner_eps": chain.inner.eps}
        elif chain.inner is not None:
            has |= {"inner_activation": chain.inner.activation, "inner_bias": bool(chain.middle)}
        if isinstance(call, RowsCall):
            has |= {"tp": call.tp, "tp_axis": "rows"}
        return LowRankSpec(**common, r=r, n=_sizes(c, chain.v)[1], **has)
    if isinstance(call, SharedCall):
        chains = [member.chain for member in call.members if member.chain is not None]
        pairs: list[Any] = [(_sizes(c, one.u)[1], (_sizes(c, one.v)[1],)) for one in chains]
        if call.op.endswith("shared_u"):
            pairs = [(pairs[0][0], tuple(n for _, (n,) in pairs))]
        return LowRankSharedSpec(**common, pairs=tuple(pairs))
    assert isinstance(call, GatedCall)
    gated = call.gated
    ranks = [_sizes(c, p.weights[0])[1] if p.low_rank else 0 for p in gated.projections()]
    fields: dict[str, Any] = dict(zip(("gate_r", "up_r", "down_r"), ranks, strict=False))
    family: type[GatedMLPUpSpec] = GatedMLPUpSpec if gated.down is None else GatedMLPSpec
    n = _sizes(c, gated.gate.weights[-1])[1]
    return family(**common, n=n, activation=gated.activation, **fields)


def _rows(c: Canonical, call: Call) -> tuple[int, int]:
    """Return the tokens and the features of x."""
    m, k = tokens_to_judge(call.tokens_count()), call.source.k
    value = c.tensor(call.source.key)
    if value is None or not is_distributed(value):
        return m, k
    first = call.gated.gate.weights[0] if isinstance(call, GatedCall) else _first(call)
    own = _sizes(c, first)[0]
    return max(1, local_part(value).numel() // own), own


def _first(call: Call) -> Weight:
    one = call.members[0] if isinstance(call, SharedCall) else call
    assert isinstance(one, LowRankCall)
    assert one.chain is not None
    return one.chain.u


def _sizes(c: Canonical, weight: Weight) -> tuple[int, int]:
    """Return the inputs and outputs of a weight, on one device if it is cut over several."""
    value = c.tensor(weight.key)
    if not is_distributed(value) or value.dim() != 2:  # type: ignore[union-attr]
        return weight.k, weight.n
    rows, columns = local_part(value).shape
    return (rows, columns) if weight.layout == "row" else (columns, rows)
