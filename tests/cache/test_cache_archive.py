"""Archives: what goes out comes back byte for byte, and nothing else comes in."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import tracemalloc
import warnings

import pytest
from cache_helpers import Builder, key_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nmm_compiler.cache import archive
from nmm_compiler.cache import entry as entry_module
from nmm_compiler.cache.entry import MANIFEST, make
from nmm_compiler.cache.signing import Signer, Trusted
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheError, CacheKeyError, CacheTrustError, DamagedEntryError


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


def _packed(path, *members):
    """Write these members as `pack` does, with the right end marker."""
    body = b"".join(archive._member(info.name, data) for info, data in members)
    count = sum(info.name.endswith(f"/{MANIFEST}") for info, _ in members)
    path.write_bytes(body + archive._end(count, hashlib.sha256(body).hexdigest()))
    return path


def _good(number=1):
    entry = make(key_of(number), {"kernel.py": "y = 1\n"}, {})
    digest = entry.key.digest
    return digest, [
        _member(f"{digest}/{MANIFEST}", entry.manifest),
        _member(f"{digest}/kernel.py", b"y = 1\n"),
    ]


def _refused(tmp_path, members, error=CacheTrustError, match=None, check=accept, write=_tar):
    store = Store(tmp_path / "into", check=check)
    with pytest.raises(error, match=match) as found:
        store.import_(write(tmp_path / "hostile.tar", *members))
    assert len(str(found.value)) < 1000
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
    evil = _member(f"{digest}/kernel.py", b"evil")
    _refused(tmp_path, [*members, evil], match=r"kernel\.py", write=_packed)
    twice = [*members, *_good(2)[1], *members]
    _refused(tmp_path, twice, match="twice", write=_packed)


def test_a_hash_that_does_not_match(tmp_path):
    digest, (manifest, _) = _good()
    evil = _member(f"{digest}/kernel.py", b"y = 2\n")
    changed = [*_good(2)[1], manifest, evil]
    _refused(tmp_path, changed, DamagedEntryError, "sha256", write=_packed)
    extra = _member(f"{digest}/nki.py", b"y = 2\n")
    _refused(tmp_path, [*_good()[1], extra], match=r"nki\.py", write=_packed)
    _refused(tmp_path, [manifest], match=r"'kernel\.py' of at most 6 B", write=_packed)
    _refused(tmp_path, [evil], match=r"where 'meta\.json'", write=_packed)
    longer = _member(f"{digest}/kernel.py", b"y = 10\n")
    _refused(tmp_path, [manifest, longer], match="at most 6 B", write=_packed)


def test_an_entry_under_the_name_of_another(tmp_path):
    _, ((_, manifest), (_, source)) = _good(2)
    members = [_member(f"{D}/{MANIFEST}", manifest), _member(f"{D}/kernel.py", source)]
    _refused(tmp_path, members, DamagedEntryError, "another entry", write=_packed)


def test_the_end_marker_counts_the_entries_and_hashes_every_byte(tmp_path):
    members = [*_good(1)[1], *_good(2)[1]]
    whole = _packed(tmp_path / "whole.tar", *members).read_bytes()
    one = len(_packed(tmp_path / "one.tar", *_good(1)[1]).read_bytes())
    end = len(archive._end(0, "0" * 64))
    without_one = whole[one - end :]
    for data in (
        without_one, whole[:-end], whole[:-1], whole + b"x", whole[: one - end] + whole[-end:],
        b"\0" * 10240,
    ):  # fmt: skip
        (tmp_path / "x.tar").write_bytes(data)
        with pytest.raises(CacheError, match=r"not a whole tar|goes on behind|where 'meta"):
            list(archive.read(tmp_path / "x.tar"))
    for name in ("whole.tar", "one.tar"):
        (tmp_path / name).unlink()


def test_sizes_are_bounded_before_anything_is_read(tmp_path, monkeypatch):
    """A header that promises much, a manifest that lists much, an archive that unpacks to much."""
    huge = archive._header(f"{D}/{MANIFEST}", 1 << 32)
    for data in (huge + b"x" * 4096, gzip.compress(huge + bytes(200_000_000))):
        tracemalloc.start()
        with pytest.raises(CacheTrustError, match="at most 1048576 B"):
            list(archive.unpack(io.BytesIO(data), "bomb"))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    entry = make(key_of(1), {"kernel.py": "x" * 2000}, {})
    monkeypatch.setattr(entry_module, "MAX_ENTRY_BYTES", 1000)
    with pytest.raises(DamagedEntryError, match="too much"):
        list(archive.unpack(io.BytesIO(archive.pack_one(entry)), "large"))
    with pytest.raises(CacheKeyError, match="over 1000 B"):
        make(key_of(1), {"kernel.py": "x" * 2000}, {})
    monkeypatch.setattr(entry_module, "MAX_ENTRY_BYTES", 10_000)
    monkeypatch.setattr(archive, "MAX_ARCHIVE_BYTES", 3000)
    with pytest.raises(CacheTrustError, match="unpacks to over 3000 B"):
        list(archive.unpack(io.BytesIO(archive.pack_one(entry)), "large"))


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g", b"S", b"V"])
def test_long_names_pax_headers_and_sparse_maps_give_one_line(tmp_path, kind):
    member = _member(f"{D}/kernel.py", b"", kind)
    _refused(tmp_path, [member, *_good()[1]], match="nothing of the archive was taken")


def test_what_is_not_a_regular_file_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CacheTrustError, match="not a regular file"):
        Store(tmp_path / "into", check=accept).import_(tmp_path / "fifo")


# Signatures


@pytest.fixture
def keys(tmp_path):
    """(Signer, Trusted, Trusted of another key)."""
    minisign = pytest.importorskip("minisign")
    pair, other = minisign.KeyPair.generate(), minisign.KeyPair.generate()
    (tmp_path / "minisign.key").write_bytes(bytes(pair.secret_key))
    known = [Trusted(k.public_key.to_base64().decode()) for k in (pair, other)]
    return Signer(tmp_path / "minisign.key"), *known


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_signed_entries_are_taken_and_others_are_not(filled, tmp_path, keys, name):
    signer, trusted, other = keys
    filled.export(tmp_path / name, signer=signer)
    filled.export(tmp_path / f"plain-{name}")
    into = Store(tmp_path / "into", check=accept)
    for path, key, match in (
        (name, other, "not signed by a key that is trusted"),
        (f"plain-{name}", trusted, "is not signed and a signature is required"),
    ):
        with pytest.raises(CacheTrustError, match=match):
            into.import_(tmp_path / path, trusted=key)
    assert into.list() == ()
    assert into.import_(tmp_path / name, trusted=trusted) == (3, 0)
    assert into.import_(tmp_path / name) == (0, 3)  # nobody has to ask for signatures
    filled.export(tmp_path / f"again-{name}", signer=signer)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


def test_a_signature_of_another_entry_does_not_count(tmp_path, keys):
    signer, trusted, _ = keys
    first, second = (make(key_of(n), {"kernel.py": f"y = {n}\n"}, {}) for n in (1, 2))

    class Confused:
        def sign(self, digest, manifest):
            return signer.sign(digest, second.manifest)

    data = archive.pack_one(first, Confused())
    with pytest.raises(CacheTrustError, match="signature verification failed"):
        list(archive.unpack(io.BytesIO(data), "x", trusted))


@pytest.mark.parametrize("text", ["", "RWQ", "not base64!", "RWQf6LRCGA9i53mlYecO4IzT51TGPpvW"])
def test_keys_that_are_none_are_refused_by_name(tmp_path, text):
    pytest.importorskip("minisign")
    with pytest.raises(CacheError, match="no minisign public key"):
        Trusted(text)
    (tmp_path / "key").write_text(text)
    for path in (tmp_path / "key", tmp_path / "absent", tmp_path):
        with pytest.raises(CacheError, match="cannot be used as a minisign secret key"):
            Signer(path)


def test_what_a_check_refuses_is_not_taken(tmp_path):
    seen = []

    def check(name, text):
        seen.append((name, text))
        raise SyntaxError("line 1: open() is not NKI")

    _refused(tmp_path, _good()[1], match=r"open\(\) is not NKI", check=check, write=_packed)
    assert seen == [("kernel.py", "y = 1\n")]
    _refused(tmp_path, _good()[1], match="nobody gave a check", check=None, write=_packed)


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b", b"\x1f\x8b" + b"x" * 100, b"PK\3\4" * 200])
def test_what_is_no_archive(tmp_path, data):
    (tmp_path / "x.tar").write_bytes(data)
    store = Store(tmp_path / "into", check=accept)
    with pytest.raises(CacheError, match=r"not a whole tar|where 'meta"):
        store.import_(tmp_path / "x.tar")


def test_a_missing_archive_keeps_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Store(tmp_path / "into", check=accept).import_(tmp_path / "none.tar")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_an_archive_cut_anywhere_or_flipped_anywhere(filled, tmp_path, name):
    """Refused, wherever it is; only gzip has bits that mean nothing: header, last padding."""
    filled.export(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    good = {key_of(i).digest: filled.get(key_of(i)).files for i in range(3)}
    refused, step = 0, 37 if name == "a.tar" else 3
    for position in range(0, len(data), step):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        for changed in (data[:position], bytes(flipped)):
            try:
                for entry in archive.unpack(io.BytesIO(changed), name):
                    assert good[entry.key.digest] == entry.files
            except CacheError:
                refused += 1
            else:
                assert name == "a.tar.gz"  # the tar inside is the same, to the bit
                assert gzip.decompress(changed) == gzip.decompress(data)
    assert refused > 50


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000))
def test_noise_is_refused_with_an_error_of_ours(noise):
    for data in (noise, b"\x1f\x8b" + noise, gzip.compress(noise)):
        try:
            entries = list(archive.unpack(io.BytesIO(data), "noise"))
        except CacheError:
            continue
        assert entries == []
