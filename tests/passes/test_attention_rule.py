"""Rule `attention`: scaled_dot_product_attention becomes a kernel where the option asks for it."""

import pytest
import torch
import torch.nn.functional as F
from models import Model, calls_of, compiled, kinds_of
from torch import nn

import nmm_compiler as nmm

ON = {"rules": ["+attention"]}
pytestmark = pytest.mark.filterwarnings("error:nmm")


def block(d=8, **keywords):
    """Return grouped queries; keywords go to scaled_dot_product_attention."""

    def function(p, x):
        q, k, v = (made(x).view(*x.shape[:2], -1, d).transpose(1, 2) for made in (p.q, p.k, p.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **keywords)
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)

    sizes = {"q": 4 * d, "k": 2 * d, "v": 2 * d}
    return Model(function, **{name: nn.Linear(32, size) for name, size in sizes.items()})


@pytest.mark.parametrize("keywords", [{"is_causal": True}, {}, {"is_causal": True, "scale": 0.5}])
@pytest.mark.parametrize("traced", ["dynamo", "export"])
def test_a_call_becomes_the_op(keywords, traced):
    model, x = block(**keywords).eval(), torch.randn(2, 9, 32)
    given = model if traced == "dynamo" else torch.export.export(model, (x,))
    result = nmm.rewrite(given, (x,), options=ON, verify=True)
    assert kinds_of(result) == ["attention"]
    assert [str(node.target) for node in calls_of(result)] == ["nmm.attention.default"]
    info = result.matches[0].info
    assert (info["m"], info["heads"], info["kv_heads"], info["d"]) == (9, 4, 2, 8)


def sdpa(**keywords):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **keywords)


Q, K, V = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 5, 6)
WIDE = torch.randn(1, 2, 5, 264)


def _masked(values):
    """Return a call whose mask the graph makes: values [m, context] as a function of indices."""

    def call(q, k, v):
        m, context = q.shape[2], k.shape[2]
        rows = torch.arange(m)[:, None] + (context - m)
        return sdpa(attn_mask=values(rows, torch.arange(context)))(q, k, v)

    return call


def spelled_out(scores):
    """Return causal attention of products and a softmax, with a function of the scores."""

    def call(q, k, v):
        seen = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), 0.0, float("-inf"))
        weights = torch.softmax(scores(q @ k.transpose(-1, -2)) + seen, -1, dtype=torch.float32)
        return F.dropout(weights.to(q.dtype), 0.1, training=False) @ v

    return call


SIX = (torch.randn(2, 4, 6, 8),) * 3
UNREAD = "neither causal nor a sliding window"


@pytest.mark.parametrize(
    ("call", "inputs", "words"),
    [
        (sdpa(attn_mask=torch.zeros(5, 5)), (Q, Q, Q), "the mask is a tensor"),
        (sdpa(dropout_p=0.5), (Q, Q, Q), "dropout_p is 0.5"),
        (sdpa(is_causal=True), (WIDE, WIDE, WIDE), "heads have at most 256"),
        # PyTorch counts causal queries from the first key, the kernel from the last.
        (sdpa(is_causal=True), (Q, K, K), "5 causal queries for 9 keys"),
        # As in DeepSeek's latent attention.
        (sdpa(), (Q, Q, V), "values of 6 features, queries of 8"),
        (sdpa(), (Q[0], Q[0], Q[0]), "shape"),
        (_masked(lambda i, j: torch.where(j <= i, 0.1 * (j - i), float("-inf"))), SIX,
         "adds numbers to scores"),
        (_masked(lambda i, j: (j <= i)[None, None] & (torch.arange(4)[None, :, None, None] < 3)),
         SIX, "differs"),
        (_masked(lambda i, j: (j <= i) | (j == 5)), SIX, UNREAD),
        (_masked(lambda i, j: j < i), SIX, UNREAD),
        (_masked(lambda i, j: (j <= i) & (torch.rand(()) < 2)), SIX,
         "unknown values, because of rand"),
        (spelled_out(lambda s: s.relu()), SIX, "scores below the softmax"),
    ],
)  # fmt: skip
def test_refusals_are_told(call, inputs, words):
    result = nmm.rewrite(call, inputs, options=ON)
    assert calls_of(result) == []
    (declined,) = [d for d in result.declined if d.rule == "attention"]
    assert words in str(declined)


def test_compiled_and_differentiated():
    model, x = block(is_causal=True), torch.randn(2, 7, 32)
    want, got = model(x), compiled(model, **ON, inner="aot_eager")(x)
    torch.testing.assert_close(got, want)
    weights = list(model.parameters())
    gradients = [torch.autograd.grad(y.square().sum(), weights) for y in (got, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("values", "read"),
    [
        (lambda i, j: j <= i, (True, 0)),
        (lambda i, j: (j <= i) & (j > i - 4), (True, 4)),
        (lambda i, j: (j <= i) & (j > i - 1), (True, 1)),
        (lambda i, j: j < 100 + 0 * i, (False, 0)),
        (lambda i, j: torch.where(j <= i, 0.0, float("-inf")), (True, 0)),
        (lambda i, j: torch.where((j <= i) & (j > i - 3), 0.0, -3.4e38), (True, 3)),
    ],
)
@pytest.mark.parametrize("context", [6, 9])
def test_masks_made_of_sizes_are_read(values, read, context):
    """Causal, sliding windows, no mask; as bool and as numbers that are added; more keys, too."""
    given = torch.randn(2, 4, 6, 8), *torch.randn(2, 2, 4, context, 8)
    (match,) = nmm.rewrite(_masked(values), given, options=ON, verify=True).matches
    assert (match.info["causal"], match.info["window"]) == read


def _turn(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def _angles(tokens, d, joined=True):
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -1, d // 2)
    both = torch.cat((angles, angles if joined else 2 * angles), -1)[None, None]
    return both.cos(), both.sin()


@pytest.mark.parametrize(
    ("joined", "kept", "groups", "rope"),
    [
        (True, False, "expand", "qk"),
        (True, False, "interleave", "qk"),
        (True, True, "enable_gqa", "q"),
        (False, False, "expand", "none"),
    ],
)
def test_rotation_and_shared_heads_move_into_the_call(joined, kept, groups, rope):
    """A rotated key that is kept for a cache stays, and so do angles of unequal halves."""

    def call(q, k, v):
        cos, sin = _angles(6, 8, joined)
        q, k = q * cos + _turn(q) * sin, k * cos + _turn(k) * sin
        more = {}
        cached = k if kept else v
        if groups == "expand":
            k, v = (t[:, :, None].expand(2, 2, 3, 6, 8).reshape(2, 6, 6, 8) for t in (k, v))
        elif groups == "interleave":
            k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
        else:
            more = {"enable_gqa": True}
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **more), cached

    given = torch.randn(2, 6, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    (match,) = nmm.rewrite(call, given, options=ON, verify=True).matches
    assert (match.info["rope"], match.info["kv_heads"]) == (rope, 2)


@pytest.mark.parametrize(
    ("scores", "fields"),
    [
        (lambda s: s * 0.5, (0.5, 0.0)),
        (lambda s: s / 4, (0.25, 0.0)),
        (lambda s: torch.tanh(s * 0.5 / 3.0) * 3.0, (0.5, 3.0)),
    ],
)
def test_spelled_out_attention(scores, fields):
    given = tuple(torch.randn(3, 2, 3, 6, 8))
    (node,) = calls_of(nmm.rewrite(spelled_out(scores), given, options=ON, verify=True))
    got_fields = node.kwargs["scale"], node.kwargs.get("soft_cap", 0.0)
    assert got_fields == pytest.approx(fields)


# Rule `attention` on transformers' models: masks, shared heads, RoPE, soft caps, against eager.

transformers = pytest.importorskip("transformers")

COMPILED = {"rules": ["+attention"], "inner": "aot_eager"}
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "head_dim": 16,
    "use_cache": False,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
# Queries and keys are normed in Qwen3 and Gemma 3. A window of 7 keys is less than 20 tokens.
CONFIGURATIONS = {
    "Llama": ({}, (0, 0), 0.0),
    "Qwen3": ({}, (0, 0), 0.0),
    "Mistral": ({"sliding_window": 7}, (7, 7), 0.0),
    "Gemma2": ({"sliding_window": 7, "layer_types": LAYERS, "attn_logit_softcapping": 2.0},
               (7, 0), 2.0),
    "Gemma3": ({"sliding_window": 7, "layer_types": LAYERS}, (7, 0), 0.0),
}  # fmt: skip
IDS = torch.arange(40).reshape(2, 20) * 7 % 100


@torch.no_grad()
def made(name, how=None):
    """Return a tiny model; its second part is what its layers are to be read as."""
    more, windows, cap = CONFIGURATIONS[name]
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    # larger weights: attention that is not near uniform shows a wrong mask or angle
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.mul_(8.0)
    model.set_attn_implementation(how or ("eager" if cap else "sdpa"))
    return model, windows, cap


@torch.no_grad()
def assert_as_right_as_eager(got, model):
    """The float32 logits are within four times eager's own distance from float64 (1.3 today)."""
    model.set_attn_implementation("eager")
    eager, exact = model(IDS).logits, model.double()(IDS).logits
    assert (got - exact).abs().max() <= 4.0 * (eager - exact).abs().max()
    assert exact.abs().max() > 1.0


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layers_of_models_become_the_op(name):
    """Masks are read, keys are those of the heads of keys, and RoPE is inside."""
    model, windows, cap = made(name)
    result = nmm.rewrite(model, (IDS,), options=COMPILED)
    assert [(m.kind, m.info["window"], m.info["rope"]) for m in result.matches] == [
        ("attention", window, "qk") for window in windows
    ]
    assert [d for d in result.declined if d.rule == "attention"] == []
    calls = calls_of(result)
    assert [call.kwargs.get("soft_cap", 0.0) for call in calls] == [cap, cap]
    left = {str(n.target) for n in result.graph_module.graph.nodes}
    assert not {t for t in left if "softmax" in t or "scaled_dot" in t or "aten.cat" in t}
    with torch.no_grad():
        got = result.graph_module(IDS)
    assert_as_right_as_eager(got.logits if hasattr(got, "logits") else got[0], model)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@torch.no_grad()
def test_a_compiled_model_is_that_of_eager(name):
    """Dynamo's graph spells the same otherwise: methods, indices, operators."""
    model, windows, _ = made(name)
    got = compiled(model, **COMPILED)(IDS).logits
    assert_as_right_as_eager(got, model)
    report = nmm.last_report().to_dict()
    assert [match.split()[0] for match in report["matches"]] == ["attention"] * len(windows)
    assert report["declined"] == []


def test_a_padding_mask_stays_with_pytorch_and_is_told():
    model, _, _ = made("Llama")
    padding = torch.ones_like(IDS)
    padding[0, :3] = 0
    result = nmm.rewrite(model, (IDS, padding), options=COMPILED)
    assert calls_of(result) == []
    declined = [d for d in result.declined if d.rule == "attention"]
    assert [d.code for d in declined] == ["no_kernel"] * 2
    assert all("unknown values" in d.reason for d in declined)
