"""The plan: what "auto" means, which statistics fit, and which matrix keeps how much."""

import pytest
import torch
from torch import nn

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.apply import losses_of, make_plan
from nmm_compiler.lowrank_models.calibrate import Statistics
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.lowrank_models.moments import SecondMoment
from nmm_compiler.lowrank_models.predicted_time import Prices
from nmm_compiler.lowrank_models.select import Site


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, ("svd", "uniform")),
        ({"calibration": []}, ("two-sided", "global")),
        ({"calibration": [], "method": "whitened"}, ("whitened", "global")),
        ({"rank": 4}, ("svd", "explicit")),
        ({"rank": 4, "calibration": []}, ("whitened", "explicit")),
        ({"rank": 4, "calibration": [], "method": "two-sided"}, ("two-sided", "explicit")),
    ],
)
def test_what_auto_means(config, wanted):
    made = CompressionConfig(**config)
    assert (made.method, made.allocation) == wanted


def site(name, weight):
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False)
    linear.weight.data = weight
    return Site((name,), linear, k, n)


def moment(rows):
    made = SecondMoment(rows.shape[1])
    made.add(rows)
    return made


def weight(seed, n=48, k=48, decay=0.0):
    """Singular values e^(-decay i), directions drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(s, s, generator=generator)).Q for s in (n, k))
    size = min(n, k)
    values = torch.exp(-decay * torch.arange(size, dtype=torch.float32))
    return (left[:, :size] * values) @ right[:size]


def statistics(inputs, gradients, **more):
    return Statistics(
        {name: moment(rows) for name, rows in inputs.items()},
        {name: moment(rows) for name, rows in gradients.items()},
        **more,
    )


def plan(sites, collected=None, **config):
    settings = CompressionConfig(calibration=collected, **config)
    unpriced = Prices((), settings.passes, None)
    made, align = make_plan(sites, settings, collected or Statistics({}, {}), unpriced)
    return made, align, {layer.name: layer.rank for layer in made}


ROWS = torch.randn(200, 48, generator=torch.Generator().manual_seed(7))


def test_statistics_of_other_layers_or_sizes_are_refused_by_name():
    sites = [site("a", weight(0)), site("b", weight(1, n=40))]
    right = statistics({"a": ROWS, "b": ROWS}, {"a": ROWS, "b": ROWS[:, :40]})
    right.check(sites, gradients=True)
    for inputs, gradients, words in (
        ({"a": ROWS}, {"a": ROWS, "b": ROWS}, "no inputs of 1 of 2 layers: b;"),
        ({"a": ROWS, "b": ROWS[:, :40]}, {"a": ROWS, "b": ROWS}, "no inputs of 1 of 2 layers: b;"),
        ({"a": ROWS, "b": ROWS}, {"a": ROWS, "b": ROWS}, "no gradients of 1 of 2 layers: b;"),
        ({"a": ROWS, "b": ROWS}, {}, "no gradients of 2 of 2 layers: a, b;"),
    ):
        with pytest.raises(ModelError, match=words):
            statistics(inputs, gradients).check(sites, gradients=True)
    statistics({"a": ROWS, "b": ROWS}, {}).check(sites, gradients=False)


def test_without_calibration_matrices_are_compared_by_relative_error():
    """A matrix times 100 has the same losses; a flat spectrum loses more than a steep one."""
    flat, steep = weight(0, decay=0.05), weight(1, decay=0.3)
    none = Statistics({}, {})
    losses = losses_of([site("flat", flat), site("steep", steep)], "svd", none)
    scaled = losses_of([site("flat", flat / 100), site("steep", steep * 100)], "svd", none)
    for name in ("flat", "steep"):
        assert losses[name] == pytest.approx(scaled[name], abs=1e-5)
        assert (losses[name][0], losses[name][-1]) == (pytest.approx(1.0), 0.0)
    assert losses["flat"][24] > losses["steep"][24]


def test_with_gradients_the_layer_that_sees_more_tokens_keeps_more():
    sites = [site("all", weight(0, decay=0.1)), site("few", weight(0, decay=0.1))]
    inputs = {"all": ROWS.repeat(50, 1), "few": ROWS}
    _, _, ranks = plan(sites, statistics(inputs, {"all": ROWS, "few": ROWS}), ratio=0.5, align=1)
    kept = {name: 48 if rank is None else rank for name, rank in ranks.items()}
    assert kept["all"] > kept["few"]


def test_ranks_follow_the_inputs_that_calibration_saw():
    """Of two equal matrices, the one whose inputs have 6 directions keeps less than the other."""
    narrow = ROWS.clone()
    narrow[:, 6:] *= 1e-4
    sites = [site("narrow", weight(0, decay=0.05)), site("wide", weight(0, decay=0.05))]
    for method in ("two-sided", "whitened"):
        collected = statistics({"narrow": narrow, "wide": ROWS}, {"narrow": ROWS, "wide": ROWS})
        _, _, ranks = plan(sites, collected, ratio=0.5, align=1, method=method)
        equal = 0.5 * 48 * 48 // (48 + 48)
        assert ranks["narrow"] < equal < ranks["wide"]
