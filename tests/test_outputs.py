"""Output files: whole or not at all, devices written in place."""

import os
import stat

import pytest

from nmm_compiler.errors import OutputError
from nmm_compiler.outputs import check_writable, write_text


def test_a_text_replaces_the_file_and_keeps_its_mode(tmp_path):
    path = tmp_path / "a.json"
    assert write_text(path, "one").read_text() == "one"
    path.chmod(0o600)
    write_text(path, ("two", "three"))
    assert path.read_text() == "twothree"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left"), ValueError])
def test_what_ends_a_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")

    def pieces():
        yield "new"
        raise error

    with pytest.raises(OutputError if isinstance(error, OSError) else error):
        write_text(path, pieces())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_stays_a_device():
    for path in ("/dev/null", "/dev/full"):
        check_writable(path)
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OutputError, match="/dev/full: No space left"):
        write_text("/dev/full", "text")


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path,
        tmp_path / "none" / "a",
        tmp_path / "file" / "a",
        tmp_path / ("x" * 300),
    ):
        for act in (check_writable, lambda p: write_text(p, "text")):
            with pytest.raises(OutputError, match="cannot write"):
                act(path)
    assert os.listdir(tmp_path) == ["file"]
