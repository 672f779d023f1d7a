"""Sequential calibration: layers make up for what earlier layers lost."""

import copy
import math

import pytest
import torch
from compress_models import stack, tokens
from torch import nn

from nmm_compiler.compress import apply as module
from nmm_compiler.compress.apply import compress
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.errors import OptionTypeError

QUIET = {"progress": False}


def relative_output_error(model, original, batches):
    with torch.no_grad():
        a = torch.cat([model(b) for b in batches])
        b = torch.cat([original(b) for b in batches])
    return float((a - b).norm() / b.norm())


def outputs_at(model, name, batches):
    """Inputs of a layer over batches, [tokens, k]."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen])


def test_a_second_layer_makes_up_for_the_first():
    """Two linears and a ReLU: the second one's optimum given x' is known in closed form.

    Behind 8 of 24 directions x' has at most 24, so least squares on them is the best that any
    second layer of rank 8 can reach once its own SVD is taken; without the original outputs the
    same ranks reach less.
    """
    torch.manual_seed(0)
    layers = (nn.Linear(24, 24, bias=False), nn.ReLU(), nn.Linear(24, 24, bias=False))
    original = nn.Sequential(*layers).double()
    x = torch.randn(500, 24, dtype=torch.float64) * torch.logspace(0, -1, 24)
    errors, models = {}, {}
    for sequential in (False, True):
        model = models[sequential] = copy.deepcopy(original)
        config = CompressionConfig(
            rank=8, method="whitened", sequential=sequential, shrinkage=0.0, damping=1e-12
        )
        report = compress(model, config, calibration=[x[:200], x[200:]], **QUIET)
        with torch.no_grad():
            wanted = original(x)
            errors[sequential] = float((model(x) - wanted).norm() / wanted.norm())
    assert report.layers[1].output_error == pytest.approx(errors[True], rel=1e-6)

    q = torch.linalg.svd(models[True][:2](x).detach(), full_matrices=False)[0]
    tail = torch.linalg.svdvals(q.T @ wanted)[8:].square().sum()
    best = (tail + (wanted - q @ (q.T @ wanted)).square().sum()).sqrt() / wanted.norm()
    assert errors[True] == pytest.approx(float(best), rel=1e-6)
    assert errors[True] < errors[False]


def test_what_is_lost_is_won_back_whole_where_the_inputs_still_have_it():
    """second(x + first(x)): x' = (I + W1') x can be inverted, so nothing is lost for good.

    W* = W2 (I + W1) (I + W1')^-1 has the rank of W2, and the model's output is as it was, whatever
    the first layer lost. Weighing with the new inputs alone cannot do that.
    """

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
            self.second.weight.data = torch.randn(24, 8) @ torch.randn(8, 24)

        def forward(self, x):
            return self.second(x + self.first(x))

    torch.manual_seed(0)
    original, x = Residual().double(), torch.randn(500, 24, dtype=torch.float64)
    errors = {}
    for sequential in (False, True):
        model = copy.deepcopy(original)
        config = CompressionConfig(
            rank=8, method="whitened", sequential=sequential, shrinkage=0.0, damping=0.0
        )
        compress(model, config, calibration=[x], **QUIET)
        with torch.no_grad():
            errors[sequential] = float((model(x) - original(x)).norm() / original(x).norm())
    assert errors[False] > 0.05
    assert errors[True] < 1e-6


def test_sequential_layers_are_least_squares_fits_to_the_original_outputs():
    original, batches = stack(), tokens()
    model = copy.deepcopy(original)
    config = CompressionConfig(
        ratio=0.4, method="whitened", allocation="uniform", align=4, sequential=True,
        shrinkage=0.0, damping=0.0,
    )  # fmt: skip
    report = compress(model, config, calibration=batches, **QUIET)
    by_name = {layer.name: layer for layer in report.layers}
    for name in ("layers.0.down", "layers.1.k"):
        x, seen = (outputs_at(m, name, batches).double() for m in (original, model))
        weight = original.get_submodule(name).weight.detach().double()
        wanted = x @ weight.T
        got = seen @ model.get_submodule(name).weight.detach().double().T
        error = float((got - wanted).norm() / wanted.norm())
        assert by_name[name].output_error == pytest.approx(error, rel=1e-3)
        # The best of this rank: the fit of all ranks, then the SVD of what it gives.
        q = torch.linalg.svd(seen, full_matrices=False)[0]
        fitted = q.T @ wanted
        tail = torch.linalg.svdvals(fitted)[by_name[name].rank :].square().sum()
        left = (wanted - q @ fitted).square().sum()
        best = float((tail + left).sqrt() / wanted.norm())
        assert error == pytest.approx(best, rel=1e-3)


def test_sequential_calibration_helps_the_model():
    original, batches, held_out = stack(depth=4), tokens(12), tokens(4, seed=7)
    errors = {}
    for sequential in (False, True):
        model = copy.deepcopy(original)
        report = compress(model, 0.5, calibration=batches, align=4, sequential=sequential, **QUIET)
        errors[sequential] = relative_output_error(model, original, held_out)
    assert errors[True] < 0.98 * errors[False]
    assert (
        report.ranks()
        == compress(copy.deepcopy(original), 0.5, calibration=batches, align=4, **QUIET).ranks()
    )


def test_sequential_runs_resume_from_the_original_model(tmp_path, monkeypatch):
    batches, keywords = tokens(), {"rank": 8, "method": "whitened", "sequential": True, **QUIET}
    expected = stack()
    compress(expected, calibration=batches, **keywords)
    model, real, count = stack(), module.factorize, [0]

    def interrupted(*a, **k):
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return real(*a, **k)

    monkeypatch.setattr(module, "factorize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(model, calibration=batches, resume=tmp_path, **keywords)
    monkeypatch.setattr(module, "factorize", real)
    with pytest.raises(OptionTypeError, match="original model, loaded again"):
        compress(model, calibration=batches, resume=tmp_path, **keywords)
    fresh = stack()
    compress(fresh, calibration=batches, resume=tmp_path, **keywords)
    for a, b in zip(expected.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_tokens_that_take_another_way_are_not_paired():
    """A router sends tokens to one of two experts; compression changes its mind."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(32, 32)
            self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

        def forward(self, x):
            x = self.before(x.reshape(-1, 32))
            to = x[:, 0] > x[:, 1]
            return torch.cat([self.experts[0](x[to]), self.experts[1](x[~to])])

    torch.manual_seed(0)
    model = Routed()
    report = compress(
        model, rank=4, calibration=tokens(), method="whitened", sequential=True, **QUIET
    )
    assert len(report.compressed) == 3
    assert all(math.isfinite(layer.output_error) for layer in report.layers)
