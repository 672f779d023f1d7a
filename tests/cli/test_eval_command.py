"""`nmm eval` hands its words to lm-eval, and ends as lm-eval ends."""

import sys
import types

import pytest

from nmm_compiler.cli.main import main


@pytest.fixture
def lm_eval(monkeypatch):
    """Put a stand-in for lm-eval's command in its place; return what it does when it is called."""
    does = {}
    module = types.ModuleType("lm_eval.__main__")
    module.cli_evaluate = lambda: does["now"](sys.argv)
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", module)
    return does


def run(directory, *words):
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(directory), *words])
    return ended.value.code


def test_words_and_endings(lm_eval, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    seen = []
    lm_eval["now"] = seen.append
    assert run(tmp_path, "--tasks", "arc_easy", "--limit", "2") == 0
    wanted = ["--model", "hf", "--model_args", f"pretrained={tmp_path}"]
    assert seen == [["lm_eval", *wanted, "--tasks", "arc_easy", "--limit", "2"]]

    def ends(argv):
        raise SystemExit(3)

    def fails(argv):
        raise TypeError("no end token")

    lm_eval["now"] = ends
    assert run(tmp_path) == 3
    lm_eval["now"] = fails
    assert run(tmp_path) == 2
    assert "lm-eval raised: TypeError: no end token" in capsys.readouterr().err
    assert sys.argv[0] != "lm_eval"
