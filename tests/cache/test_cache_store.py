"""The store: what is kept, found, bounded and answered, in each mode."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings

import pytest
from cache_helpers import Builder, key_of, place

from nmm_compiler.cache import evict
from nmm_compiler.cache.disk import FOLDER, SHARDS
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import (
    CacheError,
    CacheKeyError,
    CacheMissError,
    CacheWarning,
    UnknownNameError,
)
from nmm_compiler.options import Options


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


def test_builds_once_and_is_found_by_another_store(directory):
    build = Builder("# é ü\r\ny = 1\n")
    made = Store(directory).get_or_build(key_of(1), build, {"predicted": {"latency_us": 1.5}})
    assert made.files == {"kernel.py": "# é ü\r\ny = 1\n"}
    again = Store(directory)
    assert again.get_or_build(key_of(1), build).files == made.files
    assert again.get(key_of(1)).meta == {"predicted": {"latency_us": 1.5}}
    assert again.get(key_of(1)).key == key_of(1)
    assert build.calls == 1
    assert again.get(key_of(2)) is None


def test_the_file_on_disk_has_the_bytes(directory):
    entry = Store(directory).get_or_build(key_of(1), Builder("# é\r\n"))
    assert (entry.path / "kernel.py").read_bytes() == "# é\r\n".encode()
    assert entry.path.is_relative_to(directory)
    assert sorted(p.name for p in entry.path.iterdir()) == ["kernel.py", "meta.json"]


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
    assert store.list() == ()
    assert "no whole entry" in str(store.explain(key_of(1)))
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
    assert [p.name for p in (directory / FOLDER).iterdir()] == [".locks"]
    assert store.get_or_build(key_of(1), Builder()).files


@pytest.mark.parametrize(
    "files",
    [
        {}, {"../x.py": ""}, {"a/b.py": ""}, {"": ""}, {".hidden": ""}, {"meta.json": "{}"},
        {"x.py": b"bytes"}, {"x.py": "\ud800"}, {"-rf": ""}, {"a\n.py": ""}, {"a" * 200: ""}, None,
    ],
)  # fmt: skip
def test_a_builder_cannot_name_files_elsewhere(directory, files):
    with pytest.raises(CacheKeyError):
        Store(directory).get_or_build(key_of(1), lambda: files)
    assert Store(directory).get(key_of(1)) is None


def test_two_threads_build_once(directory):
    store, calls = Store(directory), []

    def build():
        calls.append(1)
        time.sleep(0.05)
        return {"kernel.py": "y = 1\n"}

    got = []
    threads = [
        threading.Thread(target=lambda: got.append(store.get_or_build(key_of(1), build)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(got) == 6


def test_a_builder_may_use_the_cache_itself(directory):
    store = Store(directory)

    def outer():
        inner = store.get_or_build(key_of(2), Builder("inner\n"))
        return {"kernel.py": "outer of " + inner.files["kernel.py"]}

    assert store.get_or_build(key_of(1), outer).files["kernel.py"] == "outer of inner\n"


# Modes


def test_off_builds_every_time_and_writes_nothing(directory):
    store, build = Store(directory, "off"), Builder()
    entries = [store.get_or_build(key_of(1), build) for _ in range(2)]
    assert build.calls == 2
    assert not directory.exists()
    assert (entries[0].path / "kernel.py").read_text() == build.text


def test_ro_reads_and_keeps_what_it_builds_in_memory(directory):
    Store(directory).get_or_build(key_of(1), Builder())
    before = sorted(str(p) for p in directory.rglob("*"))
    store, build = Store(directory, "ro"), Builder()
    assert store.get_or_build(key_of(1), build).directory is not None
    assert build.calls == 0
    for _ in range(2):
        entry = store.get_or_build(key_of(2), build)
    assert build.calls == 1
    assert (entry.path / "kernel.py").read_text() == build.text
    assert sorted(str(p) for p in directory.rglob("*")) == before


def test_require_lists_what_is_missing_and_how_to_build_it(directory):
    Store(directory).get_or_build(key_of(1), Builder())
    store = Store(directory, "require")
    assert store.get_or_build(key_of(1), Builder()).files
    build = Builder()
    with pytest.raises(CacheMissError) as caught:
        store.get_or_build(key_of(2), build, command=lambda: "nmm kernel lowrank --m 2")
    assert build.calls == 0
    text = str(caught.value)
    assert "because of: spec" in text
    assert "spec.m: 2 (nearest entry has 1)" in text
    assert text.endswith("build: NMM_CACHE=rw nmm kernel lowrank --m 2")
    assert caught.value.keys == (key_of(2),)


def test_require_of_many_lists_them_all_at_once(directory):
    store = Store(directory, "require")
    with pytest.raises(CacheMissError) as caught:
        store.require([key_of(1), key_of(2), key_of(3)])
    assert caught.value.keys == (key_of(1), key_of(2), key_of(3))
    text = str(caught.value)
    assert all(key_of(i).digest[:12] in text for i in (1, 2, 3))
    assert "NMM_CACHE=rw" in text


def test_unknown_mode_and_bad_bound_are_refused(directory):
    with pytest.raises(UnknownNameError, match="did you mean 'require'"):
        Store(directory, "requires")
    with pytest.raises(CacheKeyError, match="-1"):
        Store(directory, max_bytes=-1)


@pytest.mark.parametrize("mode", ["ro", "require"])
def test_reading_modes_change_nothing(directory, mode):
    Store(directory).get_or_build(key_of(1), Builder())
    store = Store(directory, mode)
    for change in (store.prune, store.clear, lambda: store.import_("x.tar")):
        with pytest.raises(CacheError, match="NMM_CACHE=rw"):
            change()


# Memory


def test_memory_answers_until_a_file_on_disk_changes(directory):
    store = Store(directory)
    entry = store.get_or_build(key_of(1), Builder())
    assert store.get(key_of(1)) is store.get(key_of(1))
    (entry.path / "kernel.py").write_text("z = 666\n")
    with pytest.warns(CacheWarning, match=r"kernel\.py is not the file"):
        assert store.get(key_of(1)) is None
    assert store.get_or_build(key_of(1), Builder()).files == entry.files


def test_path_outlives_the_entry_on_disk(directory):
    store = Store(directory)
    entry = store.get_or_build(key_of(1), Builder())
    store.clear()
    assert not entry.path.is_relative_to(directory)
    assert (entry.path / "kernel.py").read_text() == "y = 1\n"


# Bound


def test_the_least_recently_used_go_first(directory):
    text = "x" * 10_000
    store = Store(directory, max_bytes=45_000)
    for number in (1, 2, 3):
        store.get_or_build(key_of(number), Builder(text))
        _age(directory, key_of(number), 100 - number)
    Store(directory).get(key_of(1))  # used now
    for number in (4, 5):
        store.get_or_build(key_of(number), Builder(text))
    left = {info.key.to_dict()["spec"]["m"] for info in Store(directory).list()}
    assert left == {1, 3, 4, 5}
    assert sum(info.size_bytes for info in store.list()) <= 45_000


def test_an_entry_over_the_bound_stays_in_memory(directory):
    store, build = Store(directory, max_bytes=1000), Builder("x" * 2000)
    with pytest.warns(CacheWarning, match="NMM_CACHE_MAX_BYTES"):
        store.get_or_build(key_of(1), build)
    assert store.get_or_build(key_of(1), build).directory is None
    assert build.calls == 1
    assert store.list() == ()


@pytest.mark.parametrize("how", ["prune", "clear"])
def test_the_folder_of_an_older_layout_goes(directory, how):
    store = Store(directory)
    store.get_or_build(key_of(1), Builder())
    (directory / "v1" / key_of(1).digest).mkdir(parents=True)
    getattr(store, how)()
    assert os.listdir(directory) == [FOLDER]


def test_prune_to_a_bound_and_clear(directory):
    store = Store(directory)
    for number in range(4):
        store.get_or_build(key_of(number), Builder("x" * 1000))
        _age(directory, key_of(number), 100 - number)
    gone = store.prune(max_bytes=3500)
    assert [u.digest for u in gone] == [key_of(0).digest, key_of(1).digest]
    assert store.clear() == 2
    assert store.list() == ()
    assert store.get(key_of(3)) is None


def _age(directory, key, seconds):
    stamp = time.time() - seconds
    os.utime(place(directory, key), (stamp, stamp))


# Questions


def test_list_is_newest_first_and_says_all(directory):
    store = Store(directory)
    for number in (1, 2):
        store.get_or_build(key_of(number), Builder(), {"n": number})
    _age(directory, key_of(2), 50)
    first, second = store.list()
    assert (first.meta, second.meta) == ({"n": 1}, {"n": 2})
    assert first.files == ("kernel.py",)
    assert first.state == "ok"
    assert first.created["by"].startswith("nmm_compiler ")


def test_show_takes_a_prefix(directory):
    store = Store(directory)
    store.get_or_build(key_of(1), Builder())
    store.get_or_build(key_of(2), Builder())
    assert store.show(key_of(1).digest[:10]).key == key_of(1)
    with pytest.raises(CacheError, match="2 entries"):
        store.show("")
    with pytest.raises(CacheError, match="0 entries"):
        store.show("zz")


def test_explain_says_where_or_which_name(directory):
    store = Store(directory)
    store.get_or_build(key_of(1, nki="0.5"), Builder())
    store.get_or_build(key_of(1, nki="0.6", flags="x"), Builder())
    assert store.explain(key_of(1, nki="0.5")).where == "memory"
    assert Store(directory).explain(key_of(1, nki="0.5")).where == "disk"
    miss = store.explain(key_of(1, nki="0.6"))
    assert miss.where == ""
    assert len(miss.changes) == 1
    assert miss.nearest.digest in {i.digest for i in store.list()}
    nearest = store.explain(key_of(9, nki="0.5"))
    assert nearest.nearest.digest == key_of(1, nki="0.5").digest
    assert str(nearest.changes[0]) == "spec.m: 9 (nearest entry has 1)"


def test_verify_rebuilds_and_compares_bytes(directory):
    store = Store(directory)
    for number in range(5):
        store.get_or_build(key_of(number), Builder(f"y = {number}\n"))

    def rebuild(entry):
        number = entry.key.to_dict()["spec"]["m"]
        if number == 1:
            return {"kernel.py": "y = 1 \n"}
        if number == 2:
            raise ValueError("no such schedule")
        if number == 3:
            return None
        if number == 4:
            return {**entry.files, "more.py": ""}
        return dict(entry.files)

    report = store.verify(rebuild)
    states = {row.digest: row.state for row in report.rows}
    expected = ["same", "differs", "failed", "skipped", "differs"]
    assert [states[key_of(i).digest] for i in range(5)] == expected
    assert not report.ok
    assert "-y = 1\n+y = 1 " in str(report)
    assert "no such schedule" in str(report)
    assert store.verify().ok
    assert store.verify(lambda entry: entry.files).ok


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
    assert Store.open(Options(cache="rw", cache_max_bytes=1 << 30)) is store


def _fill(directory, count):
    """Put `count` entries of random age and size on disk, without fsync; return their bytes."""
    total = 0
    for folder in (directory, directory / FOLDER, *(directory / FOLDER / s for s in SHARDS)):
        folder.mkdir(mode=0o700)
    for number in range(count):
        entry = make(key_of(number), {"kernel.py": "#" * (200 + number % 7 * 100)}, {})
        path = place(directory, entry.key)
        path.mkdir(mode=0o700)
        (path / "meta.json").write_bytes(entry.manifest)
        (path / "kernel.py").write_text(entry.files["kernel.py"])
        os.utime(path, (1e9 + number, 1e9 + number))
        total += entry.size_bytes
    return total


def test_publishing_into_a_large_full_cache_looks_at_a_sample(directory, monkeypatch):
    """The price of one publication is counted in names and entries, which no machine changes.

    The sample is the same in each run: about one sample in a thousand estimates the total as more
    than three standard errors too small, and then one entry too many stays until the next look.
    """
    monkeypatch.setattr(evict.random, "Random", lambda make=random.Random: make(7))
    count, looks, listed = 4000, [], []
    total = _fill(directory, count)
    real = evict._usage
    monkeypatch.setattr(evict, "_usage", lambda *a: looks.append(a) or real(*a))
    store = Store(directory, max_bytes=total)
    listing = store._disk.listing
    monkeypatch.setattr(
        store._disk, "listing", lambda shard: listed.append(listing(shard)) or listed[-1]
    )
    rounds = 60
    for number in range(count, count + rounds):
        looks.clear()
        listed.clear()
        store.get_or_build(key_of(number), Builder("#" * 500))
        assert len(looks) <= evict.SAMPLE
        assert 1000 <= sum(map(len, listed)) <= 1500
        if number % 20 == 0:  # the estimate's margin of error keeps within the bound
            assert sum(u.size_bytes for u in evict.usage(store._disk)) <= total
    kept = {u.digest for u in evict.usage(store._disk)}
    assert {key_of(n).digest for n in range(count, count + rounds)} <= kept  # the newest stay
    gone = [n for n in range(count) if key_of(n).digest not in kept]
    assert 0 < len(gone) < count // 5
    assert sum(gone) / len(gone) < count / 4  # mostly old ones: the mean age of all is count / 2


@pytest.mark.parametrize("decades", [0, 3])
def test_the_estimate_of_a_size_is_within_its_error(decades):
    """Equal sizes, or a thousandfold range, in 16 shards: two are listed, few sizes are known."""
    drawn, missed = random.Random(3), 0
    for _ in range(300):
        shards = [[] for _ in SHARDS]
        for _ in range(3000):
            drawn.choice(shards).append(int(10 ** drawn.uniform(2, 2 + decades)))
        listed = [size for shard in shards[:2] for size in shard]
        total, error = evict._estimate(drawn.sample(listed, 64), len(listed), 2 / 16)
        actual = sum(map(sum, shards))
        missed += abs(total - actual) > error
        assert error < actual
    assert missed <= 6, missed  # 1 in 370 of a normal law; sizes as skewed as these miss more


def test_a_require_miss_reads_no_other_entry(directory, monkeypatch):
    _fill(directory, 50)
    store = Store(directory, "require")
    read = []
    real = store._disk.read
    monkeypatch.setattr(store._disk, "read", lambda digest: read.append(digest) or real(digest))
    monkeypatch.setattr(store._disk, "digests", lambda: pytest.fail("it scans the directory"))
    with pytest.raises(CacheMissError, match=r"nmm cache explain --key"):
        store.get_or_build(key_of(1000), Builder())
    assert set(read) == {key_of(1000).digest}
