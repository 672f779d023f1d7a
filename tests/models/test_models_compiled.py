"""Models of every kind, compressed and compiled: exact counts, and outputs equal to eager."""

import warnings
from collections.abc import Iterator, Mapping

import pytest
import torch
from configurations import KINDS, MODELS
from small_models import RANK, make
from torch import nn

from nmm_compiler import backend
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers

QUICK = (
    "llama", "phi3", "llama4_text", "deepseek_v3", "qwen3_next", "t5", "bert", "vit", "wavlm",
    "clip",
)  # fmt: skip
OPTIONS = {"inner": "eager", "kernels": "lazy", "verify": True}


def tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(value)


def run(model, inputs):
    torch.manual_seed(1)  # some models draw a mask
    return list(tensors(model(**inputs)))


def run_and_count_uses(model, inputs):
    """Return the outputs, and how often a low-rank layer was called."""
    called = []
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, layer in lowrank_layers(model).items()
    ]
    outputs = run(model, inputs)
    for hook in hooks:
        hook.remove()
    return outputs, len(called)


def tolerance(model: nn.Module) -> float:
    """Return how far two correct evaluations may differ, relative to an output's largest value.

    A product of contraction length K, summed in another order, moves its result by about
    eps sqrt(K) of its norm; the products' errors add, twice (two evaluations) and with both signs.
    """
    lengths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    return 4 * torch.finfo(torch.float32).eps * sum(length**0.5 for length in lengths)


def check(name: str) -> None:
    kind, row = MODELS[name]
    model, inputs = make(kind, row)
    compress(model, rank=RANK)
    compiled = torch.compile(model, backend="nmm", options=OPTIONS)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="nmm:.*")  # nothing fell back
        want, uses = run_and_count_uses(model, inputs)
        torch._dynamo.reset()
        got = run(compiled, inputs)
    reports = backend.reports()
    assert [report.fallback for report in reports if report.fallback] == []
    assert row.expected == {
        "layers": sum(isinstance(m, LowRankLinear) for m in model.modules()),
        "uses": uses,
        "chains": sum(report.chains for report in reports),
        "calls": sum(len(report.matches) for report in reports),
        "graphs": len(reports),
    }
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if b.numel() and b.is_floating_point():
            limit = tolerance(model) * max(1.0, float(b.abs().max()))
            assert float((a - b).abs().max()) <= limit  # false for NaN
        else:
            assert torch.equal(a, b)


SLOW = [pytest.param(name, marks=pytest.mark.long) for name in MODELS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_model(name):
    pytest.importorskip("transformers")
    check(name)


def test_the_table_is_large_and_says_why_a_layer_is_not_in_a_call():
    rows = [row for kind in KINDS for row in kind.rows]
    assert len(rows) == len(MODELS) >= 90
    for row in rows:
        counts = row.expected
        if len({counts["layers"], counts["uses"], counts["chains"]}) > 1:
            assert row.note, row.model_type
