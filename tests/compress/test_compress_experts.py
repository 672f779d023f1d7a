"""Stacked experts: factorized one by one, kept as stacks, saved and loaded."""

import copy

import pytest
import torch
from toy_models import experts_model

import nmm_compiler
from nmm_compiler.lowrank_models import hf
from nmm_compiler.lowrank_models.apply import calibrate, compress

transformers = pytest.importorskip("transformers", minversion="5.0")
KINDS = ("Mixtral", "Qwen3Moe", "GptOss")


def make(kind, **sizes):
    model = experts_model(kind, **sizes)
    for parameter in model.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def ids(seed=1):
    return torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(seed))


DATA = [{"input_ids": ids(seed)} for seed in (2, 3)]


@torch.no_grad()
def logits(model):
    return model(ids()).logits


def layers(model):
    return {n: m for n, m in model.named_modules() if n.endswith(".experts")}


def ranks_of_stacks(report):
    """Return the rank of each of the four stacks, which all experts of it have."""
    found = {(layer.name.rpartition(".")[0], layer.rank)
             for layer in report.layers if ".experts." in layer.name}  # fmt: skip
    assert len(found) == len(dict(found)) == 4
    return dict(found).values()


@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_chains_compute_what_the_dense_experts_do(kind):
    """Rank 31 of 32 directions with one left out of the weights: nothing is lost."""
    model = make(kind)
    for layer in layers(model).values():
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer, name).data
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            s[:, 12:] = 0
            getattr(layer, name).data = (u * s[:, None]) @ v
    expected = logits(model)
    report = compress(model, rank=12, include="experts")
    assert len(report.compressed) == 2 * 2 * 4
    assert (logits(model) - expected).norm() <= 1e-4 * expected.norm()
    for layer in layers(model).values():
        assert layer.gate_up_factors.down.shape == (4, 12, 32)
        assert layer.down_factors.up.shape == (4, 32, 12)
        assert not hasattr(layer, "gate_up_proj")


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_experts_of_a_weight_have_one_rank(kind):
    model = make(kind)
    before = sum(p.numel() for p in model.parameters())
    report = compress(model, 0.3, calibration=DATA, align=4)
    ranks_of_stacks(report)
    assert report.achieved_ratio >= 0.3
    assert sum(p.numel() for p in model.parameters()) < before
    assert torch.isfinite(logits(model)).all()


def test_experts_that_no_token_reaches_get_their_own_best_rank():
    model = make("Mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[3] = -100.0 * layer.mlp.gate.weight.data[0].abs()
    few = [{"input_ids": ids()[:1, :2]}]
    statistics = calibrate(model, few)
    unreached = [n for n in statistics.inputs if ".experts." in n]
    assert len(unreached) < 2 * 2 * 4
    report = compress(model, 0.3, calibration=statistics, align=4)
    assert torch.isfinite(logits(model)).all()
    assert any(layer.output_error is None for layer in report.compressed)


BASES = {
    "fp8": {"base": "fp8", "rank": 0},
    "fp8+8": {"base": "fp8", "rank": 8},
    "mxfp4+8": {"base": "mxfp4", "rank": 8},
    "mxfp8": {"base": "mxfp8", "rank": 0},
    "factors": {"rank": 8},
}


def wide(kind, **more):
    """Return a model whose experts' sizes MX blocks divide, in bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, **more}
    if kind == "Qwen3Moe":
        sizes["moe_intermediate_size"] = 96
    return make(kind, **sizes).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("Mixtral", "fp8"), ("Qwen3Moe", "mxfp4+8"), ("GptOss", "fp8+8"), ("GptOss", "factors")]
    + [pytest.param("GptOss", form, marks=pytest.mark.long) for form in ("fp8", "mxfp4+8", "mxfp8")]
    + [pytest.param("DeepseekV3", "fp8", marks=pytest.mark.long)],
)
def test_experts_of_few_bits_are_one_call_a_layer(kind, form, tmp_path):
    """Compressed, saved, loaded, compiled: the call gives what plain PyTorch does."""
    model = wide(kind, num_hidden_layers=1 + (kind == "DeepseekV3"))  # its first layer has none
    before = logits(model)
    compress(model, include="experts", **BASES[form])
    expected = logits(model)
    assert (expected - before).norm() < (0.9 if "8" in form else 2) * before.norm()
    hf.save(model, tmp_path / "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    near = 0.01 * expected.norm()  # its rotary embeddings are not rounded
    assert (logits(loaded) - expected).norm() <= near
    target = "trn3" if form.startswith("mx") else "trn2"
    torch._dynamo.reset()
    options = {"target": target, "kernels": "lazy", "strict": True, "inner": "eager"}
    got = logits(torch.compile(loaded, backend="nmm", options=options))
    found = [line.split()[0] for one in nmm_compiler.reports() for line in one.matches]
    assert found.count("experts") == len(layers(model))
    assert (got - expected).float().norm() <= 0.02 * expected.float().norm()


def layer_of_experts():
    """Return the experts of one layer in a model of their own."""
    experts = make("Mixtral", hidden_size=64, intermediate_size=96).model.layers[0].mlp.experts
    return torch.nn.ModuleDict({"experts": experts})


@torch.no_grad()
def test_experts_that_no_kernel_takes_are_computed_by_pytorch_beside_calls_of_kernels():
    """In float32 no kernel reads few-bit weights; the chain in front of the experts has one."""
    model = layer_of_experts()
    compress(model, base="mxfp4", rank=0)
    down, up = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 64)

    def function(x, index, weights):
        return model["experts"](up(down(x)), index, weights)

    x, index, weights = torch.randn(6, 64), torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
    reports = []
    options = {"target": "trn3", "executor": "simulator", "strict": True, "inner": "eager"}
    options["report"] = reports.append
    expected = function(x, index, weights)
    got = torch.compile(function, backend="nmm", options=options)(x, index, weights)
    assert [report.chains for report in reports] == [1]
    assert "x in float32" in reports[0].declined[0].reason
    assert (got - expected).norm() <= 1e-5 * expected.norm()


@torch.no_grad()
def test_a_branch_beside_fp8_experts_stays_out_of_kernels_in_float16():
    """Kernels take it divided by the scales: 1 / 3e-6 is no float16."""
    model = layer_of_experts()
    for parameter in model.parameters():
        parameter.data.mul_(1e-3)
    compress(model, base="fp8", rank=8)
    model.half().experts.gate_up_factors.up.data.fill_(1.0)
    given = torch.randn(6, 64).half(), torch.tensor([[0, 1]] * 6), torch.rand(6, 2).half()
    options = {"executor": "simulator", "inner": "eager"}
    compiled = torch.compile(model["experts"].forward, backend="nmm", options=options)
    assert torch.equal(compiled(*given), model["experts"](*given))
    (declined,) = nmm_compiler.explain(model["experts"], given).declined
    assert "cast the model to bfloat16" in declined.reason


def test_a_base_is_as_near_as_its_format_allows():
    """int4 of every expert alone, and with the branch that mends it."""
    model, alone, mended = (wide("GptOss").float() for _ in range(3))
    expected = logits(model)
    compress(alone, include="experts", base="int4", rank=0)
    compress(mended, include="experts", base="int4", rank=16, calibration=DATA)
    errors = [(logits(one) - expected).norm() / expected.norm() for one in (alone, mended)]
    assert errors[1] < 0.8 * errors[0]
    assert all(layer.gate_up_base.values.dtype == torch.uint8 for layer in layers(alone).values())


def test_a_budget_of_bytes_gives_the_experts_of_a_weight_one_rank():
    model = make("Mixtral", hidden_size=128, intermediate_size=256).to(torch.bfloat16)
    report = compress(model, 0.5, base="mxfp4", include="experts", calibration=DATA)
    assert any(ranks_of_stacks(report))
    assert torch.isfinite(logits(model)).all()


def test_one_weight_of_few_bits_beside_a_dense_one():
    """No single call says this: batched products, through blocks that are filled up."""
    dense = wide("GptOss").float()
    expected = logits(dense)
    for include in ("experts.gate_up_proj", "experts.down_proj", "experts"):
        model = copy.deepcopy(dense)
        compress(model, include=include, base="mxfp8", rank=0)
        assert (logits(model) - expected).norm() <= 0.2 * expected.norm()


def test_factors_of_experts_have_gradients():
    model = wide("Mixtral").float()
    compress(model, include="experts", base="fp8", rank=8)
    model(ids()).logits.square().mean().backward()
    factors = {n: p.grad for n, p in model.named_parameters() if "_factors." in n}
    assert len(factors) == 2 * 2 * 2
    assert all(grad.norm() > 0 for grad in factors.values())
