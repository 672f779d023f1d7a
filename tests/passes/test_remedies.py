"""Each code's remedy, applied: the place that was refused with it fuses then."""

import models
import pytest
import torch
import torch.nn.functional as F
import toy_models
from models import VERIFIED, Backend, codes_of, kinds_of, trace_and_run
from torch import nn
from torch.nn.utils.fusion import fuse_linear_bn_eval
from torch.utils.checkpoint import checkpoint

import nmm_compiler as nmm
from nmm_compiler.passes.chains.safety import REMEDIES
from nmm_compiler.passes.pipeline import explain, rewrite

L = F.linear
X = torch.randn(2, 6, 64)


SHAPES = {
    "a": (8, 64), "b": (48, 8), "c": (6, 64), "d": (48, 6), "w": (48, 64),
    "s": (8,), "bias": (8,), "odd": (4, 8, 8), "large": (40, 64),
    "small": (64, 40), "experts": (4, 64, 8), "backs": (4, 8, 48),
    "low": torch.randn(48, 8).bfloat16(),
}  # fmt: skip


def model_of(function):
    return models.Model(function, **SHAPES).requires_grad_(False)


def chain(p, x):
    return L(L(x, p.a), p.b)


def chain2(p, x):
    return L(L(x, p.c), p.d)


def adapted(p, x):
    return L(x, p.w) + chain(p, x)


def seen_sum(p, x):
    y = L(x, p.w)
    seen = y.view(-1)
    y += chain(p, x)
    return y, seen


def out_of_place(p, x):
    y = L(x, p.w)
    return y + chain(p, x), y.view(-1)


def written(p, x):
    z = x * 1.5
    h = L(z, p.a)
    z.add_(1.0)
    return L(h, p.b), z


def written_behind(p, x):
    z = x * 1.5
    y = chain(p, z)
    z.add_(1.0)
    return y, z


def read_twice(p, x):
    h = L(x, p.a)
    return L(h, p.b), h.sum()


# Code: pairs of (refused, mended). Each function takes the model and x.
APPLIED = {
    "other_user": [(read_twice, lambda p, x: (chain(p, x), x.sum()))],
    "mutation": [
        (seen_sum, out_of_place), (written, written_behind)],
    "dtype": [
        (lambda p, x: L(2 * L(x.bfloat16(), p.a.bfloat16()).float(), p.b),
         lambda p, x: L((2 * L(x.bfloat16(), p.a.bfloat16()).float()).bfloat16(), p.low)),
        (lambda p, x: L(L(x.double(), p.a.double()), p.b.double()), chain)],
    "rank_too_large": [
        (lambda p, x: L(L(x, p.large), p.small),
         lambda p, x: L(L(x, p.large[:24]), p.small[:, :24]))],
    "other_x": [
        (lambda p, x: L(x.flip(1), p.w) + chain(p, x), adapted),
        (lambda p, x: F.silu(chain(p, x.flip(1))) * chain2(p, x),
         lambda p, x: F.silu(chain(p, x)) * chain2(p, x))],
    "order": [
        (lambda p, x: L(x, p.w + p.b @ p.a), adapted)],
    "weight": [
        (lambda p, x: L(L(x, p.a), p.b * x.mean()), lambda p, x: L(L(x, p.a), p.b) * x.mean()),
        (lambda p, x: L(L(x, p.a), p.odd.transpose(0, 1).reshape(32, 8)),
         lambda p, x: L(L(x, p.a), p.odd.view(32, 8))),
        (lambda p, x: torch.bmm(torch.bmm(x, p.experts[:2]), p.backs[:2]),
         lambda p, x: x @ p.experts[0] @ p.backs[0])],
    "shape": [
        (lambda p, x: L(torch.softmax(x @ x.mT, -1) @ L(x, p.a), p.b),
         lambda p, x: chain(p, torch.softmax(x @ x.mT, -1) @ x))],
    "between": [
        (lambda p, x: L(L(x, p.a) + 1, p.b), lambda p, x: L(L(x, p.a) + p.bias, p.b)),
        (lambda p, x: L(L(x, p.a)[:, -1], p.b), lambda p, x: L(L(x[:, -1], p.a), p.b)),
        (lambda p, x: L(L(x, p.a).cumsum(-1), p.b),
         lambda p, x: L(L(x, p.a), p.b.flip(1).cumsum(1).flip(1))),
        (lambda p, x: L(torch.relu(2.0 * L(x, p.a, p.bias)), p.b),
         lambda p, x: L(torch.relu(L(x, 2.0 * p.a, 2.0 * p.bias)), p.b)),
        (lambda p, x: L(L(x, p.a) / p.s, p.b), lambda p, x: L(L(x, p.a) * (1 / p.s), p.b))],
    "no_kernel": [
        (lambda p, x: torch.tanh(chain(p, x)) * chain2(p, x),
         lambda p, x: F.silu(chain(p, x)) * chain2(p, x)),
        (lambda p, x: F.silu(2.0 * L(x, p.w)) * chain(p, x),
         lambda p, x: F.silu(L(x, 2.0 * p.w)) * chain(p, x))],
}  # fmt: skip
PAIRS = [
    pytest.param(code, *pair, id=f"{code}-{number}")
    for code, pairs in APPLIED.items()
    for number, pair in enumerate(pairs)
]


def traced(function, x):
    return rewrite(model_of(function), (x,), options=VERIFIED)


@pytest.mark.parametrize(("code", "refused", "mended"), PAIRS)
def test_the_remedy_helps(code, refused, mended):
    told = traced(refused, X).declined
    assert code in [d.code for d in told], told
    assert all(d.remedy == REMEDIES[d.code] for d in told)
    after = traced(mended, X)
    assert after.matches
    assert code not in codes_of(after), after.declined


def test_every_code_has_a_test():
    """The others are below, in test_own_rules, test_prices, test_quantized and others."""
    elsewhere = {"region", "device", "training", "slower", "pattern", "internal", "few_bits"}
    assert {*APPLIED} | elsewhere == {*REMEDIES}


def test_a_refusal_names_the_operation_and_its_line():
    (refused,) = rewrite(model_of(lambda p, x: L(L(x, p.a)[:, -1], p.b)), (X,)).declined
    assert (refused.code, refused.reason) == ("between", "getitem between the products") or (
        "select" in refused.reason
    )
    file, _, line = refused.source.rpartition(":")
    assert file == toy_models.__file__
    assert int(line) > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda p, x: checkpoint(lambda h: L(h, p.b), L(x, p.a), use_reentrant=False),
        lambda p, x: L(checkpoint(lambda y: L(y, p.a), x, use_reentrant=False), p.b),
    ],
)
def test_products_on_two_sides_of_an_operator_are_left_alone(function):
    assert not explain(model_of(function), X).matches


def normed(x):
    return F.layer_norm(x, (64,))


# Code: (the rule, refused, mended), of rules that have to be asked for.
ENDS = [
    ("shape", "norm", lambda p, x: chain(p, F.layer_norm(x.mT, (6,)).mT),
     lambda p, x: chain(p, normed(x))),
    ("shape", "residual",
     lambda p, x: chain(p, x).transpose(0, 1) + 2 * x[..., :48].transpose(0, 1),
     lambda p, x: (chain(p, x) + 2 * x[..., :48]).transpose(0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "rule", "refused", "mended"), ENDS)
def test_a_norm_or_a_residual_goes_into_the_call(code, rule, refused, mended):
    options = {**VERIFIED, "rules": ["+norms"]}
    before, after = (rewrite(model_of(f), (X,), options=options) for f in (refused, mended))
    assert [d.code for d in before.declined if d.rule == rule] == [code]
    assert rule not in kinds_of(before)
    assert rule in kinds_of(after)
    assert not [d for d in after.declined if d.rule == rule]


def test_a_model_in_eval_mode():
    model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.1), nn.Linear(8, 48))
    (refused,) = trace_and_run(model.train(), X).declined
    assert refused.code == "training"
    assert rewrite(model.eval(), (X,), options=VERIFIED).matches


def test_a_batch_norm_in_the_layer_before():
    first, norm, last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 48)
    model = nn.Sequential(first, norm, last).eval().requires_grad_(False)
    assert codes_of(rewrite(model, (X[0],))) == ["between"]
    mended = nn.Sequential(fuse_linear_bn_eval(first, norm), last).eval().requires_grad_(False)
    assert kinds_of(rewrite(mended, (X[0],), options=VERIFIED)) == ["lowrank"]


@torch.no_grad()
def collected(function, *inputs, dynamic=None):
    found = Backend()
    torch.compile(function, backend=found, dynamic=dynamic)(*inputs)
    return found[0]


def test_weights_with_static_sizes():
    def function(x, w, u, v):
        return x @ w + x @ u @ v

    x, *weights = torch.randn(5, 64), torch.randn(64, 48), torch.randn(64, 8), torch.randn(8, 48)
    refused = collected(function, x, *weights, dynamic=True)
    assert {d.code for d in refused.declined} == {"weight"}
    assert collected(function, x, *weights, dynamic=None).matches
    for weight in weights:
        torch._dynamo.mark_static(weight)
    assert collected(function, x, *weights, dynamic=True).matches


def test_a_transform_of_rewritten_code():
    model = model_of(chain)
    found = explain(lambda x: torch.func.vmap(lambda row: chain(model, row))(x), X)
    assert codes_of(found) == ["region"]
    row = nmm.rewrite(model, (X[0],))
    assert kinds_of(row) == ["lowrank"]
    got = torch.func.vmap(row.graph_module)(X)
    torch.testing.assert_close(got, model(X), rtol=1e-5, atol=1e-5)


def test_plain_tensors():
    class Sub(torch.Tensor):
        pass

    sub = X.as_subclass(Sub)
    assert codes_of(trace_and_run(model_of(chain), sub)) == ["device"]
    assert trace_and_run(model_of(chain), sub.as_subclass(torch.Tensor)).matches
