"""Every report begins with what low rank gains, computed when it is shown."""

import pytest
import torch
from torch import nn
from toy_models import llama

import nmm_compiler as nmm
from nmm_compiler.errors import InternalFaultError
from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.report.headline import told_apart


def compiled(model, tokens):
    reports = []
    torch._dynamo.reset()
    options = {"inner": "eager", "kernels": "lazy", "report": reports.append}
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.no_grad():
        torch.compile(model, backend="nmm", options=options)(input_ids=ids, use_cache=False)
    (report,) = reports
    return report


@pytest.mark.usefixtures("closed_form_only")
def test_dense_and_compressed_llama_say_what_low_rank_brings(monkeypatch):
    model = llama(256, 1024, dtype=torch.bfloat16)
    dense = compiled(model, 64)
    said = " ".join(str(dense).split())
    assert "in the products that could be low-rank (at 80 % of their parameters" in said
    assert "next: nmm plan DIRECTORY" in said

    report = nmm.compress(model, 0.3)
    asked = []
    predict = nmm.prediction.headlines.predict
    monkeypatch.setattr(
        "nmm_compiler.prediction.headlines.predict",
        lambda *a, **k: asked.append(k) or predict(*a, **k),
    )
    assert "whole" not in report.to_dict()
    assert asked == []  # seconds, so not before it is shown
    whole = report.headline()
    assert whole == report.headline()
    # simulated too, as the closed form does not tell the two apart
    assert [one.get("price", "simulated") for one in asked] == ["closed_form", "simulated"]
    assert "per token and" in whole
    assert "to first token (batch 1, stack own) on trn2 over our dense kernels" in whole
    assert whole.endswith("; quality not judged: no calibration")

    low = compiled(model, 64)
    gain = low.predicted.__wrapped__  # computed when asked, once
    assert low.headline() == gain()
    assert "for this graph (64 tokens a call, simulated) on trn2 over our" in low.headline()
    assert "predicted" not in low.to_dict()


@pytest.mark.usefixtures("closed_form_only")
def test_what_is_no_decoder_says_what_it_is_about():
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    report = nmm.compress(model, 0.3)
    said = report.headline()
    assert "in pass of 512 tokens in these layers (simulated) on trn2" in said
    assert "the whole model is not predicted: Sequential is no transformers model" in said
    (timed,) = report.workload
    near = not told_apart(timed.gain, ERRORS[report.source])
    assert ("not told apart from dense" in " ".join(str(report).split())) == near


def test_a_symbolic_size_stays_symbolic_when_the_headline_is_read():
    model = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 12)).eval()
    said = []
    options = {"inner": "eager", "kernels": "lazy", "report": lambda r: said.append(r.headline())}
    run = torch.compile(model, backend="nmm", dynamic=True, options=options)
    with torch.no_grad():
        for tokens in (3, 8, 5):
            run(torch.randn(tokens, 16))
    (line,) = said  # a guard on 3 tokens would have compiled two more graphs
    assert line.endswith("the whole graph is not predicted: its sizes are symbolic")


def _broken(*args, **keywords):
    raise KeyError("a fault of ours")


def test_a_fault_of_ours_is_told_as_one_and_raised_under_strict(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 64)).eval()
    gain = {}
    for strict in (False, True):
        torch._dynamo.reset()
        options = {"inner": "eager", "kernels": "lazy", "strict": strict}
        torch.compile(model, backend="nmm", options=options)(torch.randn(4, 64))
        gain[strict] = nmm.last_report().predicted.__wrapped__
    monkeypatch.setattr("nmm_compiler.prediction.headlines.walk_graph", _broken)
    with pytest.warns(UserWarning, match="a fault in nmm_compiler, KeyError while predicting"):
        line = gain[False]()
    assert "a fault in nmm_compiler, KeyError" in line
    assert "not predicted" not in line
    with pytest.raises(InternalFaultError, match="KeyError while predicting"):
        gain[True]()


def test_a_fault_of_ours_is_no_missing_prediction_of_a_compressed_model(monkeypatch):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    report = nmm.compress(model, 0.3)
    monkeypatch.setattr("nmm_compiler.prediction.headlines.predict", _broken)
    with pytest.warns(UserWarning, match="please report it"):
        assert "a fault in nmm_compiler, KeyError" in report.headline()


def test_a_model_that_cannot_be_copied_is_said():
    class Held(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("holds a socket")

    report = nmm.compress(nn.Sequential(Held(256, 256), nn.Linear(256, 256)), 0.3)
    assert "it cannot be copied: RuntimeError: holds a socket" in report.headline()
