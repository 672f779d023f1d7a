"""A saved low-rank model loads right in three ways, and raises in every other."""

import re
from pathlib import Path

import pytest
import torch
from processes import ran
from safetensors.torch import save_file

import nmm_compiler

transformers = pytest.importorskip("transformers")

ROOT = Path(nmm_compiler.__file__).parent.parent
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40,
}  # fmt: skip
# Another process may choose other kernels: at most 64 terms a product, some 20 in a row.
BOUND = 20 * 64 * torch.finfo(torch.float32).eps


def made(name):
    torch.manual_seed(0)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=40)
        )
    if name == "experts":
        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32, decoder_sparse_step=1,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of low-rank models, and in each the logits that it has."""
    root = tmp_path_factory.mktemp("saved")
    for name, options in {
        "llama": {}, "gpt2": {}, "experts": {"include": "experts"},
        "int8": {"factors": "int8"},
        "branch": {"base": "mxfp4", "factors": "fp8"},
    }.items():  # fmt: skip
        model = made(name).eval()
        nmm_compiler.compress(model, 0.3, align=2, **options)
        nmm_compiler.save(model, root / name)
        with torch.no_grad():
            save_file(
                {"logits": model(torch.arange(14).reshape(2, 7)).logits}, root / name / "expected"
            )
    return root


START = """
import os, sys, traceback
from pathlib import Path

saved, root, bound = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
sys.path[:] = [p for p in sys.path if not (Path(p) / "nmm_compiler").is_dir()]
hooks = ("editable", "LowRank")  # of an install of this package, maybe an older one
sys.meta_path[:] = [f for f in sys.meta_path if not any(hook in repr(f) for hook in hooks)]

import torch
import torch.distributed.fsdp, torch.distributed.tensor, torch.export  # transformers loads these
from safetensors.torch import load_file

def right(model, directory):
    expected = load_file(directory / "expected")["logits"]
    with torch.no_grad():
        found = model.eval()(torch.arange(14).reshape(2, 7)).logits
    assert (found - expected).norm() <= bound * expected.norm(), directory

def each(*but):
    return [d for d in sorted(saved.iterdir()) if d.name not in but]

def in_turn(*trusts):
    \"\"\"Each directory with one answer to the question whether code of it may run.\"\"\"
    return zip(each(), trusts * len(each()))

def apart(way):
    \"\"\"Go one way in a process of its own, which shares what is imported.\"\"\"
    if os.fork() == 0:
        try:
            way()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.wait()[1] == 0, way.__name__
"""
WAYS = """
def an_import_before_transformers_is_right_or_raises_until_load_has_registered():
    sys.path.insert(0, root)
    import nmm_compiler
    from transformers import AutoModelForCausalLM
    for directory in each("experts"):
        try:
            AutoModelForCausalLM.from_pretrained(directory)
        except RuntimeError as error:
            assert "ignore_mismatched_sizes" in str(error), error
        else:
            raise AssertionError(f"{directory} loaded with random layers")
        right(AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True), directory)
    for directory in each():
        right(nmm_compiler.load(directory), directory)
        right(AutoModelForCausalLM.from_pretrained(directory), directory)

apart(an_import_before_transformers_is_right_or_raises_until_load_has_registered)
print("without this package", file=sys.stderr)
from transformers import (
    AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen3MoeForCausalLM,
)  # the last three once for all

def without_this_package_the_hub_s_convention_loads_and_all_else_raises():
    for directory, trust in (*in_turn(None, False), (saved / "experts", True)):
        try:
            AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=trust)
        except RuntimeError as error:
            assert "ignore_mismatched_sizes" in str(error), error
        else:
            raise AssertionError(f"{directory} loaded with random layers")
    for directory in each("experts"):
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
        right(model, directory)
        model.save_pretrained(directory / "again")
        again = AutoModelForCausalLM.from_pretrained(directory / "again", trust_remote_code=True)
        right(again, directory)
        base = AutoModel.from_pretrained(directory, trust_remote_code=True)
        assert type(base).__name__ in ("LlamaModel", "GPT2Model")
    assert "nmm_compiler" not in sys.modules

def after_the_import_from_pretrained_and_load_are_right():
    sys.path.insert(0, root)
    import nmm_compiler
    for directory, trust in in_turn(None, False, True):
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=trust)
        right(model, directory)
        right(nmm_compiler.load(directory), directory)
        model.save_pretrained(directory / "again")
        right(nmm_compiler.load(directory / "again"), directory)

apart(without_this_package_the_hub_s_convention_loads_and_all_else_raises)
apart(after_the_import_from_pretrained_and_load_are_right)
"""


def test_each_way_to_load_is_right_or_raises(saved):
    """In processes of their own, where this package is not on the path unless it is imported.

    Where it is imported first, nothing is said of torchao, which transformers imports.
    """
    places = {"HF_HOME": str(saved.parent / "hub"), "PYTHONPATH": ""}
    done = ran("-c", START + WAYS, saved, ROOT, BOUND, cwd="/", timeout=900, **places)
    first, _, rest = done.stderr.partition("without this package\n")
    assert rest
    assert not re.search(r"torchao/|_pytree\.py", first), first


def test_a_model_that_is_not_of_transformers_says_what_saves_it(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    nmm_compiler.compress(model, 0.3, align=4)
    with pytest.raises(nmm_compiler.NmmError, match="save_factors"):
        nmm_compiler.save(model, tmp_path / "a")


def test_a_transformers_that_does_not_fit_is_a_warning(monkeypatch):
    def register():
        raise ImportError("no quantizers")

    monkeypatch.setattr("nmm_compiler.lowrank_models.hf.register", register)
    with pytest.warns(UserWarning, match="refuse models that nmm_compiler saved: no quantizers"):
        nmm_compiler._register_saved_models()
