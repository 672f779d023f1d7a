"""A gated MLP as one kernel: when it is, when it is not and why, and that it trains and runs."""

import pytest
import torch
import torch.nn.functional as F
from models import Backend, Model, Pair, kernel_calls, kinds_of
from torch import nn

from nmm_compiler.kernels.linear.specs import GatedMLPSpec
from nmm_compiler.passes.chains import safety as prices
from nmm_compiler.passes.chains.safety import TYPICAL_TOKENS
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.prices.ways import ways


def projection(k, r, n, bias):
    """Return two factors, or one dense weight when r is 0."""
    return Pair(k, r, n, bias) if r else nn.Linear(k, n, bias)


def mlp(ranks, k=32, n=64, back=32, bias=False, after=lambda y, h: y):
    """Return a gated MLP of projections of these ranks, and a function of what it returns and h."""

    def function(p, x):
        h = F.silu(p.gate(x)) * p.up(x)
        return after(p.down(h), h)

    sizes = {"gate": (k, ranks[0], n), "up": (k, ranks[1], n), "down": (n, ranks[2], back)}
    return Model(function, **{name: projection(*size, bias) for name, size in sizes.items()})


X = torch.randn(2, 5, 32)


def rewritten(model, kinds, x=X):
    """Return the result for a model that has matches of these kinds."""
    result = rewrite(model, x, verify=not model.training)
    assert kinds_of(result) == kinds
    return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [(4, 4, 4), (0, 4, 4), (4, 0, 0), (0, 0, 4), (0, 4, 0)])
def test_any_projection_may_be_dense(ranks, bias):
    result = rewritten(mlp(ranks, bias=bias).eval(), ["gated_mlp"])
    assert not result.declined
    ((_, spec),) = kernel_calls(result.graph_module)
    assert tuple(map(spec.rank, spec.branches)) == ranks
    assert result.matches[0].info["chains"] == sum(map(bool, ranks))


def test_a_dense_mlp_is_left_alone():
    result = rewrite(mlp((0, 0, 0)), X)
    assert not result.matches
    assert not result.declined


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"after": lambda y, h: y + h.sum()}, "other_user", "is also used by sum"),
        ({"back": 48}, "no_kernel", "returns 48 features"),
    ],
)
def test_what_hinders_one_call_leaves_two_and_is_named(changes, code, words):
    (declined,) = rewritten(mlp((4, 4, 4), **changes), ["gated_mlp_up", "lowrank"]).declined
    assert (declined.rule, declined.code) == ("gated_mlp", code)
    assert words in declined.reason


def test_dropout_before_the_down_projection_stays_two_kernels():
    model = mlp((4, 4, 4)).train()
    model.down.a = nn.Sequential(nn.Dropout(0.5), model.down.a)
    rewritten(model, ["gated_mlp_up", "lowrank"])


def test_what_does_not_fit_is_declined_with_the_numbers():
    n = 120_000  # h^T of 128 tokens takes 938 tiles of 256 bytes per partition, trn2 has 212,472
    model, x = mlp((2, 2, 2), n=n).to(torch.bfloat16), torch.randn(128, 32).to(torch.bfloat16)
    declined = {one.rule: one for one in rewritten(model, ["gated_mlp_up"], x).declined}
    for rule, held in {"gated_mlp": "h", "lowrank": "x"}.items():  # x of the latter is h
        assert declined[rule].code == "no_kernel"
        assert f"{held} 240,128" in declined[rule].reason
        assert "trn2 has 212,472" in declined[rule].reason
    assert kinds_of(rewrite(model, x[:100])) == ["gated_mlp"]


def test_two_kernels_where_they_are_predicted_to_be_faster():
    """The h of a wide dense down projection leaves SBUF panels of 128 outputs."""
    sizes = {"k": 8192, "n": 28672, "gate_r": 2048, "up_r": 2048, "down_r": 0}
    wide = ways(GatedMLPSpec(m=512, **sizes), "trn2")
    assert wide.fused > 1.2 * wide.separate
    refused = prices.slower(wide, None)
    assert "for 512 tokens" in refused.reason
    assert "us on trn2" in refused.reason
    narrow = ways(GatedMLPSpec(m=1, k=2048, n=8192, r=512), "trn2")
    assert prices.slower(narrow, None) is None


def test_a_symbolic_count_is_judged_at_one_count_by_every_rule(monkeypatch):
    asked = []
    judge = prices.ways
    monkeypatch.setattr(
        prices, "ways", lambda spec, *a, **k: asked.append(spec) or judge(spec, *a, **k)
    )

    for model in (mlp((4, 4, 4)), mlp((4, 4, 4), back=48)):
        torch.compile(model, backend=Backend(), dynamic=True)(X)
    assert {spec.family for spec in asked} >= {"gated_mlp", "gated_mlp_up", "lowrank"}
    assert {spec.m for spec in asked} == {TYPICAL_TOKENS}
