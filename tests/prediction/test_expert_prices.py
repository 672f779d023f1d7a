"""Models with experts: a step reads the experts that its tokens choose, each on its cores once."""

import json

import pytest

from nmm_compiler.errors import FileError, ModelError, OptionTypeError
from nmm_compiler.outputs import read_json
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prediction.prices import check_routing

transformers = pytest.importorskip("transformers")
QWEN = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "moe_intermediate_size": 256, "intermediate_size": 1024, "num_experts": 16,
    "num_experts_per_tok": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 1000, "sliding_window": 128,
}  # fmt: skip


def predicted(config, **setting):
    """Return the prediction of a token: no test asks for the prompt."""
    return predict(config, price="closed_form", prompt=16, context=64, last=True, **setting)


def expert_line(prediction):
    lines = prediction.phases[-1].lines
    return next(one for one in lines if ".experts" in one.module and one.kind == "kernel")


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=lambda config: config["model_type"])
def test_experts_have_a_price_in_every_form(config):
    forms = ("fp8", "bf16", "mxfp4", "mxfp4+32")
    made = {form: predicted(config, target="trn3", weights=form) for form in forms}
    moved = {form: expert_line(one).bytes_us for form, one in made.items()}
    assert 0.49 < moved["fp8"] / moved["bf16"] < 0.52
    assert 0.25 < moved["mxfp4"] / moved["bf16"] < 0.32  # features are filled up to whole 128s
    assert moved["mxfp4"] < moved["mxfp4+32"] < moved["fp8"]
    assert "factors" in expert_line(predicted(config, target="trn3", ratio=0.2)).what
    held = {form: one.memory.weight_bytes for form, one in made.items()}
    assert held["mxfp4"] < held["mxfp4+32"] < held["fp8"] < held["bf16"]


def test_low_rank_experts_are_shared_out_whole():
    """The first factors of a share of the features would be on every core."""
    one, four = (expert_line(predicted(QWEN, tp=tp, ratio=0.2)) for tp in (1, 4))
    assert "g4 " in four.what
    assert four.bytes_us < 0.3 * one.bytes_us
    with pytest.raises(ModelError, match="low-rank and another is not"):
        predicted(QWEN, ratio=0.2, include=["*experts.down_proj*"])


def test_shared_experts_are_summed_over_the_cores_with_the_chosen_ones():
    config = QWEN | {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
    }  # fmt: skip
    made = predicted(config, tp=4)
    sums = [line for line in made.phases[-1].lines if line.kind == "all_reduce"]
    assert sum(line.calls for line in sums) == 2 * config["num_hidden_layers"]


def test_llama_4_repeats_tokens_for_each_expert_and_reads_the_chosen_ones():
    config = {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "hidden_size": 512,
        "intermediate_size": 256, "intermediate_size_mlp": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    }  # fmt: skip
    few, all_ = (expert_line(predicted(config, batch=batch)) for batch in (1, 64))
    assert few.what.startswith("experts m1 k512 g16 top1 n256")
    assert 12 < all_.bytes_us / few.bytes_us < 17


def test_attention_that_a_plan_of_experts_leaves_out_is_cut():
    """Of gpt-oss transformers cuts nothing, of DeepSeek-V3 no attention; sinks follow the heads."""
    config = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
        "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128, "vocab_size": 1000,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    }  # fmt: skip
    assert predicted(config, weights="float8_e4m3").tpot_us  # a norm between factors has no fp8
    for one in (config, GPT_OSS):
        whole, part = (predicted(one, tp=tp) for tp in (1, 4))
        attention = [
            sum(line.bytes_us or 0 for line in made.phases[-1].lines if "o_proj" in line.module)
            for made in (whole, part)
        ]
        assert attention[1] < 0.3 * attention[0]


def test_cores_share_each_expert_or_whole_experts():
    whole = expert_line(predicted(QWEN)).bytes_us
    made = predicted(QWEN, tp=4)
    assert expert_line(made).bytes_us == pytest.approx(whole / 4, rel=0.02)
    assert "g16" in expert_line(made).what
    assert any(line.kind == "all_reduce" for line in made.phases[-1].lines)
    uneven = {**QWEN, "moe_intermediate_size": 257}
    assert "g4" in expert_line(predicted(uneven, tp=4)).what
    with pytest.raises(ModelError, match="share neither 257 features nor 15 experts"):
        predicted({**uneven, "num_experts": 15}, tp=4)


def test_a_file_of_counts(tmp_path):
    path = tmp_path / "routing.json"
    path.write_text(json.dumps([1, 2, 3]))
    assert check_routing(read_json(path, list), path) == (1.0, 2.0, 3.0)
    with pytest.raises(ModelError, match="3 counts, and a layer has 16 experts"):
        predicted(QWEN, routing=read_json(path, list))
    for text in ("{}", "[0, 0]", "[-1, 2]", "no"):
        path.write_text(text)
        with pytest.raises((FileError, OptionTypeError), match=r"routing\.json"):
            check_routing(read_json(path, list), path)


def test_a_hybrid_whose_config_computes_the_kinds_of_its_layers_is_priced_whole():
    """Jamba: attention, a state space model and experts take turns."""
    config = transformers.JambaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000, num_experts=4, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    )  # fmt: skip
    made = predicted(config)
    lines = made.phases[-1].lines
    assert {"kernel", "attention", "pointwise"} <= {line.kind for line in lines}
    assert [one.module.split(".")[2] for one in lines if ".experts" in one.module] == ["1", "3"]
