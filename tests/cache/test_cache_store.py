"""The store: what is kept, found, bounded and answered, in each mode."""

import os
import shutil
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from cache_helpers import Builder, fork, key_of, place

from nmm_compiler.cache.disk import FOLDER, Disk
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.explain import explain
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheError, CacheMissError, CacheWarning
from nmm_compiler.options import Options


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings(action="error", category=CacheWarning):
        yield


def test_the_directory_and_entries_are_closed_to_others(directory):
    before = os.umask(0)
    try:
        entry = Store(directory).get_or_build(key_of(1), Builder())
    finally:
        os.umask(before)
    for path in (directory, entry.path, entry.path.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    for name in ("kernel.py", "meta.json"):
        assert (entry.path / name).stat().st_mode & 0o777 == 0o600


def test_looking_creates_nothing(directory):
    store = Store(directory)
    assert store.get(key_of(1)) is None
    assert list(store.entries()) == []
    assert "no whole entry" in explain(key_of(1), store.entries())[0]
    assert not directory.exists()


def test_meta_may_be_a_function_asked_only_after_a_build(directory):
    asked = []
    store = Store(directory)
    entry = store.get_or_build(key_of(1), Builder(), lambda: asked.append(1) or {"a": 1})
    store.get_or_build(key_of(1), Builder(), lambda: asked.append(1) or {"a": 2})
    assert entry.meta == {"a": 1}
    assert asked == [1]


def test_a_failing_build_goes_through_and_leaves_nothing(directory):
    store = Store(directory)

    def fail():
        raise ZeroDivisionError("no schedule")

    with pytest.raises(ZeroDivisionError, match="no schedule"):
        store.get_or_build(key_of(1), fail)
    assert store.get(key_of(1)) is None
    assert list((directory / FOLDER).iterdir()) == []
    assert store.get_or_build(key_of(1), Builder()).files


@pytest.mark.parametrize(
    "files",
    [
        {}, {"../x.py": ""}, {"a/b.py": ""}, {"": ""}, {".hidden": ""}, {"meta.json": "{}"},
        {"x.py": b"bytes"}, {"x.py": "\ud800"}, {"-rf": ""}, {"a\n.py": ""}, {"a" * 200: ""}, None,
    ],
)  # fmt: skip
def test_a_builder_cannot_name_files_elsewhere(directory, files):
    with pytest.raises(CacheError):
        Store(directory).get_or_build(key_of(1), lambda: files)
    assert Store(directory).get(key_of(1)) is None


def test_two_threads_build_once(directory):
    store, build = Store(directory), Builder()

    def slow():
        time.sleep(0.05)
        return build()

    with ThreadPoolExecutor(6) as threads:
        got = list(threads.map(lambda _: store.get_or_build(key_of(1), slow), range(6)))
    assert (build.calls, len(got)) == (1, 6)


def test_a_builder_may_use_the_cache_itself(directory):
    store = Store(directory)

    def outer():
        inner = store.get_or_build(key_of(2), Builder("inner\n"))
        return {"kernel.py": "outer of " + inner.files["kernel.py"]}

    assert store.get_or_build(key_of(1), outer).files["kernel.py"] == "outer of inner\n"


def test_a_forked_child_is_not_stuck_on_a_lock_of_a_thread(directory):
    store, inside, done = Store(directory), threading.Event(), threading.Event()

    def slow():
        inside.set()
        done.wait(20)
        return {"kernel.py": "y = 1\n"}

    thread = threading.Thread(target=store.get_or_build, args=(key_of(1), slow))
    thread.start()
    inside.wait(20)

    def child():
        signal.alarm(20)
        assert store.get_or_build(key_of(1), Builder()).files

    waiting = fork(child)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 0


# Modes


@pytest.mark.parametrize(("mode", "calls"), [("off", [1, 2, 3]), ("ro", [0, 1, 1])])
def test_modes_that_write_nothing(directory, mode, calls):
    """Off builds every time; ro reads, and keeps what it builds in memory."""
    Store(directory).get_or_build(key_of(1), Builder())
    before = sorted(str(p) for p in directory.rglob("*"))
    store, build = Store(directory, mode), Builder()
    for number, count in zip((1, 2, 2), calls, strict=True):
        entry = store.get_or_build(key_of(number), build)
        assert build.calls == count
        assert (entry.path / "kernel.py").read_text() == build.text
    assert sorted(str(p) for p in directory.rglob("*")) == before


def test_require_lists_what_is_missing_and_reads_no_other_entry(directory, monkeypatch):
    Store(directory).get_or_build(key_of(1), Builder())
    store = Store(directory, "require")
    assert store.get_or_build(key_of(1), Builder()).files
    build, read, real = Builder(), set(), store._disk.read
    monkeypatch.setattr(store._disk, "read", lambda digest: read.add(digest) or real(digest))
    monkeypatch.setattr(store._disk, "entries", lambda: pytest.fail("it scans the directory"))
    with pytest.raises(CacheMissError) as caught:
        store.get_or_build(key_of(2), build, command=lambda: "nmm kernel lowrank --m 2")
    assert (build.calls, read) == (0, {key_of(2).digest})
    text = str(caught.value)
    assert str(key_of(2)) in text
    assert text.endswith("build: NMM_CACHE=rw nmm kernel lowrank --m 2")
    assert caught.value.keys == (key_of(2),)
    error = store.miss(store.missing([key_of(i) for i in range(1, 5)]))
    assert error.keys == (key_of(2), key_of(3), key_of(4))
    assert all(key_of(i).digest[:12] in str(error) for i in (2, 3, 4))


# Memory


def test_memory_holds_what_was_verified_whatever_happens_on_disk(directory):
    store = Store(directory)
    entry = store.get_or_build(key_of(1), Builder())
    assert store.get(key_of(1)) is store.get(key_of(1))
    (entry.path / "kernel.py").write_text("z = 666\n")
    assert store.get(key_of(1)).files == {"kernel.py": "y = 1\n"}
    assert (entry.path / "kernel.py").read_text() == "y = 1\n"  # a private copy
    assert not entry.path.is_relative_to(directory)
    store.prune(0)
    assert store.get(key_of(1)) is None
    shutil.rmtree(directory)
    assert (entry.path / "kernel.py").read_text() == "y = 1\n"
    assert store.get_or_build(key_of(2), Builder()).path.is_relative_to(directory)


# Bound


def test_an_entry_over_the_bound_stays_in_memory(directory):
    store, build = Store(directory, max_bytes=1000), Builder("x" * 2000)
    with pytest.warns(CacheWarning, match="NMM_CACHE_MAX_BYTES"):
        store.get_or_build(key_of(1), build)
    assert store.get_or_build(key_of(1), build).directory is None
    assert build.calls == 1
    assert list(store.entries()) == []


# Questions


def test_list_is_newest_first_and_show_takes_a_prefix(directory):
    store = Store(directory)
    for number in (1, 2):
        store.get_or_build(key_of(number), Builder(), {"n": number})
    os.utime(place(directory, key_of(2)), (time.time() - 50, time.time() - 50))
    first, second = store.entries()
    assert (first.entry.meta, second.entry.meta) == ({"n": 1}, {"n": 2})
    assert first.entry.created["by"].startswith("nmm_compiler ")
    assert store.show(key_of(1).digest[:10]).key == key_of(1)
    with pytest.raises(CacheError, match="2 entries"):
        store.show("")


def test_explain_says_which_name(directory):
    store = Store(directory)
    store.get_or_build(key_of(1, nki="0.5"), Builder())
    store.get_or_build(key_of(1, nki="0.6", flags="x"), Builder())
    assert explain(key_of(1, nki="0.5"), store.entries())[0] == "hit"
    said, nearest = explain(key_of(9, nki="0.5"), store.entries())
    assert nearest == key_of(1, nki="0.5")
    assert said == "miss among 2 entries, because of: spec"


def test_verify_rebuilds_and_compares_bytes(directory):
    store = Store(directory)
    for number in range(5):
        store.get_or_build(key_of(number), Builder(f"y = {number}\n"))

    def rebuild(entry):
        number = entry.key.to_dict()["spec"]["m"]
        if number == 2:
            raise ValueError("no such schedule")
        changed = {1: {"kernel.py": "y = 1 \n"}, 3: None, 4: {**entry.files, "more.py": ""}}
        return changed.get(number, dict(entry.files))

    report = store.verify(rebuild)
    states = {row.digest: row.state for row in report}
    expected = ["same", "differs", "failed", "skipped", "differs"]
    assert [states[key_of(i).digest].partition(":")[0] for i in range(5)] == expected
    assert "-kernel.py: y = 1\n+kernel.py: y = 1 " in states[key_of(1).digest]
    assert "no such schedule" in states[key_of(2).digest]
    assert {row.state for row in store.verify()} == {"same"}


# One store per settings


def test_open_is_one_store_per_settings_and_reads_the_environment(directory, monkeypatch):
    monkeypatch.setenv("NMM_CACHE_DIR", str(directory))
    store = Store.open()
    assert store is Store.open(Options())
    assert (store.directory, store.mode, store.max_bytes) == (directory, "rw", 1 << 30)
    monkeypatch.setenv("NMM_CACHE", "ro")
    monkeypatch.setenv("NMM_CACHE_MAX_BYTES", "5000")
    other = Store.open()
    assert other is not store
    assert (other.mode, other.max_bytes) == ("ro", 5000)
    monkeypatch.delenv("NMM_CACHE_MAX_BYTES")
    assert Store.open(Options(cache=f"rw:{directory}")) is store


def _fill(directory, count):
    """Put `count` entries of random age and size on disk; return their bytes."""
    total = 0
    (directory / FOLDER).mkdir(mode=0o700, parents=True)
    directory.chmod(0o700)
    for number in range(count):
        entry = make(key_of(number), {"kernel.py": "#" * (200 + number % 7 * 100)}, {})
        path = place(directory, entry.key)
        path.mkdir(mode=0o700)
        for name, data in entry.contents.items():
            (path / name).write_bytes(data)
        os.utime(path, (1e9 + number, 1e9 + number))
        total += entry.size_bytes
    return total


def test_a_large_cache_is_looked_at_seldom_and_keeps_its_bound(directory, monkeypatch):
    """Its digest tells whether a publication looks at all entries: 1 in 8 of a cache of 1024.

    The least recently used go first.
    """
    total, looks = _fill(directory, 1024), []
    Store(directory).get(key_of(0))  # used now
    real = Disk.entries
    monkeypatch.setattr(Disk, "entries", lambda self: looks.append(1) or real(self))
    store = Store(directory, max_bytes=total)
    for number in range(1024, 1224):
        store.get_or_build(key_of(number), Builder("#" * 500))
    assert 5 <= len(looks) <= 60
    kept = {info.digest: info.size_bytes for info in real(Disk(directory, writing=True))}
    assert sum(kept.values()) <= total
    assert {key_of(n).digest for n in range(1024, 1224)} <= set(kept)  # the newest stay
    gone = [n for n in range(1024) if key_of(n).digest not in kept]
    assert gone == list(range(1, 1 + len(gone)))  # the oldest went
