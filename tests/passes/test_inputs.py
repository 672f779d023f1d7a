"""`rewrite`, `explain` and `export_mlir` take example inputs in one way, and models as they are."""

import pytest
import torch
from models import Pair
from torch.utils import _pytree as pytree

import nmm_compiler as nmm

X = torch.randn(4, 64)


@pytest.mark.parametrize(
    "inputs", [X, (X,), [X], {"x": X}], ids=["tensor", "tuple", "list", "dict"]
)
@pytest.mark.parametrize("ask", [nmm.rewrite, nmm.explain])
@pytest.mark.parametrize("form", ["module", "graph", "program"])
def test_inputs_are_a_tensor_a_sequence_or_a_dict(ask, inputs, form):
    model = Pair(64, 8, 48)
    given = {
        "module": lambda: model,
        "graph": lambda: torch.fx.symbolic_trace(model),
        "program": lambda: torch.export.export(model, (X,)),
    }[form]()
    assert len(ask(given, inputs).matches) == 1


@pytest.mark.parametrize("ask", [nmm.rewrite, nmm.explain])
def test_other_inputs_are_refused(ask):
    with pytest.raises(nmm.NmmError, match=r"a tensor, a tuple of positional arguments or a dict"):
        ask(Pair(64, 8, 48), 3)


@pytest.mark.parametrize("inputs", [X, (X,), {"x": X}])
def test_export_takes_the_same_inputs(inputs):
    pytest.importorskip("torch_mlir")
    assert "func.func" in nmm.export_mlir(Pair(64, 8, 48), inputs, sources=False).text


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
MODELS = {
    "LlamaForCausalLM": {**SMALL, **HEADS},
    "Gemma3ForCausalLM": {**SMALL, **HEADS, "num_hidden_layers": 6},  # five sliding windows
    "GPT2LMHeadModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4},
    "MambaForCausalLM": {**SMALL, "state_size": 4},
    "T5ForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_returns_its_cache_is_rewritten_as_it_is(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name])).eval()
    ids = torch.arange(6)[None]
    inputs = {"input_ids": ids}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = ids
    nmm.compress(model, rank=8, align=8, exclude="lm_head", allow_slower=True)
    result = nmm.rewrite(model, inputs, verify=True)
    assert result.matches
    wanted, got = model(**inputs), result.graph_module(**inputs)
    assert type(got) is type(wanted)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    cache = "cache_params" if name.startswith("Mamba") else "past_key_values"
    assert type(got[cache]) is type(wanted[cache])
    held = [pytree.tree_leaves(outputs[cache]) for outputs in (got, wanted)]
    assert any(isinstance(leaf, torch.Tensor) for leaf in held[1])
    torch.testing.assert_close(*held, rtol=1e-5, atol=1e-5)
