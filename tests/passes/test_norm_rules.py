"""Rules `norm` and `residual`: what goes into the calls, what stays outside, and why."""

import pytest
import torch
from models import LlamaNorm, Model, Pair, codes_of, kinds_of
from torch import nn
from torch.nn import functional

from nmm_compiler import rewrite

K, RANK = 64, 16
X = torch.randn(2, 8, K, generator=torch.Generator().manual_seed(0))
ON = {"rules": ["+norms"], "strict": True}


def factors(k=K, r=RANK, n=K):
    return Pair(k, r, n)


def gemma(p, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (h * (1.0 + p.weight.float())).type_as(x)


NORMS = {
    "llama": lambda: LlamaNorm(K, 1e-5),
    "gemma": lambda: Model(gemma, weight=(K,)),
    "rms_module": lambda: nn.RMSNorm(K, eps=1e-5),
    "layer_module": lambda: nn.LayerNorm(K),
    "layer_plain": lambda: nn.LayerNorm(K, elementwise_affine=False),
}


def block(norm, readers=2):
    """Return x + p(norm(x)), and q(norm(x)) for a second reader of the norm."""

    def function(p, x):
        h = p.norm(x)
        first, *rest = (part(h) for part in p.parts)
        return (x + first, *rest)

    return Model(function, norm=norm, parts=nn.ModuleList(factors() for _ in range(readers)))


@torch.no_grad()
def rewritten(module, *inputs, **options):
    return rewrite(module.eval(), inputs, options=ON | options, verify=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_every_spelling_goes_into_the_call(name, dtype):
    module = block(NORMS[name](), readers=1).to(dtype)
    result = rewritten(module, X.to(dtype))
    assert kinds_of(result) == ["lowrank", "norm", "residual"]
    code = result.graph_module.code
    assert "norm = 'layer'" in code if "layer" in name else "norm = 'rms'" in code
    assert ("norm_offset = 1.0" in code) == (name == "gemma")
    assert not any(word in code for word in ("rsqrt", "mean", "aten.add", "norm.default"))


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [
        (("+norms",), ["shared_x", "norm"]),
        (("+norms", "-shared_x"), ["lowrank", "norm", "lowrank", "norm", "residual"]),
    ],
)
def test_a_norm_of_several_readers_goes_into_their_calls(rules, kinds):
    result = rewritten(block(LlamaNorm(K, 1e-5)), X, rules=rules)
    assert kinds_of(result) == kinds
    assert "rsqrt" not in result.graph_module.code


def test_a_norm_that_many_tokens_would_wait_for_stays():
    """The first product waits for all of x, which costs more than a pass over HBM."""
    module = nn.Sequential(nn.RMSNorm(2048, eps=1e-5), factors(2048, 512, 2048)).eval()
    few, many = (rewrite(module, (torch.randn(m, 2048),), options=ON) for m in (1, 512))
    assert kinds_of(few) == ["lowrank", "norm"]
    assert kinds_of(many) == ["lowrank"]
    assert codes_of(many) == ["slower"]


def x_is_written_in_between(m, x):
    y = x * 2.0
    h = m.norm(y)
    y.add_(1.0)
    return m.part(h), y


def sum_in_place(m, x):
    h = x * 2.0
    h += m.part(x)
    return h


# What test_remedies.py mends is there; what another layer reads is in examples/gallery/norms.py.
@pytest.mark.parametrize(
    ("rule", "forward", "codes"),
    [
        ("norm", lambda m, x: m.part(functional.layer_norm(x, (8, K))), set()),
        ("norm", x_is_written_in_between, {"mutation"}),
        ("residual", lambda m, x: x.double() + m.part(x), {"shape"}),
        ("residual", lambda m, x: torch.add(x, m.part(x), alpha=2.0), set()),
        ("residual", sum_in_place, {"mutation"}),
    ],
)
def test_norms_and_residuals_that_stay(rule, forward, codes):
    result = rewritten(Model(forward, norm=LlamaNorm(K), part=factors()), X)
    assert rule not in kinds_of(result)
    assert {d.code for d in result.declined if d.rule == rule} == codes


def test_dropout_in_training_stands_between():
    def dropped(m, x):
        return x + functional.dropout(m.part(x), 0.5, m.training)

    module = Model(dropped, part=factors())
    assert "residual" in kinds_of(rewritten(module, X))
    assert "residual" not in kinds_of(rewrite(module.train(), (X,), options=ON))
