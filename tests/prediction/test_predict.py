"""Whole-model predictions: what they add up, what they may depend on, and what they refuse."""

import collections
import dataclasses
import functools
import json
import re

import pytest
import torch
from torch import nn

from nmm_compiler.errors import (
    FileError,
    ModelError,
    OptionTypeError,
    ShapeError,
    UnknownNameError,
)
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.base import CORES
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.passes.graph import capture
from nmm_compiler.passes.graph.capture import all_graphs, graphs_without_data
from nmm_compiler.prediction import predict as predict_module, walk
from nmm_compiler.prediction.forms import read_form
from nmm_compiler.prediction.meta_models import PUBLIC_MODELS, as_given, meta_model, prepare
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prediction.prices import Cores, kernel_price, price
from nmm_compiler.prediction.walk import Piece, passes_of
from nmm_compiler.prices.kernel import (
    LAUNCH_GAP_US,
    PAIR_BARRIER_US,
    PAIR_EXCHANGE_US,
    beyond_simulated_us,
    collective_us,
    estimate_us,
    exchanges_of,
    simulated_us,
    wait_us,
)
from nmm_compiler.prices.ways import ways
from nmm_compiler.targets import get

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
ENCODER = {
    "model_type": "bert", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip
BASE = {"prompt": 32, "context": 64, "lnc": 1, "price": "closed_form"}
COLLECTIVES = {"all_reduce", "all_gather"}


@functools.cache
def llama(**changes) -> ModelPrediction:
    return predict(LLAMA, "trn2", **BASE | changes)


def kinds(prediction: ModelPrediction) -> set[str]:
    return {line.kind for line in prediction.lines}


@pytest.mark.parametrize(
    ("given", "tp"),
    [
        (LLAMA, 2),
        (ENCODER, 1),
        # with padding, of which its code asks whether it is in the tokens
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "pad_token_id": 0}, 1),
        pytest.param("gpt-oss-20b", 1, marks=pytest.mark.long),
    ],
)
def test_a_trace_without_data_has_the_pieces_of_dynamos_graphs(given, tp, monkeypatch):
    model = prepare(as_given(given), None, "bfloat16", tp)
    monkeypatch.setattr(capture, "all_graphs", None)  # what is tried where the trace fails
    for one in passes_of(model, {"batch": 1, "prompt": 32, "context": 64}):
        made = []
        for trace in (graphs_without_data, all_graphs):
            walk.graphs_of.cache_clear()
            monkeypatch.setattr(walk, "graphs_without_data", trace)
            made.append(walk.walk_pass.__wrapped__(one, get("trn2"), "trn2", 1, takes_norms=True))
        assert made[0] == made[1]


def test_parameters_whose_paths_read_alike_are_told_apart():
    parts = {"a": nn.Sequential(collections.OrderedDict(b=nn.Linear(64, 128))),
             "a_b": nn.Linear(128, 64)}  # fmt: skip
    model = nn.Sequential(collections.OrderedDict(parts))
    made = predict(model, "trn2", inputs=(torch.empty(8, 64),), price="closed_form")
    assert [line.module for line in made.lines if line.kind == "kernel"] == ["a.b", "a_b"]


def test_a_state_that_is_written_in_place_is_read_and_written_once():
    class Step(nn.Linear):
        def forward(self, x, state):
            state.copy_(state + super().forward(x))
            return x

    given = torch.empty(4, 128, 64), torch.empty(4, 128, 256)
    (line,) = (
        line
        for line in predict(Step(64, 256), inputs=given, price="closed_form").lines
        if line.kind == "pointwise"
    )
    assert line.what.endswith(f" {3 * given[1].nbytes:,} B")  # the product, the state twice


def test_sums_equal_their_lines():
    made = llama(ratio=0.3)
    for phase in made.phases:
        assert phase.us == pytest.approx(sum(line.calls * line.each_us for line in phase.lines))
        for field in ("module", "kind", "source"):
            assert sum(phase.by(field).values()) == pytest.approx(phase.us)
    assert [p.name for p in made.phases] == ["prefill", "decode"]
    assert made.ttft_us == made.phases[0].us
    assert made.tpot_us == made.phases[1].us
    assert made.tokens_per_second == pytest.approx(1e6 / made.tpot_us)
    assert made.gain["decode"] == pytest.approx(made.dense.tpot_us / made.tpot_us)


def test_every_line_says_where_it_is_from_and_what_it_is_worth():
    for line in llama(ratio=0.3, price="simulated").lines:
        assert line.source in ("simulated", "bound", "published law", "fitted")
        assert -1 < line.error_band[0] < 0 < line.error_band[1]
        assert line.each_us > 0
        assert line.kind != "kernel" or line.source == "simulated", line


def test_a_rank_that_saves_nothing_leaves_the_dense_model():
    made = llama(rank=4096, last=True)
    assert made.phases == made.dense.phases
    assert (set(made.gain.values()), made.parameters) == ({1.0}, made.dense.parameters)


def test_low_rank_changes_the_products_and_nothing_of_attention():
    made = llama(ratio=0.3)
    for phase in made.phases:
        dense = made.dense.phase(phase.name)
        assert phase.by("kind")["attention"] == dense.by("kind")["attention"]
        assert phase.by("kind")["kernel"] != dense.by("kind")["kernel"]
    assert made.parameters < made.dense.parameters
    assert made.memory.weight_bytes < made.dense.memory.weight_bytes
    assert made.memory.cache_bytes == made.dense.memory.cache_bytes


def test_more_tokens_sequences_and_context_take_longer():
    prefill, decode = (phase.us for phase in llama().phases)
    assert prefill < llama(prompt=256).phase("prefill").us
    assert decode < llama(context=1 << 18, last=True).phase("decode").us
    assert decode < llama(batch=4).phase("decode").us


def test_the_cache_grows_with_context_and_batch():
    at = llama().memory.cache_bytes
    # Two tensors of 2 heads x 64 features in bfloat16, for 63 tokens that are there, 3 layers.
    assert at == 3 * 2 * 2 * 64 * 2 * 63
    assert llama(batch=4).memory.cache_bytes == 4 * at


def test_one_core_exchanges_nothing_and_two_exchange_twice_a_layer():
    for one in (llama(), llama(ratio=0.3)):
        assert not kinds(one) & COLLECTIVES
        assert not any("+ law" in line.source for line in one.lines)
    two = llama(tp=2)
    for phase in two.phases:
        assert sum(x.calls for x in phase.lines if x.kind == "all_reduce") == 2 * 3
    assert two.memory.weight_bytes < llama().memory.weight_bytes


def test_rows_are_summed_inside_of_a_kernel_where_that_is_faster():
    """Its simulated time and the wait for the other cores; a target without collectives has the
    two products and the all-reduce."""
    two = llama(tp=2, ratio=0.3)
    for phase in two.phases:
        lines = [x for x in phase.lines if x.source == "estimated + law"]
        assert {x.module.rpartition(".")[2] for x in lines} == {"o_proj", "down_proj"}
        assert sum(x.calls for x in lines) == 2 * 3
        assert "all_reduce" not in phase.by("kind")
        for line in lines:
            k, r = (int(re.search(rf" {name}(\d+) ", line.what)[1]) for name in "kr")
            m = 32 if phase.name == "prefill" else 1
            spec = LowRankSpec(m=m, k=k, r=r, n=256, v_layout="row", tp=2, tp_axis="rows")
            assert spec.short() in line.what
            assert f"{2 * m * r:,} B inside" in line.what
            inside = estimate_us(spec, get("trn2")) + wait_us(2, get("trn2"))
            assert line.each_us == pytest.approx(inside)
            alone = dataclasses.replace(spec, tp=1, tp_axis="")
            apart = sum(estimate_us(one, get("trn2")) for one in alone.as_products()[0])
            apart += collective_us("all_reduce", 2 * m * r, 2, get("trn2")) + 3 * LAUNCH_GAP_US
            assert f"{apart:.1f} us apart" in line.what
            assert inside + LAUNCH_GAP_US < apart
    one = predict(LLAMA, "trn1", **BASE, tp=2, ratio=0.3)
    for phase in one.phases:
        assert not any("law" in x.source and x.kind == "kernel" for x in phase.lines)
        assert sum(x.calls for x in phase.lines if x.kind == "all_reduce") == 2 * 3


def test_memory_is_the_bytes_of_the_parameters():
    model = meta_model(as_given(LLAMA), torch.bfloat16).module
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    assert llama().memory.weight_bytes == stored
    assert llama().parameters == sum(p.numel() for p in model.parameters())
    assert llama().memory.fits
    low = llama(ratio=0.3)
    assert low.memory.weight_bytes == 2 * low.parameters < stored


def test_weights_of_one_byte_halve_the_matrices_and_their_bytes():
    small, whole = llama(weights="float8_e4m3"), llama()
    vectors = (2 * 3 + 1) * 256 * 2  # norms stay as they are, and so does the embedding
    embedding = 512 * 256 * 2
    rest = whole.memory.weight_bytes - vectors - embedding
    model = meta_model(as_given(LLAMA), torch.bfloat16).module
    rows = sum(p.shape[0] for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    assert small.memory.weight_bytes == vectors + embedding + rest // 2 + 2 * rows
    moved = [sum(x.calls * x.bytes_us for x in p.phase("decode").lines if x.kind == "kernel")
             for p in (small, whole)]  # fmt: skip
    assert 0.5 < moved[0] / moved[1] < 0.52


def test_equal_layers_are_traced_once_and_count_as_many(monkeypatch):
    short = llama()
    monkeypatch.setattr("nmm_compiler.prediction.meta_models.shorten", lambda model: None)
    predict_module._kept.cache_clear()
    whole = predict(LLAMA, "trn2", **BASE, last=True)
    predict_module._kept.cache_clear()
    for a, b in zip(short.phases[1:], whole.phases, strict=True):
        ours, theirs = a.by("kind"), b.by("kind")
        # The sum that a layer adds to is a step of the next layer's first region: one of eight.
        assert ours.pop("pointwise") == pytest.approx(theirs.pop("pointwise"), rel=1 / 8)
        assert ours == pytest.approx(theirs)
        assert sum(x.calls for x in a.lines) == sum(x.calls for x in b.lines)
        assert len(a.lines) < len(b.lines)
    assert short.memory == whole.memory


@pytest.mark.long
def test_layers_of_different_kinds_are_all_traced():
    types = ["full_attention", "sliding_attention"] * 2
    config = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True,
              "sliding_window": 16, "layer_types": types}  # fmt: skip
    config.pop("head_dim")
    made = predict(config, "trn2", prompt=32, context=2048, lnc=1)
    lines = [x for x in made.phase("decode").lines if x.kind == "attention"]
    assert sorted(x.calls for x in lines) == [2, 2]
    assert len({x.each_us for x in lines}) == 2  # the window holds fewer tokens


def test_attention_is_priced_by_our_kernel_where_the_family_computes_it():
    """Else by the published law."""

    def line(phase, **changes):
        made = llama(**changes)
        (found,) = (x for x in made.phase(phase).lines if x.kind == "attention")
        return found

    sizes = {"heads": 4, "kv_heads": 2, "d": 64, "batch": 4}
    decode = AttentionSpec(m=1, context=64, causal=False, **sizes)
    for phase, spec in (("prefill", AttentionSpec(m=32, **sizes)), ("decode", decode)):
        found = line(phase, batch=4)
        assert (found.source, found.each_us) == ("estimated", estimate_us(spec, get("trn2")))
    found = line("decode", context=1 << 18, last=True)
    assert found.source == "published law"
    assert "B of the cache" in found.what


def test_a_model_runs_on_the_physical_cores_that_its_kernels_are_launched_on():
    """The passes, `compress` and `predict` decide for one physical core, as the runtime checks."""
    made = predict(LLAMA, "trn2", **{k: v for k, v in BASE.items() if k != "lnc"}, ratio=0.3)
    assert made.lnc == made.dense.lnc == CORES == Options().lnc
    of = {
        line.what.partition(";")[0]: line.each_us
        for line in made.phase("decode").lines
        if line.kind == "kernel"
    }
    head = MatmulSpec(m=1, k=256, n=512, norm="rms", norm_gain=True)
    assert of[head.short()] == estimate_us(head, get("trn2"))


def test_an_encoder_has_one_pass():
    made = predict(ENCODER, "trn1", prompt=64, ratio=0.3, price="closed_form")
    assert [p.name for p in made.phases] == ["pass"]
    assert made.dense.memory.activation_bytes == 3 * 64 * 256 * 2
    assert made.tpot_us is None
    assert "a pass" in made.headline()


def test_a_module_of_ones_own_needs_inputs():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))
    made = predict(model, "trn2", inputs=(torch.zeros(8, 256),), lnc=1)
    assert made.dtype == "float32"
    assert sum(x.calls for x in made.lines if x.kind == "kernel") == 2
    assert made.memory.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert all(not p.is_meta for p in model.parameters())


def test_a_headline_says_when_low_rank_does_not_pay():
    made = llama(ratio=0.3)

    def taking(share):
        phases = []
        for phase in made.phases:
            lines = (dataclasses.replace(x, each_us=share * x.each_us) for x in phase.lines)
            phases.append(dataclasses.replace(phase, lines=tuple(lines)))
        return dataclasses.replace(made, phases=tuple(phases))

    assert "does not pay" in taking(9).headline()
    text = taking(1 / 9).headline("perplexity 12.1 after 11.8")
    assert "does not pay" not in text
    assert text.endswith("perplexity 12.1 after 11.8")


AWQ = {**LLAMA, "quantization_config": {"quant_method": "awq"}}


@pytest.mark.parametrize(
    ("given", "changes", "error", "said"),
    [
        (LLAMA, {"prompt": 0}, ShapeError, "prompt"),
        (LLAMA, {"tp": True}, ShapeError, "tp"),
        (LLAMA, {"lnc": 3}, OptionTypeError, "lnc"),
        (LLAMA, {"lnc": 2, "target": "trn1"}, OptionTypeError, "at most 1 physical core for a"),
        (LLAMA, {"target": "trn1", "weights": "float8_e4m3"}, OptionTypeError, "trn1 multiplies"),
        (LLAMA, {"weights": "int8"}, OptionTypeError, "trn2 multiplies: bf16, fp8"),
        (LLAMA, {"dtype": "int4"}, UnknownNameError, "dtype"),
        (LLAMA, {"include": ["mlp"]}, OptionTypeError, "ratio"),
        (AWQ, {}, ModelError, "quantized by awq"),
        (nn.Linear(256, 512), {}, ModelError, "inputs="),
        ("llama-3.2-1c", {}, UnknownNameError, r"llama-3\.2-1b"),
        ({"hidden_size": 3}, {}, ModelError, "model_type"),
        ({**LLAMA, "hidden_size": "x"}, {}, ModelError, "refuses the config: .*hidden_size"),
        ({**LLAMA, "hidden_size": -64}, {}, ModelError, "makes no model of the config: Runtime"),
    ],
)
def test_bad_arguments_and_what_is_no_model_are_named(given, changes, error, said):
    with pytest.raises(error, match=said):
        predict(given, **{"target": "trn2", **BASE, **changes})


def test_a_file_is_the_config_that_it_holds(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(FileError, match=r"config\.json is not JSON"):
        predict(path)
    path.write_text(json.dumps(LLAMA))
    assert predict(tmp_path, "trn2", **BASE, last=True).phases == llama().phases[1:]


def test_a_saved_low_rank_config_is_compared_with_the_dense_model(tmp_path):
    ranks = {f"model.layers.{i}.mlp.{n}_proj": 64 for i in range(3) for n in ("gate", "up", "down")}
    saved = {"quant_method": "nmm_lowrank", "ranks": ranks}
    made = predict({**LLAMA, "quantization_config": saved}, "trn2", **BASE, last=True)
    assert made.ranks == (64,)
    assert made.dense.phases == llama().phases[1:]
    assert made.phases == llama(rank=64, include="mlp", last=True).phases


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 64])
def test_a_saved_base_of_few_bits_is_no_part_that_a_prediction_leaves_out(rank):
    ranks = {f"model.layers.{i}.mlp.down_proj": rank for i in range(3)}
    saved = {"quant_method": "nmm_lowrank", "ranks": ranks, "bases": dict.fromkeys(ranks, "fp8")}
    made = predict({**LLAMA, "quantization_config": saved}, "trn2", **BASE, last=True)
    held = made.dense.memory.weight_bytes - made.memory.weight_bytes
    k, n, layers = 512, 256, 3  # a byte an element and a scale a row, for two bytes an element
    assert held == layers * (k * n - 2 * n - 2 * rank * (k + n))
    assert made.parameters == made.dense.parameters + layers * rank * (k + n)
    with pytest.raises(ModelError, match="those of fp8 with tp=1 alone"):  # its base was dropped
        predict({**LLAMA, "quantization_config": saved}, "trn2", **BASE, tp=2)
    saved["bases"] = dict.fromkeys(ranks, "mxfp4")
    with pytest.raises(ModelError, match="predict the dense model, with weights="):
        predict({**LLAMA, "quantization_config": saved}, "trn3", **BASE)


def test_public_models_have_the_size_of_their_name():
    billions = {"llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03,
                "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
                "llama-3-70b": 70.6, "llama-2-13b": 13.0,
                "mistral-7b": 7.25, "smollm2-135m": 0.135, "qwen2.5-7b": 7.62}  # fmt: skip
    for name, size in billions.items():
        model = meta_model(as_given(name), torch.bfloat16).module
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(size, rel=0.01)
    assert len(PUBLIC_MODELS) >= 18


def test_two_cores_are_priced_as_the_backend_launches_them_also_where_one_is_faster():
    """A weight is stored whole, so that rows of half of few columns are short: no half of a weight
    stored by core is priced, nor one core's kernel where there is one of two."""
    chip = get("trn2")
    pair = Cores(chip, lnc=2)

    def on_two(spec):
        return simulated_us(dataclasses.replace(spec, lnc=2), chip) + PAIR_BARRIER_US

    wide = LowRankSpec(m=1, k=4096, r=1024, n=16384)
    found = kernel_price(wide, pair)
    start = 1e6 * (chip.dma_start_latency_seconds + chip.semaphore_seconds)
    assert found.us == pytest.approx(on_two(wide) + PAIR_EXCHANGE_US - start, rel=1e-12)
    assert (found.source, "2 cores" in found.what) == ("simulated", True)
    narrow = MatmulSpec(m=1, k=5120, n=384)
    by_core = simulated_us(dataclasses.replace(narrow, n=192), chip) + PAIR_BARRIER_US
    assert kernel_price(narrow, pair).us == pytest.approx(on_two(narrow), rel=1e-12)
    assert on_two(narrow) > by_core
    attention = AttentionSpec(m=1, heads=8, kv_heads=8, context=512, d=64)
    piece = Piece("attention", "attn", 1, ways=((attention,),))
    (line,) = price(piece, pair)
    assert line.us == pytest.approx(on_two(attention), rel=1e-12)
    stored = dataclasses.replace(pair, form=read_form("mxfp4+32"))
    # no kernel has factors of MX blocks
    assert price(Piece("kernel", "mlp", 1, ways=((wide,),)), stored) == [found]
    rows = LowRankSpec(m=1, k=2048, r=1024, n=2048).sharded(4, "rows")
    exchanges = exchanges_of(dataclasses.replace(rows, lnc=2))
    shared = on_two(rows) + exchanges * beyond_simulated_us(chip) + wait_us(4, chip)
    assert kernel_price(rows, pair).us == pytest.approx(shared, rel=1e-12)


def test_what_is_fused_is_judged_on_the_cores_that_run_it():
    """On one core a narrow MLP is faster as one kernel, on two as two products."""
    config = {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "head_dim": 128,
        "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 1024,
    }  # fmt: skip
    spec = GatedMLPSpec(m=1, k=5120, n=400, gate_r=0, up_r=0)
    for lnc, fused in ((1, True), (2, False)):
        assert (ways(spec, "trn2", lnc).separate > ways(spec, "trn2", lnc).fused) is fused
        made = predict(config, "trn2", tp=64, lnc=lnc, price="closed_form", last=True)
        mlp = [line.what for line in made.lines if "gate_proj" in line.module]
        assert any("gated_mlp m1" in what for what in mlp) is (len(mlp) == 1) is fused


def test_inputs_are_part_of_what_is_kept():
    """A config with other example inputs is traced and priced anew."""
    each = ({"input_ids": torch.zeros(1, tokens, dtype=torch.long)} for tokens in (16, 512))
    few, many = (predict(ENCODER, price="closed_form", inputs=one).ttft_us for one in each)
    assert many > 1.05 * few


def test_the_activations_of_the_head_are_those_of_one_token():
    """The prefill computes one token's logits, whatever the vocabulary's size."""
    large = predict({**LLAMA, "vocab_size": 8192}, "trn2", **BASE, last=True)
    assert large.memory.activation_bytes == llama().memory.activation_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_module_is_dense_in_the_fastest_dense_way(dtype):
    """The rows of a dense MLP are those of the one function that prices calls."""
    line = next(x for x in llama(dtype=dtype, last=True).phase("decode").lines if "mlp" in x.module)
    spec = GatedMLPSpec(
        m=1, k=256, n=LLAMA["intermediate_size"], down_r=0, activation="silu", dtype=dtype,
        norm="rms", norm_gain=True, residual=True,
    )  # fmt: skip
    assert line.each_us <= ways(spec, "trn2").dense


@pytest.mark.parametrize("weights", ["bfloat16", "float8_e4m3", "fp8+32", "mxfp4+32fp8"])
def test_few_tokens_have_their_norms_and_sums_inside_of_kernels(weights):
    """Apart, each is a launch; a prompt of many tokens has them apart."""
    config = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024}
    made = predict(config, "trn3", **BASE | {"prompt": 512}, weights=weights)
    decode, prefill = made.phase("decode"), made.phase("prefill")
    kernels = [x for x in decode.lines if x.kind == "kernel"]
    assert not any("norm" in x.module for x in decode.lines if x.kind == "pointwise")
    assert sum("rms" in x.what for x in kernels) == 3, [x.what for x in kernels]
    assert sum("residual" in x.what for x in kernels) == 2
    assert all(" us apart" in x.what for x in kernels)
    assert any("norm" in x.module for x in prefill.lines if x.kind == "pointwise")
    rotates = [
        ["rope_q" in x.what for x in one.lines if x.kind == "attention"]
        for one in (decode, prefill)
    ]
    assert rotates == [[True], [False]]
