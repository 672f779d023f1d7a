"""Shared by the tests of the cache: keys, a counting builder, child processes, mended commands."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from nmm_compiler.cache import disk as disk_module
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store

NOBODY = 65534


def key_of(number, **more):
    return Key.make({"family": "lowrank", "spec": {"m": number, "k": 64}, "target": "trn2", **more})


def place(directory, key):
    """Return where the entry of a key is on disk."""
    return directory / disk_module.FOLDER / key.digest


def leftovers(directory):
    """Return what is unfinished on disk."""
    names = os.listdir(directory / disk_module.FOLDER)
    return [name for name in names if name.startswith(".")]


class Builder:
    """Counts how often it was asked."""

    def __init__(self, text="y = 1\n"):
        self.text, self.calls = text, 0

    def __call__(self):
        self.calls += 1
        return {"kernel.py": self.text}


def fork(body, user=None):
    """Run `body` in a forked child, as another user if given; return the child's id.

    The child ends with 0, or with 1 and a traceback on stderr.
    """
    sys.stdout.flush()
    # fork beside threads of other tests
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        if user is not None and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_forked(body, user=None):
    """Run `body` in a child and fail when it fails."""
    _, status = os.waitpid(fork(body, user), 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed, see stderr"


def open_directory(mode, user=None):
    """Return a new directory directly in the temporary directory, which any user can reach."""
    path = Path(tempfile.mkdtemp(prefix="nmm-cache-test-"))
    os.chmod(path, mode)
    if user is not None and os.geteuid() == 0:
        os.chown(path, user, user)
    return path


def mend(message):
    """Run the command that an error ends with."""
    found = re.search(r"mend it: (ch(?:mod|own) .+?)(?:, or| \(|$)", message)
    assert found, message
    subprocess.run(shlex.split(found[1]), check=True)


CALLS = ("mkdir", "open", "fdopen", "rename", "lstat", "listdir")


def assert_whole_or_absent(directory, expected):
    """Every entry on disk is verified and has the text it must have."""
    for info in Store(directory, "ro").entries():
        assert info.state == "ok" or info.digest.startswith("."), info
        assert info.entry is None or info.entry.files == expected(info.entry.key)


def count_down(calls, strike, names=CALLS):
    """Patch os.<call> so that `strike()` comes in place of call number `calls` of any of them."""
    left = [calls]

    def wrap(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                strike()
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(disk_module.os, name, wrap(getattr(os, name)))
