"""Many processes and kills: entries are whole or absent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings

import pytest
from cache_helpers import (
    Builder,
    assert_whole_or_absent,
    count_down,
    fork,
    key_of,
    place,
)

from nmm_compiler.cache import disk as disk_module
from nmm_compiler.cache import evict
from nmm_compiler.cache.disk import Disk
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.store import Store

FILES = {f"part{i}.py": f"part = {i}\n" * 4000 for i in range(4)}


# Many processes
WORKER = """
import json, os, sys, time
from nmm_compiler.cache.key import Key
from nmm_compiler.cache import locks
from nmm_compiler.cache.store import Store

directory, start, out, use_locks = sys.argv[1:]
if use_locks == "no":
    import contextlib
    locks.BuildLocks.process = lambda self, folder, digest: contextlib.nullcontext()
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


@pytest.mark.parametrize("use_locks", ["yes", "no"])
def test_eight_processes_build_the_same_twenty_keys(tmp_path, directory, use_locks):
    import json

    start = tmp_path / "start"
    command = [sys.executable, "-W", "error", "-c", WORKER, str(directory), str(start)]
    workers = [
        subprocess.Popen([*command, str(tmp_path / f"{i}.json"), use_locks]) for i in range(8)
    ]
    start.touch()
    assert [worker.wait(120) for worker in workers] == [0] * 8
    results = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(8)]
    assert len({json.dumps(result["got"]) for result in results}) == 1  # all have the winner's
    builds = sum(result["built"] for result in results)
    if use_locks == "yes":
        assert builds == 20  # the lock saved the other 140
    assert builds >= 20
    store = Store(directory)
    assert len(store.list()) == 20
    assert all(info.state == "ok" for info in store.list())
    assert list(disk_module.leftovers(directory / disk_module.FOLDER)) == []


# Kills


def _killed_builds(directory, kills, seed):
    """Fork a child that builds, SIGKILL it after a random time; return how the kills landed."""
    generator = random.Random(seed)
    landed = {"staged": 0, "published": 0, "absent": 0}
    start = time.perf_counter()
    Store(directory).get_or_build(key_of(-1), lambda: FILES)
    longest = 2 * (time.perf_counter() - start)
    for number in range(kills):
        before = len(list(disk_module.leftovers(directory / disk_module.FOLDER)))
        child = fork(lambda n=number: Store(directory).get_or_build(key_of(n), lambda: FILES))
        time.sleep(generator.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert_whole_or_absent(directory, lambda key: FILES)
        present = place(directory, key_of(number)).exists()
        staged = len(list(disk_module.leftovers(directory / disk_module.FOLDER))) > before
        landed["published" if present else "staged" if staged else "absent"] += 1
        build = Builder("again\n")
        expected = FILES if present else {"kernel.py": "again\n"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Store(directory).get_or_build(key_of(number), build).files == expected
        assert build.calls == (0 if present else 1)
        Store(directory)._disk.remove(key_of(number).digest)
    return landed


def test_kills_at_random_moments(directory):
    landed = _killed_builds(directory, 30, seed=1)
    assert sum(landed.values()) == 30
    # What the killed ones left is cleared by the next process that publishes.
    Store(directory).get_or_build(key_of(1000), Builder())
    assert list(disk_module.leftovers(directory / disk_module.FOLDER)) == []


@pytest.mark.long
def test_two_hundred_kills_at_random_moments(directory):
    landed = _killed_builds(directory, 200, seed=2)
    assert landed["staged"] >= 10, landed  # or the moments were not spread over the build
    assert landed["published"] >= 1, landed


DELETING = ("rename", "chmod", "unlink", "rmdir", "open", "close")


def test_a_kill_before_each_system_call_of_a_publish(directory):
    """The deterministic half: no system call of the publication is missed."""
    Store(directory).get_or_build(key_of(-1), Builder())
    entry = make(key_of(0), {"kernel.py": "y = 0\n", "more.py": "z = 0\n"}, {})
    seen = []
    for calls in range(200):

        def body(calls=calls):
            count_down(calls, lambda: os.kill(os.getpid(), signal.SIGKILL))
            Disk(directory, writing=True).publish(entry)

        _, status = os.waitpid(fork(body), 0)
        states = [i.state for i in Store(directory, "ro").list() if i.digest == entry.key.digest]
        seen.append(states)
        assert states in ([], ["ok"]), (calls, states)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("the publication never came to its end")
    assert len(seen) > 12  # mkdir, 3 files of 4 calls, directories, rename
    assert seen[0] == []
    assert seen[-1] == ["ok"]
    assert seen == sorted(seen)  # absent, absent, ..., then whole
    assert len(list(disk_module.leftovers(directory / disk_module.FOLDER))) > 5
    evict.clear_leftovers(Disk(directory, writing=True))
    assert list(disk_module.leftovers(directory / disk_module.FOLDER)) == []


def test_a_kill_before_each_system_call_of_a_deletion(directory):
    """Half an entry is never seen: it is renamed out of sight before it is taken apart."""
    Store(directory).get_or_build(key_of(-1), Builder())
    seen = []
    for calls in range(100):
        Store(directory).get_or_build(key_of(0), lambda: {"kernel.py": "y\n", "more.py": "z\n"})

        def body(calls=calls):
            disk = Disk(directory, writing=True)
            count_down(calls, lambda: os.kill(os.getpid(), signal.SIGKILL), DELETING)
            disk.remove(key_of(0).digest)

        _, status = os.waitpid(fork(body), 0)
        states = [i.state for i in Store(directory, "ro").list() if i.digest == key_of(0).digest]
        assert states in ([], ["ok"]), (calls, states)
        seen.append(states)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("the deletion never came to its end")
    assert len(seen) > 6
    assert seen[0] == ["ok"]
    assert seen[1:] == [[]] * (len(seen) - 1)
    Store(directory).prune()
    assert list(disk_module.leftovers(directory / disk_module.FOLDER)) == []


def test_everything_is_on_disk_before_the_rename(directory, monkeypatch):
    """A power cut cannot be tried here; the order of the calls that guard against it can."""
    calls = []
    real = {name: getattr(os, name) for name in ("fsync", "rename")}

    def fsync(handle):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real["fsync"](handle)

    def rename(source, target):
        calls.append("rename")
        real["rename"](source, target)

    monkeypatch.setattr(disk_module.os, "fsync", fsync)
    monkeypatch.setattr(disk_module.os, "rename", rename)
    Store(directory).get_or_build(key_of(1), lambda: {"a.py": "a", "kernel.py": "b"})
    assert calls[:3] == ["a.py", "kernel.py", "meta.json"]  # the manifest last
    assert calls[3].startswith(".stage-")
    assert calls[4:] == ["rename", key_of(1).digest[0]]
