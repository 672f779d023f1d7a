"""`nmm cache`, and what `nmm build` takes from archives: on a cache of small entries."""

import json

import pytest

from nmm_compiler.cache.disk import FOLDER
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store

SOURCE = "import nki\nimport nki.language as nl\n\n\n@nki.jit\ndef kernel(x):\n    return x\n"


def _key(number):
    return Key.make({"family": "toy", "spec": {"m": number, "k": 64}, "target": "trn2"})


@pytest.fixture
def directory(tmp_path, monkeypatch, nmm):
    path = tmp_path / "cache"
    monkeypatch.setenv("NMM_CACHE_DIR", str(path))
    store = Store(path)
    for number in (128, 512):
        store.get_or_build(_key(number), lambda: {"kernel.py": SOURCE}, {"latency_us": 1.5})
    return path


@pytest.fixture
def run(nmm):
    return lambda *words, code=0: "".join(nmm("cache", *words, code=code)[1:])


@pytest.fixture
def build(nmm):
    return lambda *words, code=0: "".join(nmm("build", *words, code=code)[1:])


def test_list_shows_kernels_and_counts_predicted_times(directory, run):
    for number in (1, 2):
        key = Key.make({"price": "simulated_us", "spec": {"m": number}})
        Store(directory).get_or_build(key, lambda: {"price.json": "{}"}, {})
    shown = run("list")
    digests = (_key(number).digest[:12] for number in (128, 512))
    for words in (*digests, "spec.m=128", "spec.m=512", "2 predicted times", "4 entries",
                  "in all: family=toy spec.k=64 target=trn2"):  # fmt: skip
        assert words in shown
    assert "simulated_us" not in shown
    data = json.loads(run("list", "--json"))
    assert [entry["state"] for entry in data] == ["ok"] * 4


def test_one_entry_with_why_it_was_built(directory, run):
    prefix = _key(512).digest[:8]
    shown = run("list", prefix)
    assert str(directory) in shown
    assert "7 lines" in shown
    assert "spec.m      512       128" in shown
    told = json.loads(run("list", prefix, "--json"))
    assert told["key"] == _key(512).to_dict()
    assert told["differs"] == [["spec.m", "512", "128"]]
    assert "0 entries" in run("list", "zzzz", code=2)


def test_a_key_says_why_its_kernel_would_be_built(directory, run, tmp_path):
    wanted = tmp_path / "wanted.json"
    wanted.write_text(json.dumps({**_key(512).to_dict(), "target": "trn3"}))
    shown = run("list", str(wanted))
    assert "miss among 2 entries, because of: target" in shown
    wanted.write_text(run("list", _key(512).digest, "--json"))
    assert "7 lines" in run("list", str(wanted))
    wanted.write_text("{")
    assert "wanted.json is not JSON" in run("list", str(wanted), code=2)


def test_verify_quick_and_clear(directory, run):
    assert "2 entries: 2 same" in run("verify", "--quick")
    (directory / FOLDER / _key(128).digest / "kernel.py").write_text("other\n")
    assert "1 damaged" in run("verify", "--quick", code=1)
    assert "1 entry deleted, 1 left" in run("clear", "--keep", "900")
    assert "1 entry deleted, 0 left" in run("clear", "--yes")


def test_an_archive_fills_another_cache(directory, build, run, tmp_path, monkeypatch):
    (tmp_path / "specs.jsonl").write_text(
        '{"family": "matmul", "spec": {"m": 8, "k": 64, "n": 64}}\n'
    )
    archive = tmp_path / "out.tar"
    store = Store(directory)
    store.prune(0)
    said = build(str(tmp_path / "specs.jsonl"), "--jobs", "1", "--archive", str(archive))
    assert f"1 entry written to {archive}" in said
    monkeypatch.setenv("NMM_REMOTE_CACHE", f"file://{tmp_path}/shared")
    assert "1 entry sent" in build(str(tmp_path / "specs.jsonl"), "--push")
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "other"))
    assert "1 entry taken" in build(str(archive))
    assert "0 entries taken" in build(str(archive))
    assert "1 entry: 1 same" in run("verify")


def test_an_archive_is_linted_and_refused(directory, build, run, tmp_path):
    evil = Store(tmp_path / "evil")
    evil.get_or_build(
        Key.make({"x": 1}), lambda: {"kernel.py": "import os\nos.system('true')\n"}, {}
    )
    evil.export(tmp_path / "evil.tar")
    assert "refused" in build(str(tmp_path / "evil.tar"), code=2)
    assert "none.tar" in build(str(tmp_path / "none.tar"), code=2)
    assert "2 entries" in run("list")


def test_changes_need_mode_rw(directory, build, run, tmp_path, monkeypatch):
    monkeypatch.setenv("NMM_CACHE", "ro")
    for said in (run("clear", "--yes", code=2), run("clear", "--keep", "0", code=2),
                 build(str(tmp_path / "x.tar"), code=2)):  # fmt: skip
        assert "NMM_CACHE=rw" in said
    assert "2 entries" in run("list")


def test_verify_rebuilds_real_kernels(tmp_path, monkeypatch, run):
    """An entry of this version is built again and compared; one of another version is skipped."""
    build = pytest.importorskip("nmm_compiler.codegen.build")
    kernels = pytest.importorskip("nmm_compiler.kernels")
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "cache"))
    spec = kernels.FAMILIES["lowrank"].spec_class(m=128, k=128, r=64, n=128)
    kernel = build.build_kernel(spec, "trn2")
    store = Store(tmp_path / "cache")
    assert "1 entry: 1 same" in run("verify")
    digest = next(store.entries()).digest
    entry = store.show(digest)
    store.prune(0)
    store.get_or_build(entry.key, lambda: {"kernel.py": kernel.source + "# lie\n"}, entry.meta)
    shown = run("verify", code=1)
    assert "1 differs" in shown
    store.prune(0)
    other = Key.make({**entry.key.to_dict(), "version": "0.0.0"})
    store.get_or_build(other, lambda: entry.files, entry.meta)
    assert "1 skipped" in run("verify")
