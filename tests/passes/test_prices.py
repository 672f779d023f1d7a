"""One call, its products or one dense product: predicted at the call's token count, and told."""

import functools
import json
import re

import models
import pytest
import torch
import torch.nn.functional as F
from models import kinds_of, trace_and_run

from nmm_compiler import backend
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.prices.kernel import LAUNCH_GAP_US, PRICES
from nmm_compiler.prices.ways import ways

Pair = functools.partial(models.Pair, bias=False)


def rewritten(model, tokens, **options):
    k = model.a.in_features
    model = model.to(torch.bfloat16)
    return trace_and_run(model, torch.randn(tokens, k).to(torch.bfloat16), **options)


@pytest.fixture
def priced(monkeypatch):
    """Return a function that sets the price of kernels to a function of (spec, target)."""
    return lambda price: monkeypatch.setitem(PRICES, "closed_form", price)


def test_every_match_has_the_figures_of_the_one_function():
    result = rewritten(Pair(256, 32, 512), 96)
    (match,) = result.matches
    want = ways(LowRankSpec(m=96, k=256, r=32, n=512), "trn2")
    found = match.info["predicted"]
    assert found == want.to_dict()
    assert (found["tokens"], found["target"], found["source"]) == (96, "trn2", "closed_form")
    assert f"{want.fused:,.1f}" in str(result)
    assert json.loads(result.to_json())["matches"][0]["predicted"] == found


def test_products_that_are_faster_stay_as_they_are_written(priced):
    slow = {"lowrank": 9.0, "matmul": 1.0}
    priced(lambda spec, target: slow[spec.family])
    result = rewritten(Pair(256, 32, 512), 96)
    assert not result.matches
    (declined,) = result.declined
    assert declined.code == "slower"
    assert "one call for 96 tokens: 9.0 us on trn2" in declined.reason
    assert "smaller calls 4.0 us" in declined.reason


def test_the_token_count_decides(priced):
    """A kernel that is slow for many tokens is taken for few."""
    priced(lambda spec, target: 50.0 if spec.family == "lowrank" and spec.m > 64 else 1.0)
    assert len(rewritten(Pair(256, 32, 512), 64).matches) == 1
    assert [d.code for d in rewritten(Pair(256, 32, 512), 65).declined] == ["slower"]


def test_a_group_is_one_call_only_where_that_is_faster(priced):
    parts = {"p": Pair(64, 4, 48), "q": Pair(64, 4, 48)}
    two = models.Model(lambda m, x: (m.p(x), m.q(x)), **parts)
    for shared, kinds in ((1.0, ["shared_x"]), (90.0, ["lowrank", "lowrank"])):
        cost = {"lowrank_shared": shared, "lowrank": 2.0, "matmul": 3.0}
        priced(lambda spec, target, cost=cost: cost[spec.family])
        result = trace_and_run(two, torch.randn(8, 64))
        assert kinds_of(result) == kinds


def test_a_rank_that_is_too_large_is_told_with_the_times_of_all_ways():
    (declined,) = rewritten(Pair(512, 400, 512), 128).declined
    assert declined.code == "rank_too_large"
    want = ways(LowRankSpec(m=128, k=512, r=400, n=512), "trn2")
    for us in (want.dense, want.fused, want.separate):
        assert f"{us:,.1f}" in declined.reason
    assert "for 128 tokens on trn2" in declined.reason


@pytest.mark.parametrize(
    ("dense", "said"),
    [(9.0, ""), (3.0, ""), (2.9, "not told apart from dense (error 35 %): lowrank"),
     (1.0, "lowrank (m=16, k=512, r=250, n=512): dense weights are predicted to take less")],
)  # fmt: skip
def test_a_call_that_dense_weights_beat_is_named_beside_the_table_of_prices(priced, dense, said):
    priced(lambda spec, target: 3.0 if spec.family == "lowrank" else dense)
    text = " ".join(str(rewritten(Pair(512, 250, 512), 16)).split())
    assert said in text
    assert ("keep the layer dense" in text) == bool(said)
    assert ("not told apart" in text) == (dense == 2.9)


@pytest.mark.parametrize("r", [96, 380])  # a rank that pays, and one that dense weights beat
@torch.no_grad()
def test_one_call_has_one_price_in_a_compile_report(r):
    """The headline is made of the times of the kernels that the report lists."""
    model = Pair(512, r, 2048).to(torch.bfloat16)
    x = torch.randn(96, 512, dtype=torch.bfloat16)
    models.compiled(model)(x)
    report = backend.last_report()
    times = ways(LowRankSpec(m=96, k=512, r=r, n=2048), "trn2", source="simulated")
    (line,) = report.kernels
    assert round(line.predicted_us, 3) == round(times.fused, 3)
    gain = (times.dense + LAUNCH_GAP_US) / (times.fused + LAUNCH_GAP_US)
    assert f"{gain:.2f}x for this graph (96 tokens a call, simulated)" in report.headline()
    assert len(set(re.findall(r"([\d.]+) us", str(report)))) == 0  # the table alone has the price


def test_a_lora_is_not_compared_with_its_merged_weight():
    def function(p, x):
        return F.linear(x, p.w) + p.pair(x)

    adapted = models.Model(function, pair=Pair(64, 4, 64), w=torch.randn(64, 64))
    result = trace_and_run(adapted, torch.randn(8, 64))
    assert kinds_of(result) == ["lora"]
    assert result.matches[0].info["predicted"]["dense"] is None
