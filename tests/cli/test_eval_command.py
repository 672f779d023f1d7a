"""`nmm eval` hands its words to lm-eval, and ends as lm-eval ends."""

import importlib.machinery
import sys
import types

import pytest

from nmm_compiler.cli.main import main


@pytest.fixture
def lm_eval(monkeypatch, tmp_path):
    """Put a stand-in for lm-eval's command in its place; return what it does when it is called."""
    does = {}
    tasks = tmp_path / "lm_eval" / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "arc.yaml").write_text("tag:\n  - ai2_arc\ntask: arc_easy\n")
    (tasks / "shared").write_text('group: "afrixnli"\n')  # lm-eval's has such without a suffix
    package = types.ModuleType("lm_eval")
    package.__spec__ = importlib.machinery.ModuleSpec(
        "lm_eval", None, origin=str(tasks.parent / "__init__.py")
    )
    module = types.ModuleType("lm_eval.__main__")
    module.cli_evaluate = lambda: does["now"](sys.argv)
    monkeypatch.setitem(sys.modules, "lm_eval", package)
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


def test_a_wrong_task_is_refused_before_lm_eval_is_imported(lm_eval, tmp_path, capsys, monkeypatch):
    """The import takes many seconds."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "own.yaml").write_text("task: own\n")
    seen = []
    lm_eval["now"] = seen.append
    for words in ("arc_easy,ai2_arc", "afrixnli arc_*", str(tmp_path / "own.yaml"),
                  "own --include_path ."):  # fmt: skip
        assert run(tmp_path, "--tasks", *words.split()) == 0
    assert len(seen) == 4
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)  # importing it raises ImportError
    for words in (["--tasks", "arc_easy,arc_esay"], ["--task=arc_esay"], ["-t", "x", "arc_easy"]):
        assert run(tmp_path, *words) == 2
        said = capsys.readouterr().err
        assert "unknown task of lm-eval" in said
        assert "known: afrixnli, ai2_arc, arc_easy; or lm-eval ls tasks" in said
