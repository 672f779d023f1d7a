"""Models with experts: a step reads the experts that its tokens choose, each on its cores once."""

import json

import pytest

from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.prediction.experts import read_routing
from nmm_compiler.prediction.predict import predict

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
    return predict(config, "trn2", price="closed_form", prompt=16, context=64, **setting)


def expert_line(prediction):
    lines = prediction.phases[-1].lines
    return next(one for one in lines if ".experts" in one.module and one.kind == "kernel")


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=lambda config: config["model_type"])
def test_a_config_gives_a_total_with_one_call_of_experts_a_layer(config):
    made = predicted(config)
    assert made.tpot_us > 0
    line = expert_line(made)
    assert line.what.startswith("experts m1 ")
    heavy = config.get("num_experts", config.get("num_local_experts"))
    one = 3 * 512 * config.get("moe_intermediate_size", config["intermediate_size"]) * 2
    assert made.memory.weight_bytes > heavy * one


def test_more_tokens_read_more_experts_and_counts_fewer():
    few, many = (expert_line(predicted(QWEN, batch=batch)).bytes_us for batch in (1, 8))
    assert 4 < many / few < 8  # 10.5 of 16 experts, and 2
    counts = [100.0] * 3 + [0.0] * 13
    assert expert_line(predicted(QWEN, batch=8, routing=counts)).bytes_us < 0.5 * many


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
    assert read_routing(path) == (1.0, 2.0, 3.0)
    with pytest.raises(ModelError, match="3 counts, and a layer has 16 experts"):
        predicted(QWEN, routing=read_routing(path))
    for text in ("{}", "[0, 0]", "[-1, 2]", "no"):
        path.write_text(text)
        with pytest.raises(OptionTypeError, match="routing"):
            read_routing(path)
