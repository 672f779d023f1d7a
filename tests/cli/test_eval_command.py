"""`nmm eval` hands its words to lm-eval, and ends as lm-eval ends."""

import sys
from types import SimpleNamespace

import pytest

from nmm_compiler.cli import evaluate
from nmm_compiler.cli.main import main


@pytest.mark.parametrize("ends", [0, 3])
def test_words_and_endings(ends, tmp_path, capsys, monkeypatch):
    seen = []

    def run(command, **more):
        seen.append(command)
        return SimpleNamespace(returncode=ends)

    monkeypatch.setattr(evaluate.subprocess, "run", run)
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: name)
    line = ["eval", str(tmp_path), "--tasks", "arc_easy", "--limit", "2"]
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert "DIRECTORY with the weights" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == (2 if ends else 0)
    assert ("lm-eval ended with exit code 3" in capsys.readouterr().err) == bool(ends)
    wanted = ["--model", "hf", "--model_args", f"pretrained={tmp_path},trust_remote_code=True"]
    assert seen == [[sys.executable, "-m", "lm_eval", *wanted, *line[2:]]]
