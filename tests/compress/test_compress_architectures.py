"""Many transformers architectures, small and random: factorized, saved, loaded, equal; or named.

Mixture-of-experts models have their attention (and dense layers) factorized; the report names the
stacked experts and the routers that stay.
"""

import pytest
import torch

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import LowRankLinear

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.long

WIDTHS = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "n_shared_experts": 1,
}  # fmt: skip
DENSE = {
    "falcon": {}, "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64}, "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4}, "phi": {}, "gemma2": {"head_dim": 16}, "olmo2": {},
    "starcoder2": {}, "cohere": {}, "stablelm": {},
}  # fmt: skip
MOE = {
    "mixtral": {"num_local_experts": 4}, "qwen2_moe": {"num_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, **EXPERTS},
    "deepseek_v2": {**LATENT, **EXPERTS},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "phimoe": {},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16}, "granitemoe": {"num_local_experts": 4},
}  # fmt: skip


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 100, (2, 9), generator=generator)}


def logits(model):
    with torch.no_grad():
        return model(**batch(9)).logits


def make(name, more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**WIDTHS, **more})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_every_linear_is_factorized_or_named_and_round_trips(name, tmp_path):
    model = make(name, {**DENSE, **MOE}[name])
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    stacked = {n for n, p in model.named_parameters() if p.dim() == 3}
    report = compress(model, 0.2, calibration=[batch(i) for i in range(4)], align=4)
    told = {layer.name for layer in report.layers} | {skip.name for skip in report.skipped}
    assert linears <= told
    ranks = model.config.quantization_config.saved.ranks
    split = {n.rpartition(".")[0] for n in told}
    for weight in stacked:  # its experts, or, where they are not transformers' kind, the layer
        assert weight in split or weight.rpartition(".")[0] in told
    if name in MOE:
        if name != "granitemoe":
            assert stacked & set(ranks)
        assert any("router" in skip.name or "gate" in skip.name for skip in report.skipped) or any(
            "router" in layer.name or "gate" in layer.name for layer in report.layers
        )
    else:
        assert len(report.compressed) >= 2
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values())
    count = sum(isinstance(m, LowRankLinear) for m in loaded.modules())
    experts = [n for n in ranks if n in stacked]
    assert count + len(experts) == len(ranks)
    assert len(report.compressed) >= len(ranks)
    assert torch.equal(logits(loaded.eval()), expected)


def test_models_that_calibration_cannot_judge_say_why():
    data = [batch(0)]
    more = {"state_size": 8, "time_step_rank": 8}
    report = compress(make("mamba", more), 0.2, calibration=data, align=4)
    read = [skip.name for skip in report.skipped if "reads its weight" in skip.reason]
    assert [name.rpartition(".")[2] for name in read] == ["dt_proj", "dt_proj"]
    with pytest.raises(ModelError, match=r'cannot be differentiated.*"whitened"'):
        compress(make("rwkv", {}), 0.2, calibration=data, align=4)
    report = compress(make("rwkv", {}), 0.2, calibration=data, align=4, method="whitened")
    assert report.compressed  # the way out is one
