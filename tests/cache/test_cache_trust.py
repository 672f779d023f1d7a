"""Entries are code: who may have written them decides whether they are taken."""

import contextlib
import os
import shutil
import socket
import warnings

import pytest
from cache_helpers import (
    NOBODY,
    Builder,
    key_of,
    mend,
    open_directory,
    run_forked,
)

from nmm_compiler.cache.disk import FOLDER
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheTrustError, CacheWarning

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *((mode, "rw") for mode in (0o755, 0o750, 0o770, 0o777, 0o1777, 0o701)),
        (0o770, "ro"),
        (0o770, "require"),
    ],
)
def test_a_directory_open_to_others_is_refused_until_mended(directory, mode, how):
    store = Store(directory)
    store.get_or_build(key_of(1), Builder())
    directory.chmod(mode)
    for use in (store.get, lambda key: store.get_or_build(key, Builder())):  # looked at each time
        with pytest.raises(CacheTrustError):
            use(key_of(2))
    with pytest.raises(CacheTrustError, match=f"{mode:04o}") as caught:
        Store(directory, how)
    mend(str(caught.value))
    assert Store(directory).get(key_of(1)).files


@as_root
def test_a_directory_of_another_user_is_refused_until_mended(directory):
    Store(directory).get_or_build(key_of(1), Builder())
    os.chown(directory, NOBODY, NOBODY)
    for mode in ("rw", "ro", "require"):
        with pytest.raises(CacheTrustError, match=f"user id {NOBODY}") as caught:
            Store(directory, mode)
    mend(str(caught.value))
    assert Store(directory).get(key_of(1)).files


@as_root
def test_a_closed_directory_of_root_can_be_read_by_anybody_and_written_by_nobody():
    directory = open_directory(0o700)
    entry = Store(directory).get_or_build(key_of(1), Builder())
    for path in (entry.path, *entry.path.parents[:2]):
        path.chmod(0o755)
    for file in entry.path.iterdir():
        file.chmod(0o644)

    def user():
        for mode in ("ro", "require"):
            assert Store(directory, mode).get(key_of(1)).directory is not None
        with pytest.raises(CacheTrustError, match="NMM_CACHE=ro"):
            Store(directory)

    run_forked(user, NOBODY)
    directory.chmod(0o775)

    def refused():
        with pytest.raises(CacheTrustError):
            Store(directory, "ro")

    run_forked(refused, NOBODY)
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("put", "match"),
    [
        (lambda at, other: at.symlink_to(other), "NMM_CACHE_DIR=.*/other"),
        (lambda at, other: at.symlink_to(other.parent / "nowhere"), "symlink"),
        (lambda at, other: [at.mkdir(0o700), (at / FOLDER).symlink_to(other / FOLDER)], "symlink"),
        (lambda at, other: at.write_text(""), "not a directory"),
    ],
)
def test_what_is_no_directory_is_no_cache(tmp_path, directory, put, match):
    Store(tmp_path / "other").get_or_build(key_of(1), Builder("evil = 1\n"))
    put(directory, tmp_path / "other")
    with pytest.raises(CacheTrustError, match=match):
        Store(directory)


@pytest.mark.parametrize(
    ("below", "mode"), [("cache", 0o777), ("a/cache", 0o777), ("cache", 0o775)]
)
def test_a_parent_that_others_can_write_is_refused_until_mended(tmp_path, below, mode):
    parent = tmp_path / "parent"
    directory = parent / below
    Store(directory).get_or_build(key_of(1), Builder())
    parent.chmod(mode)
    with pytest.raises(CacheTrustError, match=f"{mode:04o}") as caught:
        Store(directory)
    mend(str(caught.value))
    assert Store(directory).get(key_of(1))
    parent.chmod(0o1777)  # as /tmp: others can add, not rename
    assert Store(directory).get(key_of(1))


def test_the_real_parents_count_behind_a_symlink(tmp_path):
    hidden = tmp_path / "open"
    hidden.mkdir()
    hidden.chmod(0o777)
    (tmp_path / "link").symlink_to(hidden)
    with pytest.raises(CacheTrustError, match=str(hidden)):
        Store(tmp_path / "link" / "cache")


# Entries that somebody else put there, or changed


def _rebuilt_with_warning(directory, match):
    build = Builder()
    with pytest.warns(CacheWarning, match=match):
        entry = Store(directory).get_or_build(key_of(1), build)
    assert build.calls == 1
    assert entry.files == {"kernel.py": build.text}
    with warnings.catch_warnings(action="error"):
        assert Store(directory).get(key_of(1)).files == entry.files


@pytest.fixture
def entry_path(directory):
    return Store(directory).get_or_build(key_of(1), Builder()).path


def elsewhere(path):
    """Put a link in the place of a file or an entry; return what it points to."""
    moved = path.parent.parent.parent / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    return moved


@pytest.mark.parametrize("name", ["", "kernel.py", "meta.json"])
def test_a_symlink_is_not_followed(directory, entry_path, name):
    moved = elsewhere(entry_path / name)
    _rebuilt_with_warning(directory, "symlink")
    assert moved.exists()  # what it pointed to is left alone


def listening_socket(path):
    # a socket's path is short
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


@pytest.mark.parametrize("name", ["kernel.py", "meta.json"])
@pytest.mark.parametrize(
    ("put", "match"),
    [
        (os.mkfifo, "not a regular file"),  # a plain open would wait here for ever
        (listening_socket, "socket"),
        (os.mkdir, "not a regular file"),
    ],
)
def test_a_file_that_is_none(directory, entry_path, name, put, match):
    (entry_path / name).unlink()
    put(entry_path / name)
    _rebuilt_with_warning(directory, match)


def file_in_its_place(path):
    shutil.rmtree(path)
    path.write_text("evil")


def entry_of_another_kernel(path):
    """Copying the entry of one kernel over that of another gives wrong numbers, not an error."""
    other = Store(path.parents[1]).get_or_build(key_of(2), Builder("other\n")).path
    shutil.rmtree(path)
    shutil.copytree(other, path)
    path.chmod(0o700)


def given_away(name):
    return lambda path: os.chown(path / name, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda path: path.chmod(0o777), "mode 0777"),
        (lambda path: (path / "kernel.py").chmod(0o622), "mode 0622"),
        (lambda path: (path / "meta.json").chmod(0o622), "mode 0622"),
        # it would be found before the real one
        (lambda path: (path / "nki.py").write_text("evil = 1\n"), r"differ: nki\.py"),
        (file_in_its_place, "not a directory"),
        (entry_of_another_kernel, "another entry"),
        *(
            pytest.param(given_away(name), f"user id {NOBODY}", marks=as_root)
            for name in ("", "kernel.py", "meta.json")
        ),
    ],
)
def test_an_entry_that_somebody_changed(directory, entry_path, change, match):
    change(entry_path)
    _rebuilt_with_warning(directory, match)


def test_bytecode_beside_the_source_is_deleted(directory, entry_path):
    (entry_path / "__pycache__").mkdir()
    (entry_path / "__pycache__" / "kernel.cpython-311.pyc").write_bytes(b"evil")
    entry = Store(directory).get(key_of(1))
    assert entry.files["kernel.py"] == "y = 1\n"
    assert not (entry_path / "__pycache__").exists()


def test_reading_modes_do_not_use_or_delete_what_is_damaged(directory, entry_path):
    (entry_path / "kernel.py").write_text("evil\n")
    build = Builder()
    with pytest.warns(CacheWarning, match="is not used"):
        entry = Store(directory, "ro").get_or_build(key_of(1), build)
    assert entry.files["kernel.py"] == build.text
    assert (entry_path / "kernel.py").read_text() == "evil\n"


@as_root
def test_a_parent_of_another_user_is_refused_until_mended():
    parent = open_directory(0o755, NOBODY)
    with pytest.raises(CacheTrustError, match=f"belongs to user id {NOBODY}, who can") as found:
        Store(parent / "cache")
    mend(str(found.value))
    assert list(Store(parent / "cache").entries()) == []


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/" + "x/" * 3000])
def test_a_path_that_cannot_be_looked_at_is_one_error_of_ours(path):
    with pytest.raises(CacheTrustError, match="cache directory") as found:
        Store(path)
    assert len(str(found.value)) < 600
    assert Store(path, "off").get(key_of(1)) is None


def test_mode_require_raises_where_other_modes_go_on_in_memory(monkeypatch):
    from nmm_compiler.options import Options

    open_to_all = str(open_directory(0o777))
    with pytest.raises(CacheTrustError):
        Store.for_kernels(Options(cache=f"require:{open_to_all}"))
    with pytest.warns(CacheWarning, match="mend it.*Until then kernels are kept in memory"):
        kept = Store.for_kernels(Options(cache=open_to_all))
    build = Builder()
    assert kept.get_or_build(key_of(1), build) is kept.get_or_build(key_of(1), build)
    assert build.calls == 1
    assert kept is Store.for_kernels(Options(cache=open_to_all))
    assert os.listdir(open_to_all) == []
