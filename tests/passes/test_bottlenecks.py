"""A function between two products: adapters, squeeze-and-excitation, gated ones, as one call."""

import pytest
import torch
import torch.nn.functional as F
from models import LlamaNorm, Model, kernel_calls
from torch import nn

import nmm_compiler as nmm

K, R, N, TOKENS = 256, 32, 192, 24


def bottleneck(act, biases=(True, True)):
    """Return b(act(a(x)))."""
    layers = {"a": nn.Linear(K, R, bias=biases[0]), "b": nn.Linear(R, N, bias=biases[1])}
    return Model(lambda p, x: p.b(p.act(p.a(x))), **layers, act=act).eval()


def rewritten(model, *shape):
    return nmm.rewrite(model, (torch.randn(*shape),), verify=True)


NORMS = {
    "spelled": LlamaNorm,
    "module": lambda r: nn.RMSNorm(r, eps=1e-5),
    "without eps": nn.RMSNorm,
}


@pytest.mark.parametrize("name", NORMS)
def test_latent_attention_is_one_call(name):
    result = rewritten(bottleneck(NORMS[name](R), (False, False)), 2, TOKENS, K)
    (match,) = result.matches
    assert (match.kind, match.info["inner"]) == ("mla", "rms")
    ((call, spec),) = kernel_calls(result.graph_module)
    eps = {"spelled": 1e-6, "module": 1e-5}.get(name, torch.finfo(torch.float32).eps)
    assert call.kwargs["inner_eps"] == spec.inner_eps == eps


@pytest.mark.parametrize(
    ("norm", "rule"),
    [
        (nn.LayerNorm(R), "lowrank"),
        (nn.RMSNorm(R, eps=1e-6, elementwise_affine=False), "lowrank"),
        (LlamaNorm(R), "mla"),  # its first product has a bias
    ],
)
def test_norm_that_no_kernel_computes_is_left_alone(norm, rule):
    result = rewritten(bottleneck(norm), TOKENS, K)
    assert not result.matches
    assert [d.code for d in result.declined if d.rule == rule] == ["between"]


def test_squeeze_and_excitation():
    """Pooled channels, two 1x1 convolutions, a gate of the channels."""

    def function(p, x):
        return x * torch.sigmoid(p.b(F.relu(p.a(x.mean((2, 3), keepdim=True)))))

    model = Model(function, a=nn.Conv2d(256, 16, 1), b=nn.Conv2d(16, 256, 1)).eval()
    (match,) = rewritten(model, 8, 256, 5, 5).matches
    assert (match.kind, match.info["m"], match.info["r"]) == ("adapter", 8, 16)


def test_inner_value_with_another_reader_stays():
    def both(p, x):
        h = F.relu(p.a(x))
        return p.b(h), h

    model = Model(both, a=nn.Linear(K, R), b=nn.Linear(R, N)).eval()
    result = rewritten(model, TOKENS, K)
    assert not result.matches
    assert any(d.code == "other_user" for d in result.declined)
