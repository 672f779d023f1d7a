"""Full disks, lost directories, wrong clocks: entries are whole or absent.

Everything here happens to real processes and real files. Where root would be let through, the child
gives up root first. Where a device is needed and cannot be mounted, the error is injected.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
from cache_helpers import (
    CALLS,
    NOBODY,
    Builder,
    assert_whole_or_absent,
    count_down,
    fork,
    key_of,
    leftovers,
    open_directory,
    place,
    run_forked,
)

from nmm_compiler.cache import disk as disk_module
from nmm_compiler.cache.disk import FOLDER, Disk
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheWarning

EVICTED = errno.ENOENT

# Errors of the disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, EVICTED])
def test_an_error_at_each_system_call_of_a_build_is_survived(directory, number, monkeypatch):
    """Disk full at any moment: the answer is right, one warning, nothing half-written stays.

    Nor is anything said where another process evicts what is read.
    """
    struck = []

    def strike():
        struck.append(number)
        raise OSError(number, os.strerror(number))

    for calls in range(200):
        shutil.rmtree(directory, ignore_errors=True)
        store = Store(directory)
        with (
            warnings.catch_warnings(record=True, action="always") as caught,
            monkeypatch.context() as patch,
        ):
            for name in CALLS:  # which `count_down` replaces, until the end of the block
                patch.setattr(disk_module.os, name, getattr(os, name))
            count_down(calls, strike)
            entry = store.get_or_build(key_of(1), Builder())
            again = store.get_or_build(key_of(1), Builder("never\n"))
        assert entry.files == again.files == {"kernel.py": "y = 1\n"}
        assert_whole_or_absent(directory, lambda key: {"kernel.py": "y = 1\n"})
        lost = Store(directory).get(key_of(1)) is None
        ours = [w for w in caught if issubclass(w.category, CacheWarning)]
        assert len(ours) <= 2  # at most one for reading, one for writing
        assert ours or not lost or number == EVICTED
        if not struck:
            break
        struck.clear()
    else:
        pytest.fail("the build never came to its end")
    assert calls > 8


def test_a_directory_that_cannot_be_written():
    directory = open_directory(0o700, NOBODY)
    run_forked(lambda: Store(directory).get_or_build(key_of(1), Builder()), NOBODY)
    for path in (directory / FOLDER, directory):
        path.chmod(0o500)

    def body():
        with warnings.catch_warnings(record=True, action="always") as caught:
            store, build = Store(directory), Builder("other\n")
            assert store.get_or_build(key_of(1), build).files == {"kernel.py": "y = 1\n"}
            for number in (2, 3, 2, 3):
                entry = store.get_or_build(key_of(number), build)
                assert (entry.path / "kernel.py").read_text() == "other\n"
        assert build.calls == 2
        assert len(caught) == 1
        assert "NMM_CACHE_DIR" in str(caught[0].message)

    run_forked(body, NOBODY)
    for path in (directory, directory / FOLDER):
        path.chmod(0o700)
    shutil.rmtree(directory)


# Under a running process


def test_the_directory_is_deleted_while_a_build_runs(directory):
    def build():
        shutil.rmtree(directory)
        return {"kernel.py": "y = 1\n"}

    Store(directory).get_or_build(key_of(2), Builder())
    assert Store(directory).get_or_build(key_of(1), build).files
    assert Store(directory).get(key_of(1)).files == {"kernel.py": "y = 1\n"}


# Clocks, versions, locks


@pytest.mark.parametrize("years_ahead", [None, 10])
def test_a_clock_that_jumped_does_not_shield_old_entries(directory, years_ahead):
    """Four were used when the clock was at zero, or ten years ahead."""
    clock = 0 if years_ahead is None else time.time() + years_ahead * 365 * 86400
    text = "x" * 10_000
    for number in range(1, 8):
        store = Store(directory, max_bytes=45_000)
        assert store.get_or_build(key_of(number), Builder(text)).directory is not None
        if number < 5:
            os.utime(place(directory, key_of(number)), (clock + number, clock + number))
    left = {info.entry.key.to_dict()["spec"]["m"] for info in store.entries()}
    assert {5, 6, 7} <= left
    assert len(left) == 4
    assert store.get(key_of(7)) is not None


def test_the_layout_of_a_later_version_is_left_alone_and_that_of_an_older_one_goes(directory):
    store = Store(directory, max_bytes=5000)
    store.get_or_build(key_of(1), Builder())
    later = directory / "v4" / "anything"
    later.mkdir(parents=True)
    (later / "data").write_text("x" * 100_000)
    (directory / "v1").mkdir()
    store.get_or_build(key_of(2), Builder("x" * 4000))
    store.prune(0)
    assert (later / "data").read_text() == "x" * 100_000
    assert "v1" not in os.listdir(directory)


def test_what_killed_processes_left_goes_with_prune_or_when_the_bound_is_reached(directory):
    store = Store(directory, max_bytes=8000)
    store.get_or_build(key_of(1), Builder())
    for name, age in ((".stage-aa", 9e9), (".trash-bb", 5e9)):
        path = directory / FOLDER / name
        path.mkdir(0o700)
        (path / "kernel.py").write_text("x" * 3000)
        os.utime(path, (time.time() - age / 1e6, time.time() - age / 1e6))
    states = sorted(info.state for info in store.entries())
    assert states == ["damaged: meta.json is missing", "damaged: meta.json is missing", "ok"]
    store.get_or_build(key_of(2), Builder("y" * 2500))
    assert leftovers(directory) == [".trash-bb"]  # the older one went
    store.prune()
    assert leftovers(directory) == []
    assert Store(directory).get(key_of(1)).files


# Many processes and kills: entries are whole or absent.

# Many processes
WORKER = """
import json, os, sys, time
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store

directory, start, out = sys.argv[1:]
while not os.path.exists(start):
    time.sleep(0.001)
store, built, got = Store(directory), 0, {}

def build():
    global built
    built += 1
    time.sleep(0.003)
    return {"kernel.py": f"made_by = {os.getpid()}\\n" * 500, "more.py": f"{os.getpid()}"}

for number in range(20):
    entry = store.get_or_build(Key.make({"number": number}), build)
    again = Store(directory).get(entry.key)
    assert again is not None and again.files == entry.files
    got[number] = entry.files["more.py"]
with open(out, "w") as file:
    json.dump({"built": built, "got": got}, file)
"""


def test_eight_processes_build_the_same_twenty_keys(tmp_path, directory):
    start = tmp_path / "start"
    command = [sys.executable, "-W", "error", "-c", WORKER, str(directory), str(start)]
    workers = [subprocess.Popen([*command, str(tmp_path / f"{i}.json")]) for i in range(8)]
    start.touch()
    assert [worker.wait(120) for worker in workers] == [0] * 8
    results = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(8)]
    assert len({json.dumps(result["got"]) for result in results}) == 1  # all have the winner's
    assert sum(result["built"] for result in results) == 20  # the lock saved the other 140
    assert [info.state for info in Store(directory).entries()] == ["ok"] * 20


# Kills


def states_after_kills(directory, prepare, act, names=CALLS):
    """Kill a child that acts before its first system call, its second, ...; return what is seen.

    The last one comes to its end. What is seen of key 0: nothing, or its state.
    """
    Store(directory).get_or_build(key_of(-1), Builder())
    seen = []
    for calls in range(200):
        prepare()

        def body(calls=calls):
            disk = Disk(directory, writing=True)
            count_down(calls, lambda: os.kill(os.getpid(), signal.SIGKILL), names)
            act(disk)

        _, status = os.waitpid(fork(body), 0)
        entries = Store(directory, "ro").entries()
        seen.append([entry.state for entry in entries if entry.digest == key_of(0).digest])
        if os.waitstatus_to_exitcode(status) == 0:
            return seen
    return pytest.fail("it never came to its end")


def test_a_kill_before_each_system_call_of_a_publish(directory):
    """The deterministic half: no system call of the publication is missed."""
    entry = make(key_of(0), {"kernel.py": "y = 0\n", "more.py": "z = 0\n"}, {})
    seen = states_after_kills(directory, lambda: None, lambda disk: disk.publish(entry))
    whole = seen.count(["ok"])
    assert whole > 0
    assert len(seen) > 9
    assert seen == [[]] * (len(seen) - whole) + [["ok"]] * whole  # absent, absent, ..., then whole
    assert len(leftovers(directory)) > 3
    Store(directory).prune()
    assert leftovers(directory) == []


def test_a_kill_before_each_system_call_of_a_deletion(directory):
    """Half an entry is never seen: it is renamed out of sight before it is taken apart."""

    def prepare():
        Store(directory).get_or_build(key_of(0), lambda: {"kernel.py": "y\n", "more.py": "z\n"})

    seen = states_after_kills(
        directory,
        prepare,
        lambda disk: disk.remove(key_of(0).digest),
        ("rename", "chmod", "unlink", "rmdir", "open", "close"),
    )
    assert len(seen) > 6
    assert seen == [["ok"], *[[]] * (len(seen) - 1)]
    Store(directory).prune()
    assert leftovers(directory) == []
