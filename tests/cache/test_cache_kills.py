"""Many processes and kills: entries are whole or absent."""

from __future__ import annotations

import json
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
    leftovers,
    place,
)

from nmm_compiler.cache.disk import Disk
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.store import Store

FILES = {f"part{i}.py": f"part = {i}\n" * 4000 for i in range(4)}


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


def _killed_builds(directory, kills, seed):
    """Fork a child that builds, SIGKILL it after a random time; return how the kills landed."""
    generator = random.Random(seed)
    landed = {"staged": 0, "published": 0, "absent": 0}
    start = time.perf_counter()
    Store(directory).get_or_build(key_of(-1), lambda: FILES)
    longest = 2 * (time.perf_counter() - start)
    for number in range(kills):
        before = len(leftovers(directory))
        child = fork(lambda n=number: Store(directory).get_or_build(key_of(n), lambda: FILES))
        time.sleep(generator.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert_whole_or_absent(directory, lambda key: FILES)
        present = place(directory, key_of(number)).exists()
        staged = len(leftovers(directory)) > before
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
    Store(directory).prune()
    assert leftovers(directory) == []


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
        states = [i.state for i in Store(directory, "ro").entries() if i.digest == entry.key.digest]
        seen.append(states)
        assert states in ([], ["ok"]), (calls, states)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("the publication never came to its end")
    assert len(seen) > 9
    assert seen[0] == []
    assert seen[-1] == ["ok"]
    assert seen == sorted(seen)  # absent, absent, ..., then whole
    assert len(leftovers(directory)) > 3
    Store(directory).prune()
    assert leftovers(directory) == []


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
        states = [i.state for i in Store(directory, "ro").entries() if i.digest == key_of(0).digest]
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
    assert leftovers(directory) == []
