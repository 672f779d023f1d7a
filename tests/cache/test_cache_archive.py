"""Archives: what goes out comes back byte for byte, and nothing else comes in."""

import io
import json
import os
import tarfile
import tracemalloc

import pytest
from cache_helpers import Builder, key_of
from hypothesis import given, settings, strategies as st

from nmm_compiler.cache import archive
from nmm_compiler.cache.entry import MAX_ENTRY_BYTES, make
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheError, CacheTrustError, DamagedEntryError


@pytest.fixture
def filled(directory):
    store = Store(directory)
    for number in range(3):
        store.get_or_build(key_of(number), Builder(f"y = {number}\n"), {"n": number})
    return store


# Hostile archives


def _member(name, data=b"x", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def _good(number=1, text="y = 1\n"):
    entry = make(key_of(number), {"kernel.py": text}, {})
    return [_member(f"{entry.key.digest}/{n}", data) for n, data in entry.contents.items()]


def _index(*numbers):
    return _member(archive.INDEX, json.dumps([key_of(n).digest for n in numbers]).encode())


def _refused(tmp_path, members, error=CacheError, match=None):
    store, path = Store(tmp_path / "into"), tmp_path / "hostile.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        for info, data in members:
            out.addfile(info, io.BytesIO(data))
    with pytest.raises(error, match=match) as found:
        store.import_(path)
    assert len(str(found.value)) < 1000
    assert list(store.entries()) == []
    assert {p.name for p in tmp_path.iterdir()} <= {"hostile.tar", "into"}


D = key_of(1).digest
HEAD = "import nki\nimport nki.language as nl\n\n\n@nki.jit\n"


# Paths that lead elsewhere.
NAMES = [
        "../evil.py", "/tmp/nmm_evil.py", f"{D}/../../evil.py", f"{D}/../evil.py",
        f"../{D}/kernel.py", f"./{D}/kernel.py", f"{D}/sub/kernel.py", f"{D}//kernel.py",
        D, "kernel.py", "..", f"{D}/.hidden", f"{D}/a b", f"{D.upper()}/kernel.py",
        f"{D[:-1]}/kernel.py", f"{D}\u202e/kernel.py", "v1/" + D + "/kernel.py",
        f"{D}/" + "a" * 300,
]  # fmt: skip
# Members that are no files.
KINDS = [
        (tarfile.SYMTYPE, "/etc/passwd"), (tarfile.SYMTYPE, "kernel.py"),
        (tarfile.LNKTYPE, f"{D}/meta.json"), (tarfile.DIRTYPE, ""), (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""), (tarfile.CONTTYPE, ""),
        (b"L", ""), (b"S", ""), (b"V", ""),
]  # fmt: skip
SOURCE, MANIFEST = _good()
EVIL, EXTRA = _member(f"{D}/kernel.py", b"y = 2\n"), _member(f"{D}/nki.py", b"y = 2\n")
UNDER_ANOTHER_NAME = [
    _member(f"{D}/{info.name.partition('/')[2]}", data) for info, data in _good(2)
]


@pytest.mark.parametrize(
    ("members", "error", "match"),
    [
        # The whole entry before it is not taken either.
        *(([*_good(2), _member(n)], CacheTrustError, "nothing of it was taken") for n in NAMES),
        *(
            ([*_good(2), _member(f"{D}/kernel.py", b"", kind, link), _index(2)], CacheError, None)
            for kind, link in KINDS
        ),
        ([*_good(2), EVIL, MANIFEST, _index(2, 1)], DamagedEntryError, "sha256"),
        ([*_good(), EVIL, MANIFEST, _index(1, 1)], CacheTrustError, "taken"),
        ([EXTRA, SOURCE, MANIFEST, _index(1)], CacheError, r"differ: nki\.py"),
        ([MANIFEST, _index(1)], CacheError, r"differ: kernel\.py"),
        ([SOURCE, _index()], CacheError, "is not that of"),
        ([*UNDER_ANOTHER_NAME, _index(1)], CacheError, "another entry"),
        ([*_good(), _index(1, 2)], CacheError, "is not that of"),
        ([*_good(), *_good(2), _index(1)], CacheError, "is not that of"),
        ([*_good(), _index(1), *_good(2)], CacheError, "is not that of"),
        (_good(), CacheError, "ends without"),
    ],
)
def test_members_that_are_not_whole_entries_of_the_index(tmp_path, members, error, match):
    _refused(tmp_path, members, error, match)


def test_sizes_are_bounded_before_anything_is_read(tmp_path):
    """A header that promises much: a file, or a name."""
    for kind in (tarfile.REGTYPE, b"L", b"K", b"x", b"g"):
        info = tarfile.TarInfo(f"{D}/kernel.py")
        info.type, info.size = kind, 1 << 30
        path = tmp_path / "bomb.tar"
        with open(path, "wb") as out:
            out.write(info.tobuf(tarfile.GNU_FORMAT))
            out.truncate(1 << 31)
        tracemalloc.start()
        with pytest.raises(CacheError):
            list(archive.read(path))
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_ENTRY_BYTES
        tracemalloc.stop()


def test_what_is_no_archive_is_refused_and_does_not_hang(tmp_path):
    store = Store(tmp_path / "into")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CacheTrustError, match="not a regular file"):
        store.import_(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        store.import_(tmp_path / "none.tar")
    for data in (b"", b"\x1f\x8b", b"PK\3\4" * 200, bytes(10240)):
        (tmp_path / "x.tar").write_bytes(data)
        with pytest.raises(DamagedEntryError, match="not a whole archive"):
            store.import_(tmp_path / "x.tar")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("import os\n", "import of os, which no kernel file"),
        (f"{HEAD}def f(x):\n    return nl.nothing(x)\n", "kernel.py of .* was refused: 1 error"),
    ],
)
def test_a_source_that_is_no_kernel_or_that_the_lint_refuses_is_not_taken(tmp_path, text, match):
    _refused(tmp_path, [*_good(2), *_good(1, text), _index(2, 1)], CacheTrustError, match)


def test_an_archive_cut_anywhere_or_flipped_anywhere(filled, tmp_path):
    """Refused, or the same entries: a tar has bytes that mean nothing, such as padding."""
    filled.export(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as plain:  # any tar program reads it
        assert f"{D}/kernel.py" in plain.getnames()
    data = (tmp_path / "a.tar").read_bytes()
    good = {key_of(i).digest: filled.get(key_of(i)).contents for i in range(3)}
    refused = 0
    for position in range(0, len(data), 37):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        for changed in (data[:position], bytes(flipped)):
            try:
                entries = list(archive.unpack(io.BytesIO(changed), "a.tar"))
            except CacheError:
                refused += 1
            else:
                assert {entry.key.digest: entry.contents for entry in entries} == good
    assert refused > 100


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_noise_is_refused_with_an_error_of_ours(noise):
    with pytest.raises(CacheError):
        list(archive.unpack(io.BytesIO(noise), "noise"))
