"""The plan: what "auto" means, which statistics fit, and which matrix keeps how much."""

import pytest
import torch
from torch import nn

from nmm_compiler.compress.calibrate import Statistics
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.layer_calls import Layer
from nmm_compiler.compress.moments import SecondMoment
from nmm_compiler.compress.plan import (
    Measured,
    check_statistics,
    make_plan,
    measure,
    moments_of,
    resolve,
)
from nmm_compiler.compress.predicted_time import given_prices
from nmm_compiler.compress.ranks import parameter_cost
from nmm_compiler.compress.select import Site
from nmm_compiler.errors import CalibrationError, OptionTypeError


@pytest.mark.parametrize(
    ("config", "calibrated", "wanted"),
    [
        ({}, False, ("svd", "uniform", False)),
        ({}, True, ("two-sided", "global", True)),
        ({"budget": "latency"}, False, ("svd", "global", False)),
        ({"sensitivity": "output"}, True, ("whitened", "global", False)),
        ({"allocation": "uniform"}, True, ("whitened", "uniform", False)),
        ({"allocation": "uniform", "method": "two-sided"}, True, ("two-sided", "uniform", True)),
        ({"allocation": "global"}, False, ("svd", "global", False)),
        ({"method": "svd"}, True, ("svd", "global", True)),
        ({"rank": 4}, True, ("whitened", "explicit", False)),
    ],
)
def test_what_auto_means(config, calibrated, wanted):
    ways = resolve(CompressionConfig(**config), calibrated, meta=False)
    assert (ways.method, ways.allocation, ways.gradients) == wanted


@pytest.mark.parametrize(
    ("config", "calibrated", "meta", "names"),
    [
        ({"method": "whitened"}, False, False, "method"),
        ({"method": "two-sided"}, False, False, "method"),
        ({"budget": "latency", "allocation": "uniform"}, False, False, "budget"),
        ({"budget": "latency", "rank": 4}, False, False, "budget"),
        ({}, True, True, "calibration"),
        ({"allocation": "global"}, False, True, "allocation"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(config, calibrated, meta, names):
    with pytest.raises(OptionTypeError, match=names):
        resolve(CompressionConfig(**config), calibrated, meta)


def site(name, weight):
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False)
    linear.weight.data = weight
    return Site((name,), linear, k, n, transposed=False)


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


def plan(sites, collected=None, cost=None, **config):
    config = CompressionConfig(**config)
    ways = resolve(config, collected is not None, meta=False)
    known = Measured()
    measure(known, sites, config, ways, collected, progress=False)
    layers = [Layer(one.name, one.k, one.n) for one in sites]
    prices = None if cost is None else given_prices(layers, cost, (("pass", 1, 1.0),))
    made = make_plan(sites, config, ways, known, prices)
    return made, {decision.name: decision.rank for decision in made.decisions}


ROWS = torch.randn(200, 48, generator=torch.Generator().manual_seed(7))


def test_statistics_of_other_layers_or_sizes_are_refused_by_name():
    sites = [site("a", weight(0)), site("b", weight(1, n=40))]
    config = CompressionConfig()
    ways = resolve(config, calibrated=True, meta=False)
    right = statistics({"a": ROWS, "b": ROWS}, {"a": ROWS, "b": ROWS[:, :40]})
    assert check_statistics(right, sites, config, ways) is right
    for inputs, gradients, words in (
        ({"a": ROWS}, {"a": ROWS, "b": ROWS}, "no inputs of b;"),
        ({"a": ROWS, "b": ROWS[:, :40]}, {"a": ROWS, "b": ROWS}, "no inputs of b;"),
        ({"a": ROWS, "b": ROWS}, {"a": ROWS, "b": ROWS}, "no gradients of b;"),
        ({"a": ROWS, "b": ROWS}, {}, "no gradients of a, b;"),
    ):
        with pytest.raises(CalibrationError, match=words):
            check_statistics(statistics(inputs, gradients), sites, config, ways)
    plain = CompressionConfig(sensitivity="output")
    assert check_statistics(
        statistics({"a": ROWS, "b": ROWS}, {}), sites, plain, resolve(plain, True, False)
    )
    with pytest.raises(OptionTypeError, match="sequential"):
        check_statistics(right, sites, CompressionConfig(sequential=True), ways)


def test_each_method_weighs_errors_by_what_its_name_says():
    one, config = site("a", weight(0)), CompressionConfig()
    collected = statistics({"a": ROWS}, {"a": ROWS})
    known = {
        method: moments_of(one, method, collected, config)
        for method in ("svd", "whitened", "two-sided")
    }
    weighed = {name: (m.inputs is not None, m.gradients is not None) for name, m in known.items()}
    assert weighed == {"svd": (False, False), "whitened": (True, False), "two-sided": (True, True)}


def test_a_layer_without_gradients_stays_dense_and_does_not_count():
    sites = [site("a", weight(0, decay=0.1)), site("unused", weight(1, decay=0.1))]
    collected = statistics({"a": ROWS, "unused": ROWS}, {"a": ROWS})
    made, ranks = plan(sites, collected, ratio=0.3, align=4)
    assert ranks["a"] is not None
    assert ranks["unused"] is None
    (left,) = [decision for decision in made.decisions if decision.name == "unused"]
    assert not left.counted
    assert "does not depend on it" in left.note


def test_a_layer_without_a_legal_rank_stays_dense_and_does_not_count():
    made, ranks = plan([site("a", weight(0, 96, 96)), site("b", weight(1, 24, 24))], align=32)
    assert ranks == {"a": 32, "b": None}
    assert [decision.counted for decision in made.decisions] == [True, False]


def test_align_is_the_callers_where_it_is_given():
    sites = [site("a", weight(0, 256, 256))]
    assert plan(sites)[0].align in (128, 64, 32)
    made, ranks = plan(sites, align=20)
    assert (made.align, ranks["a"] % 20) == (20, 0)


def test_the_first_pattern_that_matches_gives_the_rank_and_the_costs_add_up():
    sites = [site("layers.0.up", weight(0)), site("layers.1.up", weight(1))]
    made, ranks = plan(sites, cost=parameter_cost, rank={"layers.0": 5, "up": 7})
    assert ranks == {"layers.0.up": 5, "layers.1.up": 7}
    (timed,) = made.workload
    assert timed.dense_us == 2 * 48 * 48
    assert timed.us == (5 + 7) * (48 + 48)


def test_without_calibration_matrices_are_compared_by_relative_error():
    """A matrix times 100 is the same matrix; a flat spectrum keeps more than a steep one."""
    flat, steep = weight(0, decay=0.05), weight(1, decay=0.3)
    options = {"allocation": "global", "ratio": 0.5, "align": 1}
    _, ranks = plan([site("flat", flat), site("steep", steep)], **options)
    _, scaled = plan([site("flat", flat / 100), site("steep", steep * 100)], **options)
    assert ranks == scaled
    kept = {name: 48 if rank is None else rank for name, rank in ranks.items()}
    assert kept["flat"] > kept["steep"]


def test_with_gradients_the_layer_that_sees_more_tokens_keeps_more():
    sites = [site("all", weight(0, decay=0.1)), site("few", weight(0, decay=0.1))]
    inputs = {"all": ROWS.repeat(50, 1), "few": ROWS}
    _, ranks = plan(sites, statistics(inputs, {"all": ROWS, "few": ROWS}), ratio=0.5, align=1)
    kept = {name: 48 if rank is None else rank for name, rank in ranks.items()}
    assert kept["all"] > kept["few"]


def test_ranks_follow_the_inputs_that_calibration_saw():
    """Of two equal matrices, the one whose inputs have 6 directions keeps less than the other."""
    narrow = ROWS.clone()
    narrow[:, 6:] *= 1e-4
    sites = [site("narrow", weight(0, decay=0.05)), site("wide", weight(0, decay=0.05))]
    for options in ({}, {"sensitivity": "output"}):
        gradients = {} if options else {"narrow": ROWS, "wide": ROWS}
        collected = statistics({"narrow": narrow, "wide": ROWS}, gradients)
        _, ranks = plan(sites, collected, ratio=0.5, align=1, shrinkage=0.0, **options)
        equal = 0.5 * 48 * 48 // (48 + 48)
        assert ranks["narrow"] < equal < ranks["wide"]
