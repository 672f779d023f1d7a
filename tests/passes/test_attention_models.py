"""Rule `attention` on transformers' models: masks, shared heads, RoPE, soft caps, against eager."""

import pytest
import torch
from models import calls_of, compiled

import nmm_compiler as nmm

transformers = pytest.importorskip("transformers")

ON = {"rules": ["+attention"], "inner": "aot_eager"}
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


def made(name, how=None):
    """Return a tiny model; its second part is what its layers are to be read as."""
    more, windows, cap = CONFIGURATIONS[name]
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    # larger weights: attention that is not near uniform shows a wrong mask or angle
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(8.0)
    model.set_attn_implementation(how or ("eager" if cap else "sdpa"))
    return model, windows, cap


def assert_as_right_as_eager(got, model):
    """The float32 logits are within four times eager's own distance from float64 (1.3 today)."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager, exact = model(IDS).logits, model.double()(IDS).logits
    assert (got - exact).abs().max() <= 4.0 * (eager - exact).abs().max()
    assert exact.abs().max() > 1.0


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layers_of_models_become_the_op(name):
    """Masks are read, keys are those of the heads of keys, and RoPE is inside."""
    model, windows, cap = made(name)
    result = nmm.rewrite(model, (IDS,), options=ON)
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
def test_a_compiled_model_is_that_of_eager(name):
    """Dynamo's graph spells the same otherwise: methods, indices, operators."""
    model, windows, _ = made(name)
    with torch.no_grad():
        got = compiled(model, **ON)(IDS).logits
    assert_as_right_as_eager(got, model)
    report = nmm.last_report().to_dict()
    assert [match.split()[0] for match in report["matches"]] == ["attention"] * len(windows)
    assert report["declined"] == []


def test_a_padding_mask_stays_with_pytorch_and_is_told():
    model, _, _ = made("Llama")
    padding = torch.ones_like(IDS)
    padding[0, :3] = 0
    result = nmm.rewrite(model, (IDS, padding), options=ON)
    assert calls_of(result) == []
    declined = [d for d in result.declined if d.rule == "attention"]
    assert [d.code for d in declined] == ["no_kernel"] * 2
    assert all("unknown values" in d.reason for d in declined)
