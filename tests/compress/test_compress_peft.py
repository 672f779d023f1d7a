"""PEFT finds low-rank layers under the names that they had when they were dense."""

import copy

import pytest
import torch

from nmm_compiler.compress import hf
from nmm_compiler.compress.apply import compress
from nmm_compiler.compress.modules import LowRankLinear
from nmm_compiler.errors import OptionTypeError

peft = pytest.importorskip("peft")
IDS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))


def small(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval().to(dtype)
    compress(model, 0.2, align=8, progress=False)
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def adapted(model, **config):
    found = peft.get_peft_model(model, peft.LoraConfig(**config))
    torch.manual_seed(2)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return found


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], "all-linear"])
def test_adapters_are_found_by_the_original_names(targets):
    model = small()
    expected = logits(model)
    found = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=4))
    assert torch.equal(logits(found), expected)  # adapters start at zero
    named = {n.split(".lora_A")[0].split(".")[-1] for n, _ in found.named_parameters() if "A" in n}
    if targets != "all-linear":
        assert {"q_proj", "v_proj"} <= named
    loss = found(IDS, labels=IDS).loss
    loss.backward()
    trained = [n for n, p in found.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_appends_to_the_factors_and_unmerging_takes_off_again(dtype):
    model = small(dtype)
    before = copy.deepcopy(model.state_dict())
    rank = model.model.layers[0].self_attn.q_proj.rank
    found = adapted(model, r=4, lora_alpha=8)
    expected = logits(found).float()
    found.merge_adapter()
    layer = found.base_model.model.model.layers[0].self_attn.q_proj.get_base_layer()
    assert (layer.rank, layer.down.out_features) == (rank + 4, rank + 4)
    close = 64 * torch.finfo(dtype).eps * expected.norm()
    assert (logits(found).float() - expected).norm() <= close
    found.unmerge_adapter()
    plain = found.unload()
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())


def test_a_merged_model_is_saved_with_its_new_ranks(tmp_path):
    from transformers import AutoModelForCausalLM

    found = adapted(small(), r=4)
    expected = logits(found)
    found.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(small(), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)
    merged = found.merge_and_unload()
    merged.save_pretrained(tmp_path / "a")
    hf.save_pretrained(merged, tmp_path / "b")
    for name in "ab":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert isinstance(loaded.model.layers[0].self_attn.q_proj, LowRankLinear)
        assert (logits(loaded) - expected).norm() <= 1e-5 * expected.norm()


def test_what_cannot_be_merged_is_refused_by_name():
    found = adapted(small(), r=4, use_dora=True)
    assert torch.isfinite(logits(found)).all()
    with pytest.raises(OptionTypeError, match="plain LoRA"):
        found.merge_adapter()
    broken = adapted(small(), r=4)
    for name, parameter in broken.named_parameters():
        if "lora_A" in name:
            parameter.data[0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        broken.merge_and_unload(safe_merge=True)


def test_the_factors_can_still_be_named():
    found = peft.get_peft_model(small(), peft.LoraConfig(target_modules=r".*_proj\.(up|down)", r=2))
    names = {n.rpartition(".lora_A")[0] for n, _ in found.named_parameters() if "lora_A" in n}
    assert len(names) == 2 * 2 * 7
