"""Rule `attention`: scaled_dot_product_attention becomes a kernel where the option asks for it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmm_compiler as nmm

ON = {"attention": True}
pytestmark = pytest.mark.filterwarnings("error:nmm")


class Block(nn.Module):
    """Grouped queries; keywords go to scaled_dot_product_attention."""

    def __init__(self, heads=4, kv_heads=2, d=8, **keywords):
        super().__init__()
        self.heads, self.kv_heads, self.d, self.keywords = heads, kv_heads, d, keywords
        self.q = nn.Linear(32, heads * d)
        self.k = nn.Linear(32, kv_heads * d)
        self.v = nn.Linear(32, kv_heads * d)

    def forward(self, x):
        q, k, v = (
            made.view(*x.shape[:2], -1, self.d).transpose(1, 2)
            for made in (self.q(x), self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.keywords)
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)


def names(result):
    return [str(n.target) for n in result.graph_module.graph.nodes if "nmm" in str(n.target)]


@pytest.mark.parametrize("keywords", [{"is_causal": True}, {}, {"is_causal": True, "scale": 0.5}])
@pytest.mark.parametrize("traced", ["dynamo", "export"])
def test_a_call_becomes_the_op(keywords, traced):
    torch.manual_seed(0)
    model, x = Block(**keywords).eval(), torch.randn(2, 9, 32)
    given = model if traced == "dynamo" else torch.export.export(model, (x,))
    result = nmm.rewrite(given, (x,), options=ON)
    assert [m.kind for m in result.matches] == ["attention"]
    assert names(result) == ["nmm.attention.default"]
    info = result.matches[0].info
    assert (info["m"], info["heads"], info["kv_heads"], info["d"]) == (9, 4, 2, 8)
    got = result.graph_module(x)
    got = got[0] if isinstance(got, (tuple, list)) else got
    torch.testing.assert_close(got, model(x))


def test_it_is_off_by_default():
    model, x = Block(is_causal=True).eval(), torch.randn(1, 5, 32)
    assert nmm.rewrite(model, (x,)).matches == []


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"attn_mask": torch.zeros(5, 5)}, "the mask is a tensor"),
        ({"dropout_p": 0.5}, "dropout_p is 0.5"),
        ({"d": 264, "is_causal": True}, "heads have at most 256"),
    ],
)
def test_refusals_are_told(keywords, words):
    model, x = Block(**keywords).eval(), torch.randn(1, 5, 32)
    result = nmm.rewrite(model, (x,), options=ON)
    assert names(result) == []
    (declined,) = [d for d in result.declined if d.rule == "attention"]
    assert words in str(declined)


def test_other_lengths_of_causal_queries_stay():
    """PyTorch counts causal queries from the first key, the kernel from the last."""

    def call(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    result = nmm.rewrite(call, (q, k), options=ON)
    assert names(result) == []
    assert "3 causal queries for 5 keys" in str(result.declined)


def test_compiled_and_differentiated():
    torch.manual_seed(0)
    model, x = Block(is_causal=True), torch.randn(2, 7, 32)
    want = model(x)
    want.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="nmm", options=ON | {"inner": "aot_eager"})
    got = compiled(x)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_a_compiled_call_runs_in_the_simulator():
    torch.manual_seed(0)
    model, x = Block(is_causal=True, d=16).eval(), torch.randn(1, 20, 32)
    torch._dynamo.reset()
    options = ON | {"inner": "aot_eager", "executor": "simulator"}
    with torch.no_grad():
        got = torch.compile(model, backend="nmm", options=options)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
