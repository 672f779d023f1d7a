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
