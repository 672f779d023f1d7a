"""Arguments, statistics and shared objects that must not be passed over in silence."""

import dataclasses
import math

import pytest
import torch
from compress_models import stack, tokens, unchanged
from torch import nn
from torch.nn import functional
from toy_models import llama

from nmm_compiler.errors import ModelError, OptionTypeError, ShapeError, UnknownNameError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.passes.pipeline import explain


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"ratio": 1.0}, OptionTypeError, r"ratio.*1\.0.*\[0, 1\)"),
        ({"ratio": -0.1}, OptionTypeError, "ratio"),
        ({"ratio": math.nan}, OptionTypeError, "ratio"),
        ({"ratio": 0.2, "rank": 4}, OptionTypeError, "not both"),
        ({"ratio": 0.2, "align": 128}, ModelError, "align=128"),
        ({"rank": {"q": 2.5}}, OptionTypeError, "rank"),
        ({"rank": {"qq": 4}}, ModelError, "'qq' matches none"),
        ({"rank": 17, "align": 16}, ModelError, "pass 16 or 32"),
        ({"rank": 0}, OptionTypeError, "base="),
        ({"method": "whitend"}, UnknownNameError, "did you mean 'whitened'"),
        ({"method": "whitened"}, OptionTypeError, "calibration="),
        ({"method": "svd", "calibration": tokens(1)}, OptionTypeError, "calibration= with it"),
        ({"sequential": True}, UnknownNameError, "unknown option 'sequential'"),
        ({"calibration": []}, ModelError, "no batches"),
        ({"include": "gate"}, ModelError, r"'gate' matches no linear.*layers\.0\.q"),
        ({"include": []}, ModelError, "selects nothing"),
        ({"include": "re:("}, OptionTypeError, "valid expression"),
        ({"exclude": "layers"}, ModelError, r"linear layers seen: layers\.0\.q"),
        ({"exclude": "layers.0.qq"}, ModelError, r"pattern 'layers\.0\.qq'.*did you mean"),
        ({"exclude": ["q", "lm_head"]}, ModelError, "exclude pattern 'lm_head' matches no module"),
        ({"exclude": [3]}, OptionTypeError, "pattern"),
        ({"base": "mxfp4", "rank": 12, "factors": "mxfp8"}, ShapeError, r"q\.up has 12.*32"),
        ({"base": "mxfp4", "ratio": 0.9}, ModelError, "cannot be met"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(arguments, error, text):
    model = stack(width=64, inner=96)
    with unchanged(model), pytest.raises(error, match=text):
        compress(model, **arguments)


class Uses(nn.Module):
    """Uses its layers in ways that its code tells apart."""

    def __init__(self):
        super().__init__()
        for name in ("only_read", "read_by_a_method", "called", "both", "handed_on", "not_reached"):
            setattr(self, name, nn.Linear(32, 32))

    def rows(self):
        return self.read_by_a_method.weight, self.both.weight

    def unused(self):
        return self.not_reached.weight

    def forward(self, x):
        x = functional.linear(x, self.only_read.weight, self.only_read.bias)
        first, second = self.rows()
        for layer in (self.handed_on,):
            x = layer(x)
        return self.called((lambda y: self.both(y))(x @ first @ second))


def test_without_calibration_the_code_says_which_layers_are_only_read():
    report = compress(nn.Sequential(Uses()), 0.3, align=4)
    assert {one.name for one in report.skipped} == {"0.only_read", "0.read_by_a_method"}
    assert all("Uses reads its weight and never calls it" in s.reason for s in report.skipped)


@pytest.mark.parametrize("tied", [True, False])
def test_explain_and_compress_agree_on_a_tied_head(tied):
    model = llama(tie_word_embeddings=tied)
    found = explain(model, torch.arange(8)[None])
    assert ("lm_head" in str(found)) == (not tied)
    report = compress(model, 0.3, align=4)
    (skip,) = [skip for skip in report.skipped if skip.name == "lm_head"]
    assert ("tied" in skip.reason) == tied


WRONG = {
    "ratio": ["0.2", True], "rank": [0, True, "4", {"q": 2.0}], "include": [3], "exclude": [3],
    "method": [3, "svdd"], "align": [4.0, True, 0],
    "target": ["bogus", 2], "allow_slower": ["yes", 1],
    "workload": [0, 512.0, True, {}, {"prefill": 512}, {"decode": (0, 1)}, {"decode": (1, -1)},
                 {"a": (1, 1, 1)}],
    "factors": ["fp4", 8], "base": ["fp4", 8],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keyword", sorted(WRONG))
def test_a_wrong_value_is_refused_by_its_name(keyword, dtype):
    """Whether or not something would have asked for it."""
    fields = {field.name for field in dataclasses.fields(CompressionConfig)}
    assert set(WRONG) == fields - {"calibration"}
    model = stack().to(getattr(torch, dtype))
    for value in WRONG[keyword]:
        with unchanged(model), pytest.raises((OptionTypeError, UnknownNameError), match=keyword):
            compress(model, **{keyword: value})
