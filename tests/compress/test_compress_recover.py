"""Recovery: it helps on held-out data, never hurts it, and puts everything back."""

import copy
import math

import pytest
import torch
from compress_models import stack, tokens
from torch import nn
from toy_models import Model, ModelOfAnyInputs

from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.recover import recover


def pair(dtype=torch.float32, teacher=None):
    """Return a compressed copy of a model, and the model."""
    teacher = (teacher or stack()).to(dtype)
    model = copy.deepcopy(teacher)
    compress(model, 0.5, align=4, exclude=["head"] if hasattr(teacher, "head") else [])
    return model, teacher


def data(dtype=torch.float32, count=12):
    return [batch.to(dtype) for batch in tokens(count)]


def of_features(model, teacher, batch):
    wanted = teacher(batch).float()
    return (model(batch) - wanted).square().mean() / wanted.square().mean()


def of_logits(model, teacher, batch):
    p, q = (one(batch)["logits"].log_softmax(-1).flatten(0, 1) for one in (teacher, model))
    return (p.exp() * (p - q)).sum(-1).mean()


def of_labels(model, teacher, batch):
    ids = batch["input_ids"]
    logits = model(ids)["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def with_logits():
    parts = {"body": stack(), "head": nn.Linear(32, 50)}
    return Model(lambda m, x: {"logits": m.head(m.body(x))}, **parts)


def of_ids():
    parts = {"embed": nn.Embedding(40, 32), "body": stack(), "head": nn.Linear(32, 40)}
    return ModelOfAnyInputs(lambda m, input_ids: {"logits": m.head(m.body(m.embed(input_ids)))},
                            **parts)  # fmt: skip


IDS = [{"input_ids": torch.arange(20).repeat(2, 1) + i % 3} for i in range(12)]


@pytest.mark.parametrize(
    ("original", "dtype", "batches", "loss"),
    [
        *((stack, dtype, data(dtype), of_features) for dtype in (torch.float32, torch.bfloat16)),
        (with_logits, torch.float32, data(), of_logits),
        (of_ids, torch.float32, IDS, of_labels),  # which needs no teacher
    ],
)
def test_recovery_lowers_the_held_out_loss(original, dtype, batches, loss):
    model, teacher = pair(dtype, original())
    before, given = copy.deepcopy(model), None if loss is of_labels else teacher
    report = recover(model, batches, teacher=given, steps=60, lr=3e-3)
    assert report.validation_after < 0.8 * report.validation_before
    assert report.objective == loss.__name__.removeprefix("of_")
    with torch.no_grad():
        wanted = float(loss(model, teacher, batches[-1]))  # the last tenth, at least one
    assert report.validation_after == pytest.approx(wanted, rel=1e-3)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert [n for n, _ in model.named_modules()] == [n for n, _ in before.named_modules()]
    biases = {n: p for n, p in before.named_parameters() if n.endswith("bias")}
    assert all(torch.equal(model.get_parameter(n), p) for n, p in biases.items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_rate_that_is_too_high_is_cut_until_it_helps():
    model, teacher = pair()
    report = recover(model, data(), teacher=teacher, steps=10, lr=1.0)
    assert report.validation_after <= report.validation_before
    model, teacher = pair()
    report = recover(model, data(), teacher=teacher, steps=100, lr=1.0)
    assert report.history[1][1] > report.history[0][1]
    assert report.validation_after < 0.9 * report.validation_before


def test_an_interrupt_keeps_the_best_factors(monkeypatch):
    model, teacher = pair()
    calls = 0
    forward = type(model).forward

    def interrupted(self, x):
        nonlocal calls
        calls += self is model
        if calls > 30:
            raise KeyboardInterrupt
        return forward(self, x)

    monkeypatch.setattr(type(model), "forward", interrupted)
    model.train()
    with pytest.raises(KeyboardInterrupt):
        recover(model, data(), teacher=teacher, steps=200)
    monkeypatch.undo()
    assert model.training
    assert type(model.layers[0].q.up) is nn.Linear
    assert torch.isfinite(model(data()[0])).all()


def nan_in_a_batch():
    bad = data()
    bad[0][0, 0, 0] = math.nan
    return bad


ONE = pair()[0]


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"model": stack()}, ModelError, "compress on it before"),
        ({"model": ONE, "teacher": ONE}, OptionTypeError, "original model"),
        ({"teacher": "original"}, OptionTypeError, "teacher"),
        ({"teacher": Model(lambda m, x: x[..., :24])}, ModelError, "output is"),
        ({"data": data(count=1)}, ModelError, "none to train on"),
        ({"data": nan_in_a_batch(), "steps": 50}, ModelError, "loss is nan"),
        ({"steps": 0}, OptionTypeError, "steps"),
        ({"teacher": None}, ModelError, "needs labels or input_ids"),
    ],
)
def test_bad_input_is_refused(changed, error, text):
    model, teacher = pair()
    with pytest.raises(error, match=text):
        recover(**{"model": model, "data": data(), "teacher": teacher, **changed})
    assert all(torch.isfinite(v).all() for v in model.state_dict().values())


def test_an_endless_iterator_gives_as_many_batches_as_there_are_steps():
    model, teacher = pair()
    taken = []

    def endless():
        while True:
            taken.append(0)
            yield data(count=1)[0] * (1 + len(taken))

    recover(model, endless(), teacher=teacher, steps=20)
    assert len(taken) == 22
