"""What a directory's model is traced with: tokens, an image, tokens on both sides, or an error."""

import pytest
import torch

from nmm_compiler.cli import models
from nmm_compiler.errors import ModelError

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def saved(model, folder):
    model.save_pretrained(folder)
    return str(folder)


def test_explain_traces_a_vision_model_with_an_image(tmp_path, nmm):
    """Dense layers, attention and patches are no chains that something hinders."""
    config = transformers.ViTConfig(**SMALL, num_attention_heads=2, image_size=16, patch_size=8)
    folder = saved(transformers.ViTModel(config), tmp_path / "vit")
    assert nmm("explain", folder, code=0).out.startswith("0 matched, 0 declined")


def test_an_encoder_and_decoder_get_tokens_both(tmp_path):
    config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1,
                                   num_heads=4, decoder_start_token_id=0)  # fmt: skip
    folder = saved(transformers.T5ForConditionalGeneration(config), tmp_path / "t5")
    model, inputs = models.load(folder, 7)
    assert {name: tuple(ids.shape) for name, ids in inputs.items()} == {
        "input_ids": (1, 7),
        "decoder_input_ids": (1, 7),
    }
    assert model(**inputs).logits.shape == (1, 7, 50)


def test_a_model_of_other_inputs_names_the_way_out():
    class Audio(torch.nn.Module):
        main_input_name, config = "input_features", transformers.WhisperConfig()

    with pytest.raises(ModelError, match=r"input_features.*FILE\.py:function"):
        models.example_inputs("whisper", Audio(), 8)


@pytest.mark.usefixtures("closed_form_only")
def test_a_config_is_a_model_without_data_for_commands_that_need_none(tmp_path, nmm):
    """So are the public names, whose configs come with the package."""
    sizes = {**SMALL, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=64)
    config.save_pretrained(tmp_path)
    file = str((tmp_path / "config.json").rename(tmp_path / "small.json"))
    for words, said in (
        (["explain", file, "--html", str(tmp_path / "r.html"), "--ratio", "0.2"], "matched"),
        (["export", file, "-o", str(tmp_path / "s.mlir")], "wrote"),
    ):
        assert said in nmm(*words, code=0).out
    words = ("export", file, "-o", tmp_path / "s.mlir", "--weights", "resources")
    assert "is known by its shapes" in nmm(*words, code=2).err
