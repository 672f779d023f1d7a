"""Whatever happens to the bytes of an entry, it is seen, and the kernel is built again."""

import shutil
import warnings

import pytest
from cache_helpers import Builder, key_of
from hypothesis import HealthCheck, given, settings, strategies as st

from nmm_compiler.cache.disk import Disk
from nmm_compiler.cache.entry import render, verified
from nmm_compiler.cache.explain import explain
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheMissError, CacheWarning, DamagedEntryError

SOURCE = "import nki\n\n\n@nki.jit\ndef kernel(x):\n    return x  # é\n"
META = {"us": 12.5}


@pytest.fixture
def entry(directory):
    return Store(directory).get_or_build(key_of(1), Builder(SOURCE), META)


def _flips(entry, bits):
    for file in sorted(entry.path.iterdir()):
        original = file.read_bytes()
        for position in range(len(original)):
            for bit in bits(position):
                data = bytearray(original)
                data[position] ^= 1 << bit
                yield file, original, bytes(data)


def test_every_byte_flipped_once_is_seen_and_the_kernel_is_rebuilt(directory, entry):
    build, disk = Builder(SOURCE), Disk(directory, writing=True)
    flips = list(_flips(entry, lambda position: [(position + 3) % 8]))
    for file, original, flipped in flips:
        file.write_bytes(flipped)
        with pytest.raises(DamagedEntryError):
            disk.read(entry.key.digest)
        file.write_bytes(original)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for count, (file, _, flipped) in enumerate(flips[::16], 1):
            file.write_bytes(flipped)
            again = Store(directory).get_or_build(key_of(1), build, META)
            assert build.calls == count
            assert (again.files, again.meta) == ({"kernel.py": SOURCE}, META)
    assert sum(issubclass(w.category, CacheWarning) for w in caught) == len(flips[::16])
    assert disk.read(entry.key.digest).files == entry.files


@pytest.mark.parametrize("name", ["kernel.py", "meta.json"])
def test_every_cut_is_detected(directory, entry, name):
    disk, file = Disk(directory, writing=True), entry.path / name
    original = file.read_bytes()
    for length in range(len(original)):
        file.write_bytes(original[:length])
        with pytest.raises(DamagedEntryError):
            disk.read(entry.key.digest)
    for tail in (b"\n", b"\0", original):
        file.write_bytes(original + tail)
        with pytest.raises(DamagedEntryError):
            disk.read(entry.key.digest)


def test_explain_says_that_an_entry_is_damaged(directory, entry):
    (entry.path / "kernel.py").write_text("other\n")
    store = Store(directory, "require")
    with pytest.warns(CacheWarning, match=r"kernel\.py is not"), pytest.raises(CacheMissError):
        store.get_or_build(key_of(1), Builder())
    assert "because its entry is damaged: kernel.py" in explain(key_of(1), store.entries())[0]
    assert (entry.path / "kernel.py").read_text() == SOURCE  # a private copy
    assert (entry.directory / "kernel.py").read_text() == "other\n"


ZEROS = "0" * 64
SHA256_OF_X = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"


@pytest.mark.parametrize(
    "change",
    [
        {"format": 3}, {"digest": ZEROS}, {"meta": []}, {"created": 1},
        {"key": {}}, {"key": None}, {"key": {"a": 1}},
        {"files": {}}, {"files": []}, {"files": {"x": 3}}, {"files": {"../x": SHA256_OF_X}},
        {"files": {"meta.json": SHA256_OF_X}}, {"files": {"x": ZEROS}},
    ],
)  # fmt: skip
def test_a_manifest_with_a_good_hash_and_bad_content_is_refused(change):
    """Its hash proves nothing about who wrote it: every field is checked."""
    key = key_of(1)
    good = {
        "format": 2,
        "digest": key.digest,
        "created": {"by": "x"},
        "key": key.to_dict(),
        "meta": {},
        "files": {"x": SHA256_OF_X},
    }

    def read(body):
        return verified(key.digest, {"x": b"x", "meta.json": render(body)})

    assert read(good).files == {"x": "x"}
    with pytest.raises(DamagedEntryError):
        read({**good, **change})
    for name in good:
        with pytest.raises(DamagedEntryError):
            read({k: v for k, v in good.items() if k != name})


@settings(deadline=None)
@given(st.binary(max_size=400) | st.just(b"[" * 100_000 + b"]" * 100_000))
def test_noise_is_never_a_manifest(noise):
    with pytest.raises(DamagedEntryError):
        verified(key_of(1).digest, {"kernel.py": b"", "meta.json": noise})


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    files=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", fullmatch=True).filter(
            lambda name: name != "meta.json"
        ),
        st.text(st.characters(exclude_categories=["Cs"])),
        min_size=1,
        max_size=5,
    )
)
def test_any_text_comes_back_as_it_was(tmp_path, files):
    directory = tmp_path / "any"
    shutil.rmtree(directory, ignore_errors=True)
    Store(directory).get_or_build(key_of(1), lambda: files)
    assert Store(directory).get(key_of(1)).files == files
