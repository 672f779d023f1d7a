"""Arguments, statistics, journals and shared objects that must not be passed over in silence."""

import copy
import inspect

import pytest
import torch
from compress_models import stack, tokens
from torch import nn
from torch.nn import functional

from nmm_compiler.compress import apply as module
from nmm_compiler.compress.apply import compress
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.modules import LowRankLinear, lowrank_layers
from nmm_compiler.errors import (
    FactorsFileError,
    NoMatchingModulesError,
    OptionTypeError,
    UnknownNameError,
)

QUIET = {"progress": False}


def test_sensitivity_means_the_same_with_batches_and_with_statistics():
    batches = tokens()
    statistics = module.calibrate(stack(), batches, progress=False)
    ranks = {}
    for sensitivity in ("gradient", "output"):
        found = [
            compress(
                stack(), 0.4, calibration=data, sensitivity=sensitivity, align=1, **QUIET
            ).ranks()
            for data in (batches, statistics)
        ]
        assert found[0] == found[1]
        ranks[sensitivity] = found[0]
    assert ranks["gradient"] != ranks["output"]


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("rank", 4), ("method", "auto"), ("align", 8), ("allocation", "auto"),
        ("budget", "parameters"), ("sensitivity", "gradient"), ("sequential", False),
    ],
)  # fmt: skip
def test_keywords_beside_a_config_are_refused(keyword, value):
    with pytest.raises(OptionTypeError, match=f"{keyword}.*CompressionConfig"):
        compress(stack(), CompressionConfig(ratio=0.3), **{keyword: value}, **QUIET)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"exclude": "layers.0.qq"}, r"exclude pattern 'layers\.0\.qq'.*did you mean"),
        ({"exclude": ["q", "lm_head"]}, "exclude pattern 'lm_head' matches no module"),
        ({"include": []}, "selects nothing"),
    ],
)
def test_patterns_that_match_nothing_are_refused(arguments, text):
    with pytest.raises(NoMatchingModulesError, match=text):
        compress(stack(), 0.3, align=4, **arguments, **QUIET)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"exclude": [3]}, "pattern"),
        ({"include": "re:("}, "valid expression"),
        ({"sequential": True}, "calibration= with it"),
        ({"rank": 4, "allocation": "global"}, "given ranks are not allocated"),
        ({"output": lambda result, batch: result}, "output"),
    ],
)
def test_arguments_that_would_be_dropped_are_refused(arguments, text):
    with pytest.raises(OptionTypeError, match=text):
        compress(stack(), **arguments, **QUIET)


def test_a_config_keeps_the_ranks_that_it_was_made_with():
    ranks = {"up": 4}
    config = CompressionConfig(rank=ranks)
    ranks["up"] = 8
    assert config.rank == {"up": 4}


def _biased(seed=0):
    model = stack(seed)
    model.register_buffer("scale", torch.ones(3))
    return model


@pytest.mark.parametrize("change", ["weight", "rest", "data", "dtype", "cost", "factors"])
def test_resume_refuses_what_the_directory_was_not_made_of(change, tmp_path):
    def cost(k, n, rank):
        return float(k * n if rank is None else rank * (k + n))

    def other_cost(k, n, rank):
        return 2 * cost(k, n, rank)

    keywords = {
        "calibration": tokens(), "align": 4, "resume": tmp_path, "budget": "latency",
        "cost": cost, **QUIET,
    }  # fmt: skip
    model = _biased()
    compress(model, 0.3, **keywords)
    again = _biased()
    compress(again, 0.3, **keywords)  # the same model, data and arguments go on
    compress(again, 0.3, **keywords)  # so does the compressed model
    other = _biased()
    with torch.no_grad():
        if change == "weight":
            other.layers[1].q.weight[0, 0] += 1e-3
        elif change == "rest":
            other.scale[0] = 2
        elif change == "data":
            keywords["calibration"] = tokens(seed=9)
        elif change == "dtype":
            keywords["dtype"] = torch.bfloat16
        elif change == "cost":
            keywords["cost"] = other_cost
        else:
            other = again
            next(iter(lowrank_layers(other).values())).up.weight.mul_(2)
    before = copy.deepcopy(other.state_dict())
    expected = {
        "weight": r"other weights in layers\.1\.q", "rest": "beside the selected",
        "data": "other calibration data", "dtype": "dtype None -> torch.bfloat16",
        "cost": "cost .*cost -> .*other_cost", "factors": "low-rank already, with other factors",
    }  # fmt: skip
    with pytest.raises(FactorsFileError, match=expected[change]):
        compress(other, 0.3, **keywords)
    after = other.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


class Reading(nn.Module):
    """Passes its children's weights to a function, as torch's multi-head attention does."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.out_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = functional.linear(x, self.q_proj.weight, self.q_proj.bias)
        return self.out_proj(y.to(self.out_proj.weight.dtype))


class ReadingElsewhere(nn.Module):
    """The same behind a name that no code reader finds."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.out_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        weights = [getattr(self, f"{letter}_proj").weight for letter in "q"]
        return self.out_proj(functional.linear(x, weights[0]))


def test_layers_that_are_only_read_stay_dense_and_are_named(tmp_path):
    report = compress(nn.Sequential(Reading()), 0.3, align=4, **QUIET)
    assert list(report.ranks()) == ["0.out_proj"]
    assert "Reading reads its weight and never calls it" in report.skipped[0].reason

    for data in (tokens(), module.calibrate(nn.Sequential(ReadingElsewhere()), tokens())):
        model = nn.Sequential(ReadingElsewhere())
        report = compress(model, 0.3, calibration=data, align=4, **QUIET)
        assert list(report.ranks()) == ["0.out_proj"]
        assert "never calls it" in {s.name: s.reason for s in report.skipped}["0.q_proj"]
    torch.manual_seed(0)
    model = nn.Sequential(ReadingElsewhere())
    keywords = {"calibration": tokens(), "align": 4, "resume": tmp_path, **QUIET}
    first = compress(copy.deepcopy(model), 0.3, **keywords)
    assert compress(model, 0.3, **keywords) == first
    assert type(model[0].q_proj._parameters) is dict
    with pytest.raises(NoMatchingModulesError, match="never calls it"):
        compress(
            nn.Sequential(ReadingElsewhere()),
            0.3, calibration=tokens(), include="q_proj", align=4, **QUIET,
        )  # fmt: skip


def test_wavlm_keeps_the_projections_that_it_only_reads():
    transformers = pytest.importorskip("transformers")
    config = transformers.WavLMConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16,), conv_kernel=(10,), conv_stride=(5,), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, num_feat_extract_layers=1,
    )  # fmt: skip
    model = transformers.WavLMModel(config).eval()
    report = compress(model, 0.3, align=4, **QUIET)
    names = {name.rpartition(".")[2] for name in report.ranks()}
    assert names >= {"intermediate_dense", "output_dense"}
    assert not names & {"q_proj", "k_proj", "v_proj", "out_proj"}
    read = [s.name for s in report.skipped if "never calls it" in s.reason]
    assert len(read) == 4
    assert not any(isinstance(model.get_submodule(name), LowRankLinear) for name in read)


def test_memory_without_batches_is_refused():
    statistics = module.calibrate(stack(), tokens(), progress=False)
    for data in (None, statistics):
        with pytest.raises(OptionTypeError, match="memory"):
            compress(stack(), 0.3, calibration=data, memory="8GiB", align=4, **QUIET)


def test_a_weight_of_eight_bits_is_left_alone_by_name():
    model = stack()
    weight = model.layers[0].q.weight.detach().to(torch.float8_e4m3fn)
    model.layers[0].q.weight = nn.Parameter(weight, requires_grad=False)
    report = compress(model, 0.3, align=4, **QUIET)
    (skip,) = [skip for skip in report.skipped if skip.name == "layers.0.q"]
    assert "float8_e4m3fn" in skip.reason
    assert "load it as bfloat16" in skip.reason


@pytest.mark.parametrize("tied", [True, False])
def test_explain_and_compress_agree_on_a_tied_head(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    from nmm_compiler.passes.pipeline import explain

    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    found = explain(model, torch.arange(8)[None])
    assert ("lm_head" in str(found)) == (not tied)
    report = compress(model, 0.3, align=4, **QUIET)
    (skip,) = [skip for skip in report.skipped if skip.name == "lm_head"]
    assert ("tied" in skip.reason) == tied


WRONG = {
    "ratio": ["0.2", True], "rank": [True, "4", {"q": 2.0}], "include": [3], "exclude": [3],
    "filter_fn": ["mlp"], "method": [3, "svdd"], "align": [4.0, True], "dtype": ["bfloat16"],
    "device": [3.5, "bogus"], "progress": ["yes", 1], "allocation": [True, "globl"],
    "budget": [0, "time"], "cost": [3.0], "target": ["bogus", 2], "tokens": [0, 512.0, True],
    "workload": [3, {"prefill": 512}], "allow_slower": ["yes", 1], "sensitivity": ["no", 1],
    "sequential": ["yes", 0], "output": ["logits"], "resume": [3], "memory": ["much", True, -1],
    "factors": ["fp4", 8],
}  # fmt: skip


@pytest.mark.parametrize("how", ["kernels", "cost", "float64"])
@pytest.mark.parametrize("keyword", sorted(WRONG))
def test_a_wrong_value_is_refused_by_its_name(keyword, how):
    """Whether or not something would have asked for it."""
    assert set(WRONG) == set(inspect.signature(compress).parameters) - {"model", "calibration"}
    model = stack().double() if how == "float64" else stack()
    before = copy.deepcopy(model.state_dict())
    for value in WRONG[keyword]:
        given = {"cost": lambda k, n, rank: 1.0} if how == "cost" else {}
        with pytest.raises((OptionTypeError, UnknownNameError), match=keyword):
            compress(model, **{**QUIET, **given, keyword: value})
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
