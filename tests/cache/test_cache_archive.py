"""Archives: what goes out comes back byte for byte, and nothing else comes in."""

from __future__ import annotations

import gzip
import io
import tarfile
import warnings

import pytest
from cache_helpers import Builder, key_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nmm_compiler.cache import archive
from nmm_compiler.cache.entry import MANIFEST, make
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheError, CacheTrustError, DamagedEntryError


def accept(name: str, text: str) -> None:
    """A check that has nothing against any source."""


@pytest.fixture
def filled(directory):
    store = Store(directory, check=accept)
    for number in range(3):
        store.get_or_build(key_of(number), Builder(f"y = {number}\n"), {"n": number})
    return store


@pytest.mark.parametrize("name", ["all.tar", "all.tar.gz", "all.tgz"])
def test_round_trip(filled, tmp_path, name):
    assert filled.export(tmp_path / name) == 3
    other = Store(tmp_path / "other", check=accept)
    assert other.import_(tmp_path / name) == (3, 0)
    assert other.import_(tmp_path / name) == (0, 3)
    for number in range(3):
        ours, theirs = filled.get(key_of(number)), other.get(key_of(number))
        assert (ours.files, ours.meta, ours.manifest) == (
            theirs.files,
            theirs.meta,
            theirs.manifest,
        )
    packed = (tmp_path / name).read_bytes()[:2] == b"\x1f\x8b"
    assert packed == (name != "all.tar")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_equal_entries_give_equal_bytes(filled, tmp_path, name):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        prefix = key_of(1).digest[:12]
        assert filled.export(tmp_path / folder / name, prefix) == 1
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert [p.name for p in (tmp_path / "one").iterdir()] == [name]


def test_damaged_entries_are_not_exported(filled, tmp_path):
    (filled.get(key_of(1)).path / "kernel.py").write_text("other\n")
    assert filled.export(tmp_path / "a.tar") == 2


def test_an_import_in_place_of_a_damaged_entry(filled, tmp_path):
    filled.export(tmp_path / "a.tar")
    (filled.get(key_of(1)).path / "kernel.py").write_text("other\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert filled.import_(tmp_path / "a.tar") == (1, 2)
    assert filled.get(key_of(1)).files == {"kernel.py": "y = 1\n"}


# Hostile archives


def _member(name, data=b"x", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def _tar(path, *members):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        for info, data in members:
            out.addfile(info, io.BytesIO(data))
    return path


def _good(number=1):
    entry = make(key_of(number), {"kernel.py": "y = 1\n"}, {})
    digest = entry.key.digest
    return digest, [
        _member(f"{digest}/{MANIFEST}", entry.manifest),
        _member(f"{digest}/kernel.py", b"y = 1\n"),
    ]


def _refused(tmp_path, members, error=CacheTrustError, match=None, check=accept):
    store = Store(tmp_path / "into", check=check)
    with pytest.raises(error, match=match):
        store.import_(_tar(tmp_path / "hostile.tar", *members))
    assert store.list() == ()
    outside = {p.name for p in tmp_path.iterdir()} - {"hostile.tar", "into"}
    assert outside == set()


D = key_of(1).digest


@pytest.mark.parametrize(
    "name",
    [
        "../evil.py", "/tmp/nmm_evil.py", f"{D}/../../evil.py", f"{D}/../evil.py",
        f"../{D}/kernel.py", f"./{D}/kernel.py", f"{D}/sub/kernel.py", f"{D}//kernel.py", f"{D}/",
        D, "kernel.py", "..",
        f"{D}/.hidden", f"{D}/a b", f"{D}/a\\b", f"{D.upper()}/kernel.py", f"{D[:-1]}/kernel.py",
        f"{D}\u202e/kernel.py", f"{D}/kernel.py/", "v1/" + D + "/kernel.py", f"{D}/" + "a" * 300,
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere(tmp_path, name):
    # The whole entry before it is not taken either.
    if not name.endswith("kernel.py/") and name != f"{D}/":
        _refused(tmp_path, [*_good(2)[1], _member(name)], match="nothing of the archive was taken")
        _refused(tmp_path, [_member(name), *_good(2)[1]], match="nothing of the archive was taken")
    else:  # tarfile strips the slash: a directory by another name
        _refused(tmp_path, [*_good(2)[1], _member(name)], CacheError)


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"), (tarfile.SYMTYPE, "../../evil"),
        (tarfile.SYMTYPE, "kernel.py"),
        (tarfile.LNKTYPE, "/etc/passwd"), (tarfile.LNKTYPE, f"{D}/meta.json"),
        (tarfile.DIRTYPE, ""), (tarfile.FIFOTYPE, ""), (tarfile.CHRTYPE, ""), (tarfile.BLKTYPE, ""),
        (tarfile.CONTTYPE, ""),
    ],
)  # fmt: skip
def test_members_that_are_no_files(tmp_path, kind, link):
    _refused(tmp_path, [*_good(2)[1], _member(f"{D}/kernel.py", b"", kind, link)])


def test_a_symlinked_folder_and_a_file_through_it(tmp_path):
    members = [_member(D, b"", tarfile.SYMTYPE, "/tmp"), _member(f"{D}/nmm_evil.py")]
    _refused(tmp_path, members)


def test_a_file_twice_and_an_entry_twice(tmp_path):
    digest, members = _good()
    _refused(tmp_path, [*members, _member(f"{digest}/kernel.py", b"evil")], match="twice")
    _refused(tmp_path, [*members, *_good(2)[1], *members], match="twice")


def test_a_hash_that_does_not_match(tmp_path):
    digest, (manifest, _) = _good()
    evil = _member(f"{digest}/kernel.py", b"y = 2\n")
    _refused(tmp_path, [*_good(2)[1], manifest, evil], DamagedEntryError, "sha256")
    extra = _member(f"{digest}/nki.py", b"y = 2\n")
    _refused(tmp_path, [*_good()[1], extra], DamagedEntryError, r"nki\.py")
    _refused(tmp_path, [manifest], DamagedEntryError, r"kernel\.py")
    _refused(tmp_path, [evil], DamagedEntryError, r"no meta\.json")


def test_an_entry_under_the_name_of_another(tmp_path):
    _, ((_, manifest), (_, source)) = _good(2)
    members = [_member(f"{D}/{MANIFEST}", manifest), _member(f"{D}/kernel.py", source)]
    _refused(tmp_path, members, DamagedEntryError, "another entry")


def test_too_many_files_too_large_a_file_too_large_an_archive(tmp_path, monkeypatch):
    _refused(tmp_path, [_member(f"{D}/f{i}") for i in range(100)], match="too much")
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 1000)
    _refused(tmp_path, [_member(f"{D}/kernel.py", b"x" * 1001)])
    monkeypatch.setattr(archive, "MAX_ARCHIVE_BYTES", 100_000)
    packed, store = tmp_path / "bomb.tar.gz", Store(tmp_path / "into", check=accept)
    header = _member(f"{D}/kernel.py", b"")[0]
    header.pax_headers = {"comment": "x" * 5_000_000}
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w", format=tarfile.PAX_FORMAT) as out:
        out.addfile(header)
    packed.write_bytes(gzip.compress(bomb.getvalue()))
    with pytest.raises(CacheTrustError, match="unpacks to more"):
        store.import_(packed)
    monkeypatch.setattr(archive, "MAX_ARCHIVE_BYTES", 1 << 40)  # the bound of one member holds
    with pytest.raises(CacheTrustError, match="unpacks to more"):
        store.import_(packed)
    assert store.list() == ()


def test_what_a_check_refuses_is_not_taken(tmp_path):
    seen = []

    def check(name, text):
        seen.append((name, text))
        raise SyntaxError("line 1: open() is not NKI")

    _refused(tmp_path, _good()[1], match=r"open\(\) is not NKI", check=check)
    assert seen == [("kernel.py", "y = 1\n")]
    _refused(tmp_path, _good()[1], match="nobody gave a check", check=None)


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b", b"\x1f\x8b" + b"x" * 100, b"PK\3\4" * 200])
def test_what_is_no_archive(tmp_path, data):
    (tmp_path / "x.tar").write_bytes(data)
    store = Store(tmp_path / "into", check=accept)
    with pytest.raises(DamagedEntryError):
        store.import_(tmp_path / "x.tar")


def test_a_missing_archive_keeps_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Store(tmp_path / "into", check=accept).import_(tmp_path / "none.tar")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_an_archive_cut_anywhere_or_flipped_anywhere(filled, tmp_path, name):
    """Refused, or (padding, the last entry missing) only whole entries that were in it."""
    filled.export(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    good = {key_of(i).digest: filled.get(key_of(i)).files for i in range(3)}
    refused = 0
    for position in range(0, len(data), 37):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        for changed in (data[:position], bytes(flipped)):
            try:
                for entry in archive.unpack(io.BytesIO(changed), name):
                    assert good[entry.key.digest] == entry.files
            except CacheError:
                refused += 1
    assert refused > len(data) // 37 // 4


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000))
def test_noise_is_refused_with_an_error_of_ours(noise):
    for data in (noise, b"\x1f\x8b" + noise, gzip.compress(noise)):
        try:
            entries = list(archive.unpack(io.BytesIO(data), "noise"))
        except CacheError:
            continue
        assert entries == []
