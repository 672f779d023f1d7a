"""The predicted times of a call; every rule whose match is a call asks for them."""

from __future__ import annotations

from typing import Any

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.passes.chains.prices import Predicted, prices_of, tokens_to_judge
from nmm_compiler.passes.emit.fused_calls import Call, GatedCall, LowRankCall, SharedCall
from nmm_compiler.passes.graph.canonical import Canonical


def predicted(c: Canonical, call: Call) -> Predicted:
    """Return the predicted times of a call at its token count."""
    m = tokens_to_judge(call.tokens_count())
    dtype = str(c.dtype(call.final)).removeprefix("torch.")
    return prices_of(_spec(call, m, dtype), c.options)


def _spec(call: Call, m: int, dtype: str) -> KernelSpec:
    """Return the spec of a call's kernel, with the operands that the runtime passes."""
    common: dict[str, Any] = {"m": m, "k": call.source.k, "dtype": dtype}
    if isinstance(call, LowRankCall):
        assert call.chain is not None
        chain = call.chain
        has: dict[str, Any] = {"base": chain.base is not None, "activation": chain.activation}
        return LowRankSpec(**common, r=chain.r, n=chain.v.n, **has)
    if isinstance(call, SharedCall):
        chains = [member.chain for member in call.members if member.chain is not None]
        if call.op.endswith("shared_u"):
            return LowRankSharedSpec(**common, pairs=((chains[0].r, tuple(c.v.n for c in chains)),))
        return LowRankSharedSpec(**common, pairs=tuple((c.r, (c.v.n,)) for c in chains))
    assert isinstance(call, GatedCall)
    gated = call.gated
    ranks = [p.weights[0].n if p.low_rank else 0 for p in gated.projections()]
    fields: dict[str, Any] = dict(zip(("gate_r", "up_r", "down_r"), ranks, strict=False))
    family: type[GatedMLPUpSpec] = GatedMLPUpSpec if gated.down is None else GatedMLPSpec
    return family(**common, n=gated.gate.n, activation=gated.activation, **fields)
