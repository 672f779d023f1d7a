"""Factors that the graph multiplies back are named, with what that costs and the way out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmm_compiler as nmm
from nmm_compiler import backend
from nmm_compiler.compress.modules import LowRankLinear, put

K, R, N, M = 48, 4, 64, 12
X = torch.randn(2, 6, K)


class Reads(nn.Module):
    """Uses the weight of a low-rank layer, in a way that a test gives."""

    def __init__(self, use):
        super().__init__()
        self.q, self.use = LowRankLinear(K, R, N, bias=False), use

    def forward(self, x):
        return self.use(x, self.q.weight)


def padded(x, w):
    return F.linear(F.pad(x, (0, 8)), F.pad(w, (0, 8)))


# (use of the weight, whether the rule `chain` can do it)
USES = {
    "linear": (F.linear, True),
    "matmul": (lambda x, w: x @ w.t(), True),
    "einsum": (lambda x, w: torch.einsum("bik,nk->bin", x, w), True),
    "cast": (lambda x, w: F.linear(x.bfloat16(), w.bfloat16()), False),
    "scaled": (lambda x, w: F.linear(x, 0.5 * w), False),
    "padded": (padded, False),
    "joined": (lambda x, w: F.linear(x, torch.cat([w, w])), False),
}


@pytest.mark.parametrize("name", USES)
def test_multiplied_back(name):
    use, free = USES[name]
    model = Reads(use)
    (found,) = nmm.explain(model, X).declined
    assert found.code == "factors_multiplied"
    assert found.reason.startswith("q.up.weight and q.down.weight are multiplied back")
    tokens = M
    k = K + 8 if name == "padded" else K
    spent, needed = 2 * k * R * N + 2 * tokens * k * N, 2 * tokens * R * (k + N)
    if name != "padded":  # whose product is narrower than what x is contracted with
        assert f"{spent / 1e6:.3f} MFLOP for {tokens} tokens, {needed / 1e6:.3f}" in found.reason
    assert ("reassociate=True" in found.remedy) == free
    assert "call the module instead of reading its weight" in found.remedy
    permitted = nmm.explain(model, X, options={"reassociate": True})
    assert [m.kind for m in permitted.matches] == ["lowrank"] * free
    assert [d.code for d in permitted.declined] == ["factors_multiplied"] * (not free)
    assert not any("reassociate=True" in d.remedy for d in permitted.declined)


def attention(x, q, k, v, out):
    bias = torch.cat((q.bias, k.bias, v.bias))
    return F.multi_head_attention_forward(
        x, x, x, N, 4, torch.empty([0]), bias, None, None, False, 0.0, out.weight, out.bias, False,
        None, False, None, use_separate_proj_weight=True, q_proj_weight=q.weight,
        k_proj_weight=k.weight, v_proj_weight=v.weight,
    )[0]  # fmt: skip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (LowRankLinear(N, R, N) for _ in range(4))

    def forward(self, x):
        return attention(x, self.q, self.k, self.v, self.out)


def test_multiplied_back_into_an_attention():
    x = torch.randn(6, 2, N)
    found = nmm.explain(Attention(), x).declined
    assert {d.code for d in found} == {"factors_multiplied"}
    named = sorted(d.reason.split(".up.weight and")[0] for d in found)
    assert named == ["k", "out", "q", "v"]
    spent, needed = 2 * N * R * N + 2 * M * N * N, 2 * M * R * (N + N)
    assert all(f"{spent / 1e6:.3f} MFLOP for 12 tokens" in d.reason for d in found)
    assert all(f"{needed / 1e6:.3f} MFLOP one after" in d.reason for d in found)
    assert not any("reassociate" in d.remedy for d in found)


def test_multiplied_back_is_in_the_compile_report():
    torch._dynamo.reset()
    backend.reset()
    options = {"inner": "eager", "kernels": "lazy"}
    torch.compile(Reads(F.linear), backend="nmm", options=options)(X)
    (declined,) = backend.last_report().declined
    assert "q.up.weight and q.down.weight are multiplied back" in declined.reason


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x * w.sum(0),  # no contraction
        lambda x, w: F.layer_norm(x, (K,), w.sum(0)),
        lambda x, w: F.linear(x.repeat(300, 1, 1), w + torch.ones(N, K)),  # not two factors alone
    ],
)
def test_other_uses_are_not_multiplied_back(use):
    assert "factors_multiplied" not in [d.code for d in nmm.explain(Reads(use), X).declined]


def test_a_rank_that_saves_nothing_is_not_multiplied_back():
    model = Reads(F.linear)
    model.q = LowRankLinear(K, 40, N, bias=False)
    x = torch.randn(200, 6, K)  # 2 k r n + 2 m k n < 2 m r (k + n)
    assert "factors_multiplied" not in [d.code for d in nmm.explain(model, x).declined]


@pytest.mark.long
def test_wavlm_names_its_attention_weights():
    transformers = pytest.importorskip("transformers")
    config = transformers.WavLMConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=10,
        apply_spec_augment=False,
    )  # fmt: skip
    model = transformers.WavLMModel(config).eval()
    wanted = []
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith(("q_proj", "k_proj", "v_proj", "out_proj")):
            put(model, [name], LowRankLinear(32, 4, 32))
            wanted.append(name)
    with torch.no_grad():
        found = nmm.explain(model, torch.randn(1, 400)).declined
    named = [d.reason.split(".up.weight and")[0] for d in found if d.code == "factors_multiplied"]
    assert sorted(named) == sorted(wanted)
    assert len(wanted) == 8
