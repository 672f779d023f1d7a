"""save_pretrained and from_pretrained of low-rank transformers models, without remote code."""

import copy
import json
import os
import pickle
import re

import pytest
import torch
from compress_models import full_disk
from safetensors.torch import load_file, save_file

from nmm_compiler.errors import FileError, OutputError
from nmm_compiler.lowrank_models import hf
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.hf import load
from nmm_compiler.lowrank_models.modules import LowRankLinear

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 100,
}  # fmt: skip
IDS = torch.arange(14).reshape(2, 7)


CONFIGS = {
    "llama": {**SMALL, "num_key_value_heads": 2},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 0,
             "eos_token_id": 1},
    "t5": {"d_model": 64, "d_ff": 128, "num_layers": 2, "d_kv": 16, "num_heads": 4,
           "vocab_size": 100},
    "bert": SMALL,
    "qwen3_moe": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}  # fmt: skip
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def config(name):
    return transformers.AutoConfig.for_model(name, **CONFIGS[name])


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    auto = getattr(transformers, AUTO.get(name, "AutoModelForCausalLM"))
    return auto, auto.from_config(config(name), dtype=dtype).eval()


@pytest.fixture
def saved_llama(tmp_path):
    """A low-rank model, which is saved in tmp_path / "a"."""
    _, model = make("llama")
    compress(model, 0.2, align=4)
    hf.save(model, tmp_path / "a")
    return model


def load_llama(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


@torch.no_grad()
def logits(model, name):
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    return model(input_ids=IDS, **more).logits


def lowrank_count(model):
    return sum(isinstance(m, LowRankLinear) for m in model.modules())


PLAIN = {"ratio": 0.2, "align": 4}
FORMATS = [
    {"base": "mxfp4", "rank": 8},
    {"base": "mxfp4", "rank": 32, "factors": "mxfp8"},
    {"base": "mxfp4", "rank": 8, "factors": "fp8"},
    {"base": "int4", "rank": 0},
    {"base": "fp8", "rank": {"mlp": 8}},
    {"rank": 8, "factors": "int8"},
    {"rank": 8, "factors": "fp8"},
]


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("llama", torch.bfloat16, PLAIN),
        *((name, torch.float32, PLAIN) for name in ("qwen3", "gpt2", "bert", "t5")),
        *(("llama", torch.bfloat16, one) for one in FORMATS),
        pytest.param("llama", torch.float32, FORMATS[2], marks=pytest.mark.long),
        ("gpt2", torch.float32, FORMATS[3]),  # its linears have a bias
    ],
    ids=str,
)
def test_round_trip_gives_equal_logits(name, dtype, options, tmp_path):
    auto, model = make(name, dtype)
    compress(model, **options)
    assert lowrank_count(model) >= 6 or options.get("rank") == 0
    expected = logits(model, name)
    hf.save(model, tmp_path / "a")
    state = load(tmp_path / "a").state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert (tmp_path / "a" / "model.safetensors").is_file()
    model.save_pretrained(tmp_path / "b")  # which needs nothing of ours
    for directory in "abc":
        loaded, info = auto.from_pretrained(tmp_path / directory, dtype=dtype,
                                            output_loading_info=True)  # fmt: skip
        assert not any(info.values())
        assert lowrank_count(loaded) == lowrank_count(model)
        assert torch.equal(logits(loaded.eval(), name), expected)
        loaded.save_pretrained(tmp_path / "c")  # nor does a loaded model
    assert loaded.double().dtype == torch.float64  # not "quantized": free to be cast
    base = transformers.AutoModel.from_pretrained(tmp_path / "a", dtype=dtype)
    assert (lowrank_count(base) > 0) == (lowrank_count(model) > 0)


@torch.no_grad()
def test_conv1d_becomes_low_rank_and_keeps_its_map():
    _, model = make("gpt2")
    layer = model.transformer.h[0].mlp.c_fc
    weight, x = layer.weight.detach().clone(), torch.randn(3, 64)
    left, right = torch.randn(64, 4), torch.randn(4, 256)
    layer.weight.copy_(left @ right)
    expected = layer(x)
    compress(model, rank=4, include="c_fc")
    new = model.transformer.h[0].mlp.c_fc
    assert (new.in_features, new.out_features) == tuple(weight.shape)
    eps = torch.finfo(torch.float32).eps
    bound = 64 * eps * float(left.norm() * right.norm() * x.norm())
    assert (new(x) - expected).norm() <= bound


def test_compressed_models_can_be_copied_and_pickled(saved_llama):
    model, expected = saved_llama, logits(saved_llama, "llama")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, "llama"), expected)
        assert again.config.quantization_config.saved == model.config.quantization_config.saved


def test_a_full_disk_leaves_the_old_directory(saved_llama, tmp_path):
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with full_disk(), pytest.raises(OutputError, match=r"(?i)cannot be written.*large"):
        hf.save(saved_llama, tmp_path / "a")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_config_that_another_model_shares_is_not_written_into(tmp_path):
    shared = config("llama")
    torch.manual_seed(0)
    first, second = (transformers.LlamaForCausalLM(shared).eval() for _ in range(2))
    compress(first, 0.2, align=4)
    assert getattr(shared, "quantization_config", None) is None
    assert second.config is second.model.config is shared
    assert first.config is first.model.config is first.model.layers[0].self_attn.config
    expected = logits(second, "llama")
    second.save_pretrained(tmp_path / "dense")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense").eval()
    assert lowrank_count(again) == 0
    assert torch.equal(logits(again, "llama"), expected)
    # A dense model built from the low-rank one's config is refused when it is loaded.
    third = transformers.LlamaForCausalLM(first.config)
    third.save_pretrained(tmp_path / "third")
    with pytest.raises(FileError, match="the weights have no"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "third")


@pytest.mark.parametrize("method", ["gguf", "bitsandbytes"])
def test_quantized_models_are_refused_before_any_work(method, saved_llama, tmp_path):
    _, model = make("llama")
    for one in (model, saved_llama):
        # as a model of GGUF that was loaded has it
        gguf = method == "gguf" and transformers.GgufConfig()
        one.config.quantization_config = gguf or {"quant_method": method}
    with pytest.raises(FileError, match=f"already quantized by '{method}'"):
        compress(model, 0.2, align=4)
    assert lowrank_count(model) == 0
    with pytest.raises(FileError, match=f"already quantized by '{method}'"):
        hf.save(saved_llama, tmp_path / "b")


def edit(directory, change):
    """Let `change` edit what config.json of a saved model says of its low-rank layers."""
    path = directory / "config.json"
    saved = json.loads(path.read_text())
    change(saved["quantization_config"])
    path.write_text(json.dumps(saved))


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "'ranks': None"),
        ({"ranks": None}, "'ranks': None"),
        ({"ranks": [4]}, r"'ranks': \[4\]"),
        ({"ranks": {UP: None}}, "up_proj': None"),
        ({"ranks": {UP: "8"}}, "up_proj': '8'"),
        ({"ranks": {UP: True}}, "up_proj': True"),
        ({"ranks": {UP: 0}}, "up_proj': 0"),
        ({"ranks": {UP: 1 << 40}}, "up_proj': 1099511627776"),
        ({"ranks": {UP: 8}, "formats": {UP: "int7"}}, "int7"),
        ({"ranks": {UP.replace("0", "7"): 8}}, r"layers\.7\.mlp\.up_proj"),
    ],
)
def test_saved_layers_that_are_none_are_refused_by_name(fields, text, saved_llama, tmp_path):
    edit(tmp_path / "a", lambda said: [said.pop("ranks"), said.update(fields)])
    with pytest.raises(FileError, match=text) as caught:
        load_llama(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_dropped_ranks_do_not_load(saved_llama, tmp_path):
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (1,)
    edit(tmp_path / "a", lambda said: said["ranks"].pop("model.layers.1.mlp.up_proj"))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # by the guard
        load_llama(tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "options", "end"),
    [
        ("llama", PLAIN, "up_proj.down.weight"),
        ("llama", FORMATS[0], "proj.base.values"),
        ("llama", FORMATS[0], "proj.down.weight"),
        ("llama", {"base": "mxfp4", "rank": 0}, "proj.scale"),
        ("qwen3_moe", {"base": "fp8", "rank": 8, "include": "experts"}, "experts.down_base.values"),
    ],
    ids=str,
)
def test_a_tensor_that_the_files_lack_is_named_and_not_zeros(kind, options, end, tmp_path):
    _, model = make(kind)
    compress(model, **options)
    hf.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = max(name for name in tensors if name.endswith(end))
    save_file({k: v for k, v in tensors.items() if k != name}, file, {"format": "pt"})
    for way in (load, load_llama):
        with pytest.raises(FileError, match=re.escape(name)):
            way(tmp_path)
