"""Locks of builds: their files, and threads, processes and forks that wait for them."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
from cache_helpers import Builder, key_of

from nmm_compiler.cache import locks
from nmm_compiler.cache.disk import FOLDER
from nmm_compiler.cache.store import Store

pytestmark = pytest.mark.filterwarnings("error::nmm_compiler.errors.CacheWarning")


def test_a_forked_child_is_not_stuck_on_a_lock_of_a_thread(directory):
    store, inside, done = Store(directory), threading.Event(), threading.Event()

    def slow():
        inside.set()
        done.wait(20)
        return {"kernel.py": "y = 1\n"}

    thread = threading.Thread(target=store.get_or_build, args=(key_of(1), slow))
    thread.start()
    inside.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with store._locks.thread(key_of(1).digest):
            os._exit(7)
    deadline = time.monotonic() + 20
    status = 0
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_no_lock_file_stays_beside_the_entries(directory):
    store = Store(directory)
    for number in range(20):
        store.get_or_build(key_of(number), Builder())
    assert os.listdir(directory / FOLDER / locks.FOLDER) == []


def test_locks_of_killed_builders_go_with_the_next_publication_and_held_ones_stay(directory):
    Store(directory).get_or_build(key_of(0), Builder())
    folder = directory / FOLDER / locks.FOLDER
    for number in range(50):
        (folder / f"{key_of(number).digest}.lock").touch(0o600)
    with locks.BuildLocks().process(directory / FOLDER, key_of(7).digest):
        Store(directory).get_or_build(key_of(100), Builder())
        assert os.listdir(folder) == [f"{key_of(7).digest}.lock"]
    assert os.listdir(folder) == []


def test_a_lock_deleted_while_somebody_waits_still_excludes(directory):
    """Who waited takes a new file, and not the deleted one that a third could not see."""
    Store(directory).get_or_build(key_of(0), Builder())
    inside, most = [], []

    def hold():
        with locks.BuildLocks().process(directory / FOLDER, key_of(1).digest):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.003)
            inside.pop()

    threads = [threading.Thread(target=hold) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 12
