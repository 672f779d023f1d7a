"""Entries on disk are parsed once for all processes, and again where anything differs."""

from __future__ import annotations

import os

import pytest
from cache_helpers import Builder, key_of, place

from nmm_compiler.cache import checked, disk
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheTrustError

KERNEL = '"""A kernel."""\n\nimport nki\n\n\n@nki.jit\ndef kernel(x):\n    return x\n'
EVIL = KERNEL.replace("return x\n", "return x.tofile('evil')\n")


@pytest.fixture
def parsed(monkeypatch):
    """The names of the sources that were parsed."""
    names: list[str] = []
    real = disk.check_shape

    def counted(name: str, text: str) -> None:
        names.append(name)
        real(name, text)

    monkeypatch.setattr(disk, "check_shape", counted)
    return names


def _put(store: Store, text: str = KERNEL):
    return store.get_or_build(key_of(1), Builder(text))


def _mark(directory):
    return place(directory, key_of(1)) / checked.MARK


def test_a_source_is_parsed_once_for_all_processes(directory, parsed):
    store = Store(directory)
    store.check_once(_put(store))
    assert len(parsed) == 1
    store.check_once(_put(store))
    other = Store(directory)
    other.check_once(_put(other))
    reader = Store(directory, mode="ro")
    reader.check_once(_put(reader))
    assert len(parsed) == 1


def test_other_bytes_under_the_same_key_are_parsed(directory, parsed):
    store = Store(directory)
    store.check_once(_put(store))
    mark = _mark(directory).read_bytes()
    store.clear()
    assert not _mark(directory).exists()
    entry = _put(store, EVIL)
    _mark(directory).write_bytes(mark)
    with pytest.raises(CacheTrustError, match="attribute tofile"):
        store.check_once(entry)
    with pytest.raises(CacheTrustError, match="attribute tofile"):
        store.check_once(entry)  # what was refused got no mark


def test_other_rules_parse_again(directory, parsed, monkeypatch):
    store = Store(directory)
    store.check_once(_put(store))
    monkeypatch.setattr(checked, "rules", lambda: "0" * 64)
    store.check_once(_put(store))
    store.check_once(_put(store))
    assert len(parsed) == 2


def test_the_rules_are_the_file_that_holds_them(monkeypatch, tmp_path):
    changed = tmp_path / "foreign.py"
    changed.write_text("BUILTINS = frozenset()\n")
    before = checked.rules()
    monkeypatch.setattr(checked.foreign, "__file__", str(changed))
    assert checked.rules.__wrapped__() != before


@pytest.mark.parametrize("kind", ["open to others", "symlink", "half written"])
def test_a_mark_that_others_could_have_written_does_not_count(kind, directory, parsed):
    store = Store(directory)
    store.check_once(_put(store))
    mark = _mark(directory)
    if kind == "open to others":
        mark.chmod(0o622)
    elif kind == "symlink":
        mark.rename(directory / "elsewhere")
        mark.symlink_to(directory / "elsewhere")
    else:
        mark.write_bytes(mark.read_bytes()[:-1])
    reader = Store(directory, mode="ro")
    reader.check_once(_put(reader))
    assert len(parsed) == 2


def test_archives_bring_no_mark(directory, tmp_path, parsed):
    store = Store(directory, check=lambda name, text: None)
    store.check_once(_put(store))
    store.export(tmp_path / "all.tar")
    other = Store(tmp_path / "other", check=lambda name, text: None)
    other.import_(tmp_path / "all.tar")
    assert not _mark(tmp_path / "other").exists()
    del parsed[:]
    other.check_once(_put(other))
    assert len(parsed) == 1


def test_a_mark_lies_in_its_entry_and_goes_with_it(directory):
    store = Store(directory)
    entry = _put(store)
    store.check_once(entry)
    assert sorted(os.listdir(entry.path)) == [checked.MARK, "kernel.py", "meta.json"]
    assert [info.state for info in store.list()] == ["ok"]
    store.prune(max_bytes=0)
    assert not any(files for _, _, files in os.walk(directory))


def test_an_entry_that_takes_no_mark_costs_time_only(directory, parsed):
    store = Store(directory)
    entry = _put(store)
    os.mkfifo(_mark(directory), 0o600)
    for _ in range(2):
        store.check_once(entry)
    assert len(parsed) == 2
