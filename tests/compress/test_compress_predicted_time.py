"""Predicted times in `compress`: calls made are calls priced, and no layer is made slower."""

import pytest
import torch
from compress_models import stack
from torch import nn
from toy_models import Model, llama

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.predicted_time import Prices, Together, call_us
from nmm_compiler.lowrank_models.ranks import Shape
from nmm_compiler.passes.pipeline import explain
from nmm_compiler.targets import get

ASKED = {"allow_slower": True}


def made_us(model, tokens):
    """Return what each call that the rewriter makes for so many tokens is predicted to take."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    given = {"input_ids": ids, "use_cache": False}
    found = explain(model, given, options={"rules": ["+simulated"]})
    return [match.info["predicted"]["fused"] for match in found.matches]


@pytest.mark.usefixtures("closed_form_only")
def test_the_calls_that_the_backend_makes_are_the_calls_that_were_priced():
    model = llama(768, 1536, dtype=torch.bfloat16)
    report = compress(model, 0.3, workload={"prefill": (64, 1), "decode": (1, 1)}, **ASKED)
    assert len(report.compressed) == 7
    for timed in report.workload:
        made = made_us(model, timed.tokens)
        assert len(made) == 3  # q, k and v; o; the MLP
        assert timed.us == pytest.approx(sum(made))
    assert report.workload[0].us < report.workload[0].dense_us


@pytest.mark.usefixtures("closed_form_only")
def test_times_are_those_of_the_mix():
    model = llama(512, 2048, dtype=torch.bfloat16)
    report = compress(
        model, 0.2, workload={"prefill": (512, 0.2), "decode": (1, 0.8)}, include=["mlp"]
    )
    before = sum(timed.weight * timed.dense_us for timed in report.workload)
    after = sum(timed.weight * timed.us for timed in report.workload)
    weights = {timed.name: timed.weight for timed in report.workload}
    assert weights == {"prefill": 0.2, "decode": 0.8}
    assert sum(layer.us for layer in report.layers) == pytest.approx(after)
    assert sum(layer.dense_us for layer in report.layers) == pytest.approx(before)


def two():
    """A narrow layer, which low rank makes slower, and a wide one."""
    layers = {"narrow": nn.Linear(512, 512), "wide": nn.Linear(512, 4096)}
    return Model(lambda m, x: m.wide(m.narrow(x)), **layers)


BUDGETS = {
    "uniform": {"ratio": 0.2},
    "global": {"ratio": 0.5, "calibration": [torch.randn(8, 512)], "method": "whitened"},
    "given": {"rank": {"narrow": 192, "wide": 256}},
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_layer_is_made_slower_than_dense_unless_asked(budget, monkeypatch):
    def narrow_is_slower(sizes, *_):
        return sum(
            (20.0 if n == 512 else 100.0) * ((1.1 if n == 512 else 0.7) if r else 1)
            for _, n, r in sizes
        )

    monkeypatch.setattr("nmm_compiler.lowrank_models.predicted_time.call_us", narrow_is_slower)
    report = compress(two(), align=64, **BUDGETS[budget])
    ranks = {layer.name: layer.rank for layer in report.layers}
    assert ranks["narrow"] is None
    assert ranks["wide"] is not None
    (narrow,) = [layer for layer in report.layers if layer.name == "narrow"]
    assert narrow.note == "its call would take 22.0 us, dense 20.0: kept dense"
    assert not narrow.counted
    assert report.slower == ()
    asked = compress(two(), align=64, **BUDGETS[budget], **ASKED)
    if budget != "global":  # it does not take what costs time and loss
        assert [layer.name for layer in asked.slower] == ["narrow"]


def test_a_model_in_which_nothing_pays_is_refused(monkeypatch):
    slow = "nmm_compiler.lowrank_models.predicted_time.call_us"
    monkeypatch.setattr(slow, lambda sizes, *_: 10.0 + 5 * sum(r is not None for *_, r in sizes))
    for asked in BUDGETS.values():
        with pytest.raises(ModelError, match=r"all 2 layers .* 512 tokens a call; pass allow"):
            compress(two(), align=64, **asked)
        assert compress(two(), align=64, **asked, **ASKED).compressed


def test_a_call_is_judged_whole_and_shared_out():
    """The table of the report shows the times that decide, to a tenth of a microsecond."""
    layers = (Shape("a", 1024, 1024), Shape("b", 1024, 2048))
    times = {(None, None): 10.0, (4, None): 10.2, (None, 4): 9.9, (4, 4): 10.1, (2, 2): 9.0}
    prices = Prices(
        [Together(layers)],
        (("pass", 1, 1.0),),
        lambda group, ranks, source: (times[ranks.get("a"), ranks.get("b")],),
    )
    assert prices.slower({"a": 4, "b": None}) == {
        "a": "its call would take 10.2 us, dense 10.0: kept dense"
    }
    assert list(prices.slower({"a": 4, "b": 4})) == ["a", "b"]
    assert prices.slower({"a": None, "b": 4}) == prices.slower({"a": 2, "b": 2}) == {}
    shares = prices.shares({"a": 2, "b": 2})
    assert shares["a"] == pytest.approx((10 / 3, 3.0))
    assert shares["b"] == pytest.approx((20 / 3, 6.0))
    assert prices.may_pay("b", 4, {"a": None})
    assert not prices.may_pay("a", 4, {"b": None})


def test_layers_that_latencies_decide_have_no_price(monkeypatch):
    monkeypatch.setattr("nmm_compiler.lowrank_models.predicted_time.groups_of", None)
    report = compress(stack(), 0.3, align=4)
    assert report.compressed
    assert report.workload == ()
    assert "no time is predicted for 8 layers: a DMA's start takes longer" in report.headline()


@pytest.mark.parametrize(
    ("given", "sizes", "tokens", "dtype"),
    [
        ({"ratio": 0.2}, (512, 2048), 512, torch.bfloat16),
        ({"ratio": 0.2}, (1024, 1024), 1, torch.float32),
        ({"rank": 320}, (2048, 512), 1, torch.bfloat16),
        ({"ratio": 0.6}, (1024, 1024), 512, torch.bfloat16),
    ],
)
def test_the_simulator_shows_no_low_rank_layer_slower(given, sizes, tokens, dtype):
    """The closed form is up to a fifth faster for these factors than the simulator."""
    k, n = sizes
    given = {**given, "workload": tokens, "align": 64}

    def model():
        return nn.Sequential(nn.Linear(k, n, bias=False).to(dtype))

    def simulated(rank):
        asked = ((k, n, rank),), "", tokens, str(dtype).removeprefix("torch.")
        return call_us(*asked, get("trn2"), False, "simulated")

    (layer,) = compress(model(), **given, **ASKED).layers
    assert (layer.us, layer.dense_us) == (simulated(layer.rank), simulated(None))
    assert layer.slower == (layer.us > layer.dense_us)
    if layer.slower:
        with pytest.raises(ModelError, match="slower than dense in all 1 layers"):
            compress(model(), **given)
    else:
        assert compress(model(), **given).ranks() == {"0": layer.rank}


def test_a_model_that_cannot_be_traced_says_how_it_was_priced():
    layer = nn.Linear(512, 1024)
    model = Model(lambda m, x: m.layer(x[: int(x.sum().item()) + 3]), layer=layer)
    batch = [torch.zeros(4, 512)]
    report = compress(model, 0.2, calibration=batch, method="whitened", align=64)
    assert report.priced.startswith("each layer as a call of its own")
    assert report.compressed
