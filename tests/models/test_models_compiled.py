"""Models of every kind, compressed and compiled: exact counts, and outputs equal to eager."""

import dataclasses
import warnings

import pytest
import torch
from configurations import MODELS, RANK, make
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from nmm_compiler import backend
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers
from nmm_compiler.passes.pipeline import explain

QUICK = ("llama", "deepseek_v3", "t5", "bert", "vit")
OPTIONS = {"inner": "eager", "kernels": "lazy", "verify": True}


def run(model, inputs):
    """Return the tensors of a model's output, in order."""
    torch.manual_seed(1)  # some models draw a mask
    leaves = pytree.tree_leaves(model(**inputs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def run_and_count_uses(model, inputs):
    """Return the outputs, and how often a low-rank layer was called."""
    called = []

    def count(module, *_):
        if isinstance(module, LowRankLinear):
            called.append(module)

    with register_module_forward_hook(count):
        return run(model, inputs), len(called)


def tolerance(model: nn.Module) -> float:
    """Return how far two correct evaluations may differ, relative to an output's largest value.

    A product of contraction length K, summed in another order, moves its result by about
    eps sqrt(K) of its norm; the products' errors add, twice (two evaluations) and with both signs.
    """
    lengths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    return 4 * torch.finfo(torch.float32).eps * sum(length**0.5 for length in lengths)


SLOW = [pytest.param(name, marks=pytest.mark.long) for name in MODELS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_model(name):
    pytest.importorskip("transformers")
    row = MODELS[name]
    model, inputs = make(row)
    compress(model, rank=RANK)
    compiled = torch.compile(model, backend="nmm", options=OPTIONS)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="nmm:.*")  # nothing fell back
        want, uses = run_and_count_uses(model, inputs)
        torch._dynamo.reset()
        got = run(compiled, inputs)
    reports = backend.reports()
    assert [report.fallback for report in reports if report.fallback] == []
    assert row.expected == {
        "layers": sum(isinstance(m, LowRankLinear) for m in model.modules()),
        "uses": uses,
        "chains": sum(report.chains for report in reports),
        "calls": sum(len(report.matches) for report in reports),
        "graphs": len(reports),
    }
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if b.numel() and b.is_floating_point():
            limit = tolerance(model) * max(1.0, float(b.abs().max()))
            assert float((a - b).abs().max()) <= limit  # false for NaN
        else:
            assert torch.equal(a, b)


def test_the_table_is_large_and_says_why_a_layer_is_not_in_a_call():
    assert len(MODELS) >= 90
    for row in MODELS.values():
        counts = row.expected
        if len({counts["layers"], counts["uses"], counts["chains"]}) > 1:
            assert row.note, row.model_type


# Models that are low-rank as they come: a latent behind a norm, a time step of small rank.
OWN_CHAINS = {"deepseek_v3": {"between"}, "mamba": {"between"}, "jamba": {"between"}}


UNCOMPRESSED = (
    "qwen3", "mistral", "gemma", "phi", "opt", "bert", "t5", "whisper", "deepseek_v3", "mixtral",
    "mamba", "phi3", "qwen2_moe", "bloom", "clip_vision_model", "modernbert", "jamba",
    "llama4_text", "qwen3_next", "qwen3_5_text",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llama", 1), ("gpt2", 6), ("vit", None)]
    + [pytest.param(name, None, marks=pytest.mark.long) for name in UNCOMPRESSED],
)
def test_uncompressed_models_have_no_refusals(name, tokens):
    """Dense layers, rotary embeddings and attention are no chains that something hinders."""
    pytest.importorskip("transformers")
    row = MODELS[name]
    if name == "deepseek_v3":  # latents that save products
        row = dataclasses.replace(row, config=row.config | {"kv_lora_rank": 6, "q_lora_rank": 6})
    model, inputs = make(row)
    if tokens is not None:
        inputs = {"input_ids": inputs["input_ids"][:1, :tokens]}
    found = explain(model, inputs)
    assert found.opportunities
    assert {d.code for d in found.declined} == OWN_CHAINS.get(name, set()), str(found)
    kinds = {m.kind for m in found.matches} - {"experts"}
    assert kinds == ({"mla"} if name == "deepseek_v3" else set())


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in ("gemma", "qwen3", "gpt2"))],
)
def test_two_norms_and_two_residuals_of_each_layer(name):
    """The norm behind the layers stays; so do the norms of q and k of Qwen 3."""
    pytest.importorskip("transformers")
    model, inputs = make(MODELS[name])
    compress(model, rank=8, align=8)
    options = {"rules": ["+norms"], "strict": True, "inner": "eager"}
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        compiled = torch.compile(model, backend="nmm", options=options)
        got = compiled(**inputs).last_hidden_state
    words = " ".join(backend.last_report().matches).split()
    assert words.count("norm") == words.count("residual") == 2 * model.config.num_hidden_layers
    assert float((got - want).abs().max()) <= tolerance(model) * float(want.abs().max())


ROUND_TRIPS = (
    "falcon", "opt", "gpt_neox", "bloom", "phi", "gemma2", "olmo2", "starcoder2", "cohere",
    "stablelm", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe",
    "phimoe", "gpt_oss", "granitemoe",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_every_linear_is_factorized_or_named_and_round_trips(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, inputs = make(MODELS[name])
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    report = compress(model, 0.2, calibration=[inputs], align=4)
    assert linears <= {one.name for one in (*report.layers, *report.skipped)}
    assert len(report.compressed) >= 2
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert lowrank_layers(loaded).keys() == lowrank_layers(model).keys()
    with torch.no_grad():
        for got, want in zip(run(loaded.eval(), inputs), run(model, inputs), strict=True):
            assert torch.equal(got, want)


@pytest.mark.long
def test_a_layer_of_mamba_whose_weight_is_read_is_left_alone():
    pytest.importorskip("transformers")
    model, inputs = make(MODELS["mamba"])
    report = compress(model, 0.2, calibration=[inputs], align=4)
    read = [skip.name for skip in report.skipped if "reads its weight" in skip.reason]
    assert read
    assert all(name.endswith("dt_proj") for name in read)
