"""A directory replaced as a whole: no kill and no full disk loses the old one and the new one."""

import os
import signal
import sys

import pytest

from nmm_compiler.outputs import replace_directory

OLD = {"config.json": "old", "model-1.safetensors": "old", "model-2.safetensors": "old"}
NEW = {"config.json": "new", "model-1.safetensors": "new", "tokenizer.json": "new"}
KEPT = {"notes/mine.txt": "kept", "link": "kept"}
STALE = ("model*.safetensors*",)


def writer(files):
    def write(directory):
        for name, text in files.items():
            (directory / name).write_text(text)

    return write


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def target(tmp_path):
    directory = tmp_path / "parent" / "model"
    replace_directory(directory, writer(OLD))
    (directory / "notes").mkdir()
    (directory / "notes" / "mine.txt").write_text("kept")
    (directory / "link").symlink_to("notes/mine.txt")
    return directory


def killed_at(step, directory):
    """Save in a child that kills itself before its file operation `step`; return its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    seen = 0

    def hook(event, _):
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.", "tempfile.")):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        replace_directory(directory, writer(NEW), STALE)
    finally:
        os._exit(0)


def test_every_kill_point_leaves_the_old_or_the_new_directory(target):
    old, new = OLD | KEPT, NEW | KEPT
    outcomes = []
    for step in range(1, 1000):
        status = killed_at(step, target)
        if target.exists():
            assert contents(target) in (old, new), step
            outcomes.append(contents(target) == new)
        else:  # between the two renames: both are whole, beside where they belong
            (root,) = (one for one in target.parent.iterdir() if (one / "old").exists())
            assert (contents(root / "old"), contents(root / "new")) == (old, new)
            (root / "old").rename(target)
            outcomes.append("absent")
        replace_directory(target, writer(OLD), STALE)
        (target / "tokenizer.json").unlink(missing_ok=True)
        if status == 0:
            break
    assert outcomes[-1] is True
    assert outcomes.count("absent") == 1
    assert outcomes.count(False) > 5


def test_a_write_that_fails_changes_nothing_and_leaves_nothing(target):
    def write(directory):
        (directory / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_directory(target, write, STALE)
    assert contents(target) == OLD | KEPT
    assert os.listdir(target.parent) == ["model"]


def test_a_second_rename_that_fails_puts_the_old_directory_back(target, monkeypatch):
    real = os.rename

    def rename(source, destination):
        if os.fspath(source).endswith("new"):
            raise OSError(16, "Device or resource busy")
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="busy"):
        replace_directory(target, writer(NEW), STALE)
    assert contents(target) == OLD | KEPT
    assert os.listdir(target.parent) == ["model"]


def test_permissions_and_links_stay(target, tmp_path):
    target.chmod(0o750)
    replace_directory(target, writer(NEW), STALE)
    assert target.stat().st_mode & 0o777 == 0o750
    assert contents(target) == NEW | KEPT
    assert (target / "link").is_symlink()
    (tmp_path / "alias").symlink_to(target)
    replace_directory(tmp_path / "alias", writer(OLD), STALE)
    assert (tmp_path / "alias").is_symlink()
    assert contents(target)["config.json"] == "old"
