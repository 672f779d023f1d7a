"""Many processes and kills: entries are whole or absent."""

import json
import os
import signal
import subprocess
import sys

import pytest
from cache_helpers import (
    CALLS,
    Builder,
    count_down,
    fork,
    key_of,
    leftovers,
)

from nmm_compiler.cache.disk import Disk
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.store import Store

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


DELETING = ("rename", "chmod", "unlink", "rmdir", "open", "close")


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
        directory, prepare, lambda disk: disk.remove(key_of(0).digest), DELETING
    )
    assert len(seen) > 6
    assert seen == [["ok"], *[[]] * (len(seen) - 1)]
    Store(directory).prune()
    assert leftovers(directory) == []
