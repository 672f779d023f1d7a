"""`make bench-models` fails where runs that nothing was chosen on miss a bar, added ones too."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import models  # tests/passes has a module of that name too

RUNS = json.loads(models.RUNS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("use", ["calibrate", "held out", "added", "apart"])
def test_a_run_that_is_half_too_slow_fails_where_it_is_judged(use, monkeypatch, capsys):
    def predicted(run, price):
        us = 1e3 * run["tpot_ms"] * (1.5 if run["use"] == use else 1.1)
        return SimpleNamespace(tpot_us=us, ttft_us=us)

    monkeypatch.setattr(models, "predicted", predicted)
    with pytest.raises(SystemExit) as ended:
        models.main()
    assert ended.value.code == (use in models.JUDGED)
    assert f"{use:10}" in capsys.readouterr().out


def test_tokens_that_another_tokenizer_counted_are_counted_again():
    """The limit of a request is what it makes; the file says where each figure is from."""
    found = {(run["model"], run["hardware"], run["tp"]): run for run in RUNS if "reading" in run}
    big = found["llama-3.1-405b", "trn2", 64]
    assert big["tpot_ms"] == pytest.approx(1e3 * (70.096 - 2.442) / (1500 - 1), abs=0.01)
    small = found["qwen3-32b", "trn2", 64]
    assert small["tpot_ms"] == pytest.approx(1e3 * (558 / 102.27 - 0.0483) / (512 - 1), abs=0.01)
    for run in RUNS:
        assert run["source"]
        assert run["prompt"] is None or run["prompt"] <= run["context"]
