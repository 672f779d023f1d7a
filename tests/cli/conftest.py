"""What the tests of commands share: a line as a user types it, run in this process."""

from typing import NamedTuple

import pytest

from nmm_compiler.cli.main import main


class Ended(NamedTuple):
    """How a command line ended, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def nmm(capfd, monkeypatch):
    """Return a function that runs a line and returns how it ended; pages are 200 columns wide."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words, code=None):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        done = Ended(ended.value.code, *capfd.readouterr())
        assert code in (None, done.code), done
        assert "Traceback" not in done.err
        return done

    return run
