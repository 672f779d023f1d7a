"""Models from transformers, factorized: exact number of matches, outputs equal to eager."""

from collections import Counter

import pytest
import torch
from models import MODELS, VERIFIED, Backend, factorize

from nmm_compiler.passes.pipeline import explain

# Two layers each (OPT and Whisper scale q; Phi feeds its MLP the x of attention);
# "chains" are factor pairs, which groups count several of.
EXPECTED = {
    "llama": {"shared_x": 2, "gated_mlp": 2, "lowrank": 2, "chains": 14},
    "qwen3": {"shared_x": 2, "gated_mlp": 2, "lowrank": 2, "chains": 14},
    "mistral": {"shared_x": 2, "gated_mlp": 2, "lowrank": 2, "chains": 14},
    "gemma": {"shared_x": 2, "gated_mlp": 2, "lowrank": 2, "chains": 14},
    "phi": {"shared_x": 2, "lowrank": 6, "chains": 12},  # fc1 stands too far behind q, k and v
    "gpt2": {"lowrank": 8, "chains": 8},
    "opt": {"shared_x": 2, "lowrank": 8, "chains": 12},
    "bert": {"shared_x": 2, "lowrank": 7, "chains": 13},
    "vit": {"shared_x": 2, "lowrank": 7, "chains": 13},
    "t5": {"shared_x": 2, "lowrank": 6, "chains": 12},
    "whisper_encoder": {"shared_x": 2, "lowrank": 8, "chains": 12},
    "deepseek_v3": {"shared_x": 2, "gated_mlp": 2, "lowrank": 6, "experts": 1, "chains": 16},
    "mixtral": {"shared_x": 2, "lowrank": 2, "experts": 2, "chains": 8},
    "t5_gated": {"shared_x": 2, "lowrank": 2, "gated_mlp": 2, "chains": 14},
    "mamba": {"lowrank": 6, "chains": 6},
    "phi3": {"lowrank": 8, "chains": 8},
    "qwen2_moe": {"shared_x": 2, "lowrank": 2, "gated_mlp": 2, "experts": 2, "chains": 14},
    "bloom": {"lowrank": 8, "chains": 8},
    "clip_vision": {"shared_x": 2, "lowrank": 6, "chains": 12},
    "modernbert": {"lowrank": 8, "chains": 8},
    "jamba": {"shared_x": 1, "gated_mlp": 1, "lowrank": 4, "experts": 1, "chains": 10},
    "llama4": {"shared_x": 2, "gated_mlp": 2, "lowrank": 2, "experts": 1, "chains": 14},
    "qwen3_next": {"shared_x": 2, "gated_mlp": 2, "lowrank": 2, "experts": 2, "chains": 13},
    "qwen3_5": {"shared_x": 1, "gated_mlp": 2, "lowrank": 4, "chains": 13},
}
QUICK = ("llama", "gpt2", "bert", "deepseek_v3")


def compile_and_count(name: str, rank: int = 4, exclude=("lm_head",)):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.eval()
    pairs = factorize(model, rank, exclude)
    results = Backend(VERIFIED)
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        got = torch.compile(model, backend=results, dynamic=False)(**inputs).last_hidden_state
    # Both compute the same sums in fp32 in another order; the last norm keeps values near 1, and
    # each of the model's products may differ in the last bit of each of its 64 terms at most.
    products = 2 * pairs
    bound = 2.0**-23 * 64 * products * float(want.abs().max().clamp_min(1.0))
    assert float((got - want).abs().max()) <= bound
    matches = [m for r in results for m in r.matches]
    return matches, pairs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in MODELS]
)
def test_model(name):
    matches, pairs = compile_and_count(name)
    counts = Counter(m.kind for m in matches)
    chains = sum(m.info.get("chains", 1) for m in matches)
    assert {**counts, "chains": chains} == EXPECTED[name]
    assert chains == pairs


@pytest.mark.long
def test_latent_queries_of_deepseek_are_calls():
    attention = ("lm_head", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
    matches, _ = compile_and_count("deepseek_v3", exclude=attention)
    mla = [m for m in matches if m.kind == "mla"]
    assert len(mla) == 2


def test_explain_says_what_factorizing_would_save():
    pytest.importorskip("transformers")
    model, inputs = MODELS["llama"]()
    report = explain(model.eval(), inputs)
    assert len(report.opportunities) == 14
    one = next(o for o in report.opportunities if (o.k, o.n) == (32, 64))
    assert one.r == int(0.8 * 32 * 64 / 96)
    assert one.saved_bytes == 4 * (32 * 64 - one.r * 96)
    assert "could be factorized" in str(report)
    assert '"graphs"' in report.to_json()


@pytest.mark.long
@pytest.mark.parametrize(
    ("targets", "adapters", "calls"),
    [
        (["q_proj", "v_proj", "down_proj"], ["default"], 6),
        (["q_proj", "down_proj"], ["default", "second"], 4),
    ],
)
def test_peft_adapters_are_one_call_a_layer(targets, adapters, calls):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, inputs = MODELS["llama"]()
    config = peft.LoraConfig(target_modules=targets, r=4, lora_alpha=8)
    model = peft.get_peft_model(model, config)
    for name in adapters[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(adapters)
    for name, parameter in model.eval().named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    found = Backend(VERIFIED)
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        got = torch.compile(model, backend=found, dynamic=False)(**inputs).last_hidden_state
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2.0**-23 * 64 * 40 * 4)
    assert Counter(m.kind for r in found for m in r.matches) == {"lora": calls}
    assert {m.info["chains"] for r in found for m in r.matches} == {len(adapters)}
