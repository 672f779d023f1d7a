"""Nothing is printed wider than the terminal, but for a word that is wider itself."""

import io

import pytest

from nmm_compiler.cli import main
from nmm_compiler.cli.values import show
from nmm_compiler.report.parts import Grid
from nmm_compiler.report.text import columns

LONG = "model.layers.*.self_attn.q_proj, model.layers.*.self_attn.o_proj"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_last_column_that_does_not_fit_is_below_its_row(width):
    figures = tuple(f"{i}.123" for i in range(width // 9))
    head = (*(f"h{i}" for i in range(len(figures))), "layers")
    lines = columns(Grid.of(head, [(*figures, LONG), (*figures, "head")], right=head[:-1]), width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert words == [*head, *figures, *LONG.split(), *figures, "head"]
    several = Grid.of(("n", "why", "layers"), [("1", "a b c " * 9, LONG)], right=("n",))
    lines = columns(several, width)
    assert max(map(len, lines)) <= width
    words = ["n", "why", "layers", "1", *"abc" * 9, *LONG.split()]
    assert sorted(" ".join(lines).split()) == sorted(words)


def test_a_sentence_is_broken_between_words_and_a_path_never(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    show("2 kernels: 2 built, 0 were in the cache; 11.1 s; cache: /home/you/.cache")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert len(lines) == 2
    path = "source    /home/you/.cache/nmm_compiler/v2/a/a57831c35da9b300/kernel.py"
    show(path)
    assert capsys.readouterr().out == f"{path}\n"


def test_an_error_is_broken_for_a_terminal_and_one_line_for_a_script(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr("sys.stderr", stream)
        with pytest.raises(SystemExit):
            main.main(["explain", "no-such-model"])
        lines = stream.getvalue().splitlines()
        assert (len(lines) == 1) is not terminal
        assert " ".join(line.strip() for line in lines).startswith("error: Invalid value")
        assert not terminal or max(map(len, lines)) <= 40
