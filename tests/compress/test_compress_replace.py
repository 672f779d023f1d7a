"""A directory replaced in one step: at every kill point it is the old one or the new one."""

import errno
import fcntl
import os
import signal
import sys

import pytest

from nmm_compiler.compress import replace
from nmm_compiler.compress.replace import replace_directory
from nmm_compiler.errors import OutputError

OLD = {"config.json": "old", "model-1.safetensors": "old", "model-2.safetensors": "old"}
NEW = {"config.json": "new", "model-1.safetensors": "new", "tokenizer.json": "new"}
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


KEPT = {"notes/mine.txt": "kept", "link": "kept"}


def killed_at(step, directory):
    """Save in a child that kills itself before its file operation `step`; return its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    seen = 0

    def hook(event, _):
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.", "tempfile.", "ctypes.dlsym", "fcntl.")):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        replace_directory(directory, writer(NEW), STALE)
    finally:
        os._exit(0)


@pytest.mark.parametrize("exchange", [True, False])
def test_every_kill_point_leaves_the_old_or_the_new_directory(exchange, target, monkeypatch):
    if not exchange:
        monkeypatch.setattr(replace, "_exchange", lambda first, second: False)
    monkeypatch.setattr(replace.os, "fsync", lambda handle: None)  # a kill is no power cut
    old, new = OLD | KEPT, NEW | KEPT
    outcomes = []
    for step in range(1, 1000):
        status = killed_at(step, target)
        if not target.exists():
            assert not exchange
            (root,) = target.parent.iterdir()  # both are whole, beside where they belong
            assert contents(root / "files.old") == old
            assert contents(root / "files") == new
            replace.put_back(target)
            outcomes.append("absent")
        found = contents(target)
        assert found in (old, new), step
        outcomes.append(found == new)
        replace_directory(target, writer(OLD), STALE)
        (target / "tokenizer.json").unlink(missing_ok=True)
        assert os.listdir(target.parent) == ["model"], step
        if status == 0:
            break
    assert outcomes[-1] is True
    assert outcomes.count(False) > 10
    assert outcomes.count(True) > 3
    assert outcomes.count("absent") == (0 if exchange else 1)


def _between_two_renames(target):
    """Leave what a save leaves that is killed between its two renames; return its directory."""
    root = target.with_name(".model.nmm-save-abcd")
    (root / "files").mkdir(parents=True)
    writer(NEW)(root / "files")
    (root / "lock").touch()
    target.rename(root / "files.old")
    return root


def test_the_next_save_puts_the_old_directory_back(target):
    _between_two_renames(target)
    with pytest.raises(ZeroDivisionError):
        replace_directory(target, lambda directory: 1 / 0)
    assert contents(target) == OLD | KEPT
    assert os.listdir(target.parent) == ["model"]


def test_putting_back_waits_for_a_save_that_runs(target, monkeypatch):
    """Its second rename comes; until then nobody may take its directories."""
    root, slept = _between_two_renames(target), []
    with open(root / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) == 3:
                (root / "files").rename(target)

        monkeypatch.setattr(replace.time, "sleep", sleep)
        replace.put_back(target)
        assert contents(target) == NEW
        assert len(slept) == 3
        (root / "files").mkdir()
        target.rename(root / "elsewhere")
        replace.put_back(target)  # it hangs
    assert not target.exists()
    assert len(slept) == 53


def test_a_directory_that_nobody_saved_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(replace.time, "sleep", lambda seconds: pytest.fail("it waits"))
    for name in ("none", "none/none", "[x]", "n" * 300, "a\0b"):
        replace.put_back(tmp_path / name)


def test_a_write_that_fails_leaves_everything_as_it_was(target):
    before = contents(target)

    def fail(directory):
        (directory / "config.json").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_directory(target, fail, STALE)
    assert contents(target) == before
    assert os.listdir(target.parent) == ["model"]


def test_the_staging_directory_of_a_running_save_is_left_alone(target):
    def write(directory):
        replace_directory(target, writer({"config.json": "inner"}), STALE)
        writer(NEW)(directory)

    replace_directory(target, write, STALE)
    assert contents(target) == NEW | KEPT
    assert os.listdir(target.parent) == ["model"]


def test_permissions_and_symbolic_links_to_the_directory_stay(target):
    target.chmod(0o750)
    link = target.with_name("current")
    link.symlink_to("model")
    replace_directory(link, writer(NEW), STALE)
    assert link.is_symlink()
    assert contents(target) == NEW | KEPT
    assert target.stat().st_mode & 0o777 == 0o750
    assert (target / "link").is_symlink()


def test_a_directory_that_cannot_be_renamed_is_refused(target, monkeypatch):
    def rename(source, to):
        raise OSError(errno.EBUSY, "Device or resource busy")

    before = contents(target)
    monkeypatch.setattr(replace.os, "rename", rename)
    with pytest.raises(OutputError, match="mount point or in use; pass a directory inside"):
        replace_directory(target, writer(NEW), STALE)
    assert contents(target) == before
