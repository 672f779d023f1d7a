"""`compress` on whole models: what is replaced, what is left alone, and what is refused."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from compress_models import stack, tokens
from torch import nn

from nmm_compiler.compress import apply as module
from nmm_compiler.compress.apply import compress
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.modules import LowRankLinear
from nmm_compiler.errors import (
    CalibrationError,
    FactorsFileError,
    NoMatchingModulesError,
    OptionTypeError,
    RankError,
    ShapeError,
    UnknownNameError,
    WeightError,
)

QUIET = {"progress": False}


def lowrank(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRankLinear)}


def relative_output_error(model, original, batches):
    with torch.no_grad():
        a = torch.cat([model(b) for b in batches])
        b = torch.cat([original(b) for b in batches])
    return float((a - b).norm() / b.norm())


def test_every_linear_becomes_two_and_the_report_says_so():
    model = stack()
    biases = model.layers[0].q.bias
    report = compress(model, 0.2, align=4, **QUIET)
    assert len(lowrank(model)) == len(report.layers) == 8
    assert 0.2 <= report.achieved_ratio < 0.3
    assert report.model_parameters_after == sum(p.numel() for p in model.parameters())
    q = model.layers[0].q
    assert q.bias is biases
    assert model.layers[0].k.bias is None
    assert [type(child) for child in q.children()] == [nn.Linear, nn.Linear]
    assert report.ranks()["layers.0.q"] == q.rank
    for layer in report.layers:
        # Both are the same error, but for the rounding of the factors to float32.
        assert layer.weight_error == pytest.approx(layer.theory_error, abs=1e-5)
        assert layer.rank % 4 == 0
    assert "8 of 8 matrices" in report.summary()
    assert "layers.1.down" in str(report)


def test_full_information_is_kept_at_low_rank():
    """A matrix of rank 3 is the same after compression to rank 4."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh())
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(30, 3) @ torch.randn(3, 20))
    x = torch.randn(5, 20)
    before = model(x)
    compress(model, rank=4, **QUIET)
    eps = torch.finfo(torch.float32).eps
    assert (model(x) - before).abs().max() <= 50 * eps * 20


def test_weight_property_and_merge_are_the_product():
    model = stack()
    compress(model, 0.3, align=4, **QUIET)
    layer = model.layers[0].up
    x = torch.randn(7, 32)
    eps = torch.finfo(torch.float32).eps
    norms = layer.down.weight.detach().norm() * layer.up.weight.detach().norm()
    bound = 4 * eps * 32 * float(norms * x.norm())
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert (layer(x) - expected).norm() <= bound
    merged = layer.merge()
    assert type(merged) is nn.Linear
    assert (merged(x) - layer(x)).norm() <= bound
    assert (layer.in_features, layer.out_features) == (32, 64)
    assert f"rank={layer.rank}" in repr(layer)
    with pytest.raises(ShapeError):
        LowRankLinear.from_factors(torch.zeros(3, 4), torch.zeros(5, 2))


def test_calibrated_methods_are_better_where_they_should_be():
    original, batches = stack(), tokens()
    held_out = tokens(seed=7)
    errors = {}
    for name, keywords in {
        "plain": {"method": "svd", "allocation": "uniform"},
        "whitened": {"method": "whitened", "allocation": "uniform"},
        "global": {},
    }.items():
        model = copy.deepcopy(original)
        report = compress(model, 0.3, calibration=batches, align=4, **keywords, **QUIET)
        assert report.achieved_ratio >= 0.3
        assert report.calibration_tokens == 320
        errors[name] = relative_output_error(model, original, held_out)
    assert errors["whitened"] < 0.8 * errors["plain"]
    assert errors["global"] < errors["whitened"]


def test_output_error_is_the_measured_error_of_the_layer():
    model, batches = stack(), tokens()
    original = copy.deepcopy(model)
    report = compress(
        model, 0.3, calibration=batches, method="whitened", allocation="uniform", align=4, **QUIET
    )
    x = torch.cat([b.reshape(-1, 32) for b in batches])
    exact = x @ original.layers[0].q.weight.detach().T
    got = x @ model.layers[0].q.weight.detach().T
    measured = float((got - exact).norm() / exact.norm())
    assert report.layers[0].output_error == pytest.approx(measured, rel=1e-3)


def test_ranks_and_configs():
    model = stack()
    report = compress(model, rank={"up": 8, "layers.1.down": 4}, **QUIET)
    assert report.ranks() == {"layers.0.up": 8, "layers.1.up": 8, "layers.1.down": 4}
    assert {x.note for x in report.layers if x.rank is None} == {"no rank given: kept dense"}
    model = stack()
    report = compress(model, CompressionConfig(ratio=0.3, align=8), include="up", **QUIET)
    assert report.ranks() == {"layers.0.up": 8, "layers.1.up": 8}
    model = stack()
    report = compress(model, rank=16, include="q", **QUIET)  # 16 * 64 = 32 * 32: saves nothing
    assert not report.ranks()
    assert "break-even" in report.layers[0].note


def test_ratio_zero_changes_nothing():
    model = stack()
    before = copy.deepcopy(model.state_dict())
    for keywords in ({}, {"calibration": tokens(1)}):
        report = compress(model, 0, **keywords, **QUIET)
        assert report.achieved_ratio == 0.0
        assert not report.compressed
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_tied_shared_converted_and_foreign_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.body = nn.Linear(32, 32)
            self.again = self.body  # one module, two names
            self.attention = nn.MultiheadAttention(32, 2)
            self.hooked = nn.Linear(32, 32)
            self.hooked.register_forward_hook(lambda *a: None)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.embed.weight
            self.done = LowRankLinear(32, 4, 32)

        def forward(self, ids):
            return self.head(self.again(self.body(self.embed(ids))))

    model = Tied()
    report = compress(model, 0.3, align=4, **QUIET)
    assert [layer.name for layer in report.layers] == ["body"]
    assert model.body is model.again
    assert isinstance(model.body, LowRankLinear)
    reasons = {skip.name: skip.reason for skip in report.skipped}
    assert "tied to embed.weight" in reasons["head"]
    assert "already low-rank (rank 4)" in reasons["done"]
    assert "never calls it" in reasons["attention.out_proj"]
    assert "MultiheadAttention multiplies" in reasons["attention"]
    assert "hooks" in reasons["hooked"]
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 50)


def test_stacked_experts_are_refused_by_name():
    class ToyExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = nn.Parameter(torch.zeros(4, 8, 8))

    model = nn.Sequential(ToyExperts(), nn.Linear(32, 32))
    report = compress(model, 0.3, align=4, **QUIET)
    assert "ToyExperts stacks its experts" in report.skipped[0].reason
    with pytest.raises(NoMatchingModulesError, match="stacks its experts"):
        compress(nn.Sequential(ToyExperts()), 0.3, **QUIET)


def test_meta_models_get_shapes_only():
    with torch.device("meta"):
        model = stack()
    report = compress(model, 0.2, align=4, **QUIET)
    assert all(p.is_meta for p in model.parameters())
    assert report.achieved_ratio >= 0.2
    real = stack()
    assert compress(real, 0.2, align=4, **QUIET).ranks() == report.ranks()
    with torch.device("meta"):
        model = stack()
    with pytest.raises(OptionTypeError, match="meta"):
        compress(model, 0.2, calibration=tokens(1), **QUIET)


def test_dtype_training_mode_and_gradients_carry_over():
    model = stack().to(torch.bfloat16).train()
    model.layers[0].q.weight.requires_grad_(False)
    report = compress(model, 0.3, align=4, **QUIET)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.layers[0].up.down.training
    assert not model.layers[0].q.up.weight.requires_grad
    assert model.layers[0].q.bias.requires_grad
    assert model.layers[0].up.down.weight.requires_grad
    eps = torch.finfo(torch.bfloat16).eps
    for layer in report.layers:  # rounding both factors adds at most about eps of |W|
        assert layer.weight_error <= math.hypot(layer.theory_error, 2 * eps) + 1e-6
    model = stack()
    compress(model, 0.3, align=4, dtype=torch.float16, include="q", **QUIET)
    assert model.layers[0].q.weight.dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"ratio": 1.0}, OptionTypeError, r"ratio.*1\.0.*\[0, 1\)"),
        ({"ratio": -0.1}, OptionTypeError, "ratio"),
        ({"ratio": math.nan}, OptionTypeError, "ratio"),
        ({"ratio": "0.2"}, OptionTypeError, "ratio"),
        ({"ratio": 0.2, "rank": 4}, OptionTypeError, "not both"),
        ({"rank": 0}, OptionTypeError, "rank"),
        ({"rank": {"q": 2.5}}, OptionTypeError, "rank"),
        ({"rank": {"qq": 4}}, RankError, "'qq' matches none"),
        ({"method": "whitend"}, UnknownNameError, "did you mean 'whitened'"),
        ({"method": "whitened"}, OptionTypeError, "calibration="),
        ({"allocation": "globl"}, UnknownNameError, "did you mean 'global'"),
        ({"align": 0}, OptionTypeError, "align"),
        ({"dtype": torch.int8}, OptionTypeError, "dtype"),
        ({"calibration": []}, CalibrationError, "no batches"),
        ({"include": "gate"}, NoMatchingModulesError, r"'gate' matches no linear.*layers\.0\.q"),
        ({"exclude": "layers"}, NoMatchingModulesError, r"linear layers seen: layers\.0\.q"),
        ({"filter_fn": lambda m, n: False}, NoMatchingModulesError, "seen"),
        ({"budget": "latency", "allocation": "uniform"}, OptionTypeError, "global"),
        ({"ratio": 0.2, "align": 128}, RankError, "align=128"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(arguments, error, text):
    model = stack()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=text):
        compress(model, **arguments, **QUIET)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], v) for k, v in after.items())


def test_models_without_linears_and_bad_weights():
    with pytest.raises(NoMatchingModulesError, match=r"no nn\.Linear or Conv1D"):
        compress(nn.Sequential(nn.ReLU()), 0.2, **QUIET)
    with pytest.raises(NoMatchingModulesError, match="wrap it"):
        compress(nn.Linear(32, 32), 0.2, align=4, **QUIET)
    with pytest.raises(OptionTypeError, match="Module"):
        compress("model", 0.2)
    model = stack()
    model.layers[1].up.weight.data[2, 2] = math.nan
    with pytest.raises(WeightError, match=r"layers\.1\.up"):
        compress(model, 0.2, align=4, **QUIET)
    assert not lowrank(model)


def test_a_latency_budget_uses_the_cost_given():
    calls = []

    def cost(k, n, rank):
        calls.append((k, n, rank))
        return float(k * n if rank is None else rank * (k + n))

    model = stack()
    report = compress(model, 0.2, budget="latency", cost=cost, align=4, **QUIET)
    assert calls
    assert report.cost_after <= 0.8 * report.cost_before
    assert "the layers' calls, predicted: pass of 512 tokens" in str(report)


def test_an_interrupt_leaves_a_working_model_and_resume_continues(tmp_path, monkeypatch):
    reference, batches = stack(), tokens()
    keywords = {"calibration": batches, "align": 4, **QUIET}
    expected = compress(reference, 0.3, **keywords)
    target = next(i for i, x in enumerate(expected.layers) if x.rank and i >= 2)
    real, count = module.factorize, [0]

    def interrupted(*a, **k):
        count[0] += 1
        if count[0] == target:
            raise KeyboardInterrupt
        return real(*a, **k)

    model = stack()
    monkeypatch.setattr(module, "factorize", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        compress(model, 0.3, resume=tmp_path / "run", **keywords)
    assert f"{len(expected.layers)} layers are done" in caught.value.__notes__[0]
    monkeypatch.setattr(module, "factorize", real)
    assert torch.isfinite(model(batches[0])).all()
    partial = len(lowrank(model))
    assert 0 < partial < len(expected.compressed)

    # A new process: a dense model, the same call.
    fresh = stack()
    monkeypatch.setattr(module, "factorize", lambda *a, **k: (count.append(1), real(*a, **k))[1])
    report = compress(fresh, 0.3, resume=tmp_path / "run", **keywords)
    assert len(count) - 1 == len(expected.compressed) - partial
    assert report == expected
    for (name, a), b in zip(
        reference.state_dict().items(), fresh.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name

    # The same process: the partly compressed model goes on.
    report = compress(model, 0.3, resume=tmp_path / "run", **keywords)
    assert report.ranks() == expected.ranks()
    assert len(lowrank(model)) == len(expected.compressed)
    # Everything done: nothing is computed again.
    with monkeypatch.context() as patch:
        for name in ("collect", "factorize", "make_plan"):
            patch.setattr(module, name, None)
        report = compress(stack(), 0.3, resume=tmp_path / "run", **keywords)
    assert report.ranks() == expected.ranks()

    with pytest.raises(FactorsFileError, match=r"other settings \(ratio 0\.3 -> 0\.4\)"):
        compress(stack(), 0.4, resume=tmp_path / "run", **keywords)
    with pytest.raises(FactorsFileError, match="other layers"):
        compress(stack(), 0.3, resume=tmp_path / "run", exclude="q", **keywords)
    (tmp_path / "run" / "plan.json").write_text("{")
    with pytest.raises(FactorsFileError, match="not a plan"):
        compress(stack(), 0.3, resume=tmp_path / "run", **keywords)


def test_layers_that_cannot_be_judged_or_factorized_stay_dense_and_do_not_count():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pooler = stack(), nn.Linear(32, 32)

        def forward(self, x):
            hidden = self.body(x)
            return {"last_hidden_state": hidden, "pooled": self.pooler(hidden)}

    torch.manual_seed(0)
    model = Pooled()
    report = compress(model, 0.3, calibration=tokens(), align=4, **QUIET)
    pooler = {layer.name: layer for layer in report.layers}["pooler"]
    assert pooler.rank is None
    assert not pooler.counted
    assert "does not depend" in pooler.note
    assert report.achieved_ratio >= 0.3
    both = lambda out, batch: torch.cat(list(out.values()), dim=-1)  # noqa: E731
    report = compress(Pooled(), 0.3, calibration=tokens(), output=both, align=4, **QUIET)
    assert all(layer.counted for layer in report.layers)

    report = compress(stack(), 0.2, align=16, **QUIET)  # 32 x 32 breaks even below 16
    assert {layer.name for layer in report.layers if not layer.counted} == {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("q", "k")
    }
    assert "no multiple of 16" in report.layers[0].note
    assert report.achieved_ratio >= 0.2


def test_statistics_collected_once_serve_many_calls():
    batches = tokens()
    statistics = module.calibrate(stack(), batches, progress=False)
    for ratio in (0.2, 0.4):
        a, b = stack(), stack()
        first = compress(a, ratio, calibration=statistics, align=4, **QUIET)
        assert first == compress(b, ratio, calibration=batches, align=4, **QUIET)
        assert torch.equal(a(batches[0]), b(batches[0]))
    with pytest.raises(CalibrationError, match=r"no inputs of layers\.0\.q"):
        compress(stack(width=48), 0.2, calibration=statistics, align=4, **QUIET)
    partial = module.calibrate(stack(), batches, exclude="q", gradients=False, progress=False)
    with pytest.raises(CalibrationError, match=r"no inputs of layers\.0\.q, layers\.1\.q"):
        compress(stack(), 0.2, calibration=partial, align=4, **QUIET)
    with pytest.raises(CalibrationError, match="gradients=True"):
        compress(stack(), 0.2, calibration=partial, exclude="q", align=4, **QUIET)
    with pytest.raises(OptionTypeError, match="sequential"):
        compress(stack(), 0.2, calibration=statistics, sequential=True, align=4, **QUIET)


@pytest.mark.parametrize(
    "first", [pytest.param("compress.modules", marks=pytest.mark.long), "compress.hf", "errors"]
)
def test_the_door_s_name_is_callable_whatever_was_imported_first(first):
    code = (
        f"import nmm_compiler, nmm_compiler.{first}\n"
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "nmm_compiler.compress(model, 0.3, align=4, progress=False)\n"
        "from nmm_compiler.compress.modules import LowRankLinear\n"
        "nmm_compiler.compress(torch.nn.Sequential(torch.nn.Linear(32, 32)), 0.3, align=4)\n"
        "assert isinstance(model[0], LowRankLinear)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
