"""Every command at 80 columns in tmux: no word is broken there."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import typer

from nmm_compiler.cli.commands import app

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import captures


def test_every_command_is_captured():
    assert set(captures.COMMANDS) == set(typer.main.get_command(app).commands)


def test_what_is_too_wide_is_found():
    assert captures.wide_lines("word " * 17) == ["word " * 17]
    assert not captures.wide_lines("source /" + "a" * 90)
    assert captures.wide_lines("word " * 20 + "/a/b")


def words(text):
    """Return the words of a text; times of the machine differ between runs."""
    return sorted(re.sub(r"[\d.,]+", "#", text).split())


@pytest.mark.skipif(shutil.which("tmux") is None, reason=captures.INSTALL)
@pytest.mark.parametrize("name", ["lint", pytest.param("profile", marks=pytest.mark.long)])
def test_a_narrow_terminal_shows_the_same_words(name, tmp_path):
    captures.prepare(tmp_path, saved=False)
    narrow, wide = (captures.capture(captures.COMMANDS[name], tmp_path, w) for w in (80, 120))
    assert not captures.wide_lines(narrow)
    assert len(words(wide)) > 20
    assert words(narrow) == words(wide)
