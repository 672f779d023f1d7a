"""`nmm cache`: each command on a cache of small entries."""

from __future__ import annotations

import json
import tarfile

import pytest
from typer.testing import CliRunner

from nmm_compiler.cache.disk import FOLDER
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.cli.cache import app
from nmm_compiler.errors import CacheError, CacheKeyError, CacheTrustError

SOURCE = "import nki\nimport nki.language as nl\n\n\n@nki.jit\ndef kernel(x):\n    return x\n"


def _key(number: int) -> Key:
    return Key.make({"family": "toy", "spec": {"m": number, "k": 64}, "target": "trn2"})


@pytest.fixture
def directory(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("NMM_CACHE_DIR", str(path))
    monkeypatch.setenv("COLUMNS", "200")
    store = Store(path)
    for number in (128, 512):
        store.get_or_build(_key(number), lambda: {"kernel.py": SOURCE}, {"latency_us": 1.5})
    return path


def run(*arguments, code=0, text=None):
    result = CliRunner().invoke(app, list(arguments), input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_list(directory):
    shown = run("list")
    assert "2 entries" in shown
    for number in (128, 512):
        assert _key(number).digest[:12] in shown
        assert f"spec.m={number}" in shown
    assert "in all: family=toy spec.k=64 target=trn2" in shown
    data = json.loads(run("list", "--json"))
    assert {entry["key"]["spec"]["m"] for entry in data} == {128, 512}
    assert {entry["state"] for entry in data} == {"ok"}


def test_list_marks_damage_and_deletes_nothing(directory):
    file = directory / FOLDER / _key(128).digest / "kernel.py"
    file.write_text("[red]other[/]\n")
    assert "damaged: kernel.py" in run("list")
    assert file.exists()


def test_predicted_times_are_counted_and_listed_on_request(directory):
    for number in (1, 2):
        key = Key.make({"price": "simulated_us", "spec": {"m": number}})
        Store(directory).get_or_build(key, lambda: {"price.json": "{}"}, {})
    shown = run("list")
    assert "spec.m=128" in shown
    assert "simulated_us" not in shown
    assert "2 predicted times" in shown
    assert "4 entries" in shown
    assert "simulated_us" in run("list", "--prices")
    assert len(json.loads(run("list", "--json"))) == 4


def test_list_of_nothing(tmp_path):
    assert "0 entries" in run("list", "--dir", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_show(directory):
    prefix = _key(512).digest[:8]
    shown = run("show", prefix)
    assert str(directory) in shown.replace("\n", "")
    assert "latency_us" in shown
    assert "7 lines" in shown
    assert run("show", prefix, "--source") == SOURCE
    assert json.loads(run("show", prefix, "--json"))["key"] == _key(512).to_dict()
    with pytest.raises(CacheError, match="0 entries"):
        run("show", "zzzz")


def test_explain_a_wanted_key(directory, tmp_path):
    wanted = tmp_path / "wanted.json"
    wanted.write_text(json.dumps({**_key(512).to_dict(), "target": "trn3"}))
    shown = run("explain", "--key", str(wanted))
    assert "miss among 2 entries, because of: target" in shown
    assert "trn3" in shown
    assert "trn2" in shown
    from_stdin = run("explain", "--key", "-", text=run("show", _key(512).digest, "--json"))
    assert ": hit" in from_stdin


def test_explain_an_entry_beside_the_others(directory):
    shown = run("explain", _key(512).digest[:10])
    assert f"nearest entry {_key(128).digest[:12]} differs in:" in shown
    assert "spec.m" in shown
    wide = Key.make({"family": "toy", "spec": {f"field{i}": i for i in range(40)}})
    Store(directory).get_or_build(wide, lambda: {"kernel.py": SOURCE}, {})
    assert run("explain").splitlines()[0] == f"entry {wide.digest[:12]}: hit"


def test_explain_refuses_what_is_no_key(directory, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CacheKeyError, match=r"bad\.json"):
        run("explain", "--key", str(tmp_path / "bad.json"))
    with pytest.raises(CacheError, match="no entries"):
        run("explain", "--dir", str(tmp_path / "none"))


def test_verify_quick(directory):
    assert "2 entries: 2 same" in run("verify", "--quick")
    (directory / FOLDER / _key(128).digest / "kernel.py").write_text("other\n")
    assert "1 damaged" in run("verify", "--quick", code=1)


def test_prune_and_clear(directory):
    assert "1 entry deleted" in run("prune", "--max-bytes", "800")
    run("clear", code=1, text="n\n")
    assert "1 entry" in run("list")
    assert "1 entry deleted" in run("clear", "--yes")


def test_export_import_and_push(directory, tmp_path, monkeypatch):
    archive = tmp_path / "out.tar"
    assert "2 entries written" in run("export", str(archive))
    other = str(tmp_path / "other")
    assert "2 entries taken" in run("import", str(archive), "--dir", other)
    assert "0 entries taken" in run("import", str(archive), "--dir", other)
    with pytest.raises(CacheError, match="one of the two"):
        run("export")
    with pytest.raises(CacheError, match="NMM_REMOTE_CACHE"):
        run("export", "--push")
    for place in (tmp_path / "none" / "x.tar", tmp_path, "/dev/null"):
        assert "cannot write" in run("export", str(place), code=2)
    monkeypatch.setenv("NMM_REMOTE_CACHE", "nosuchprotocol://x")
    with pytest.raises(CacheError, match="nosuchprotocol"):
        run("export", "--push")
    monkeypatch.setenv("NMM_REMOTE_CACHE", f"file://{tmp_path}/shared")
    assert "2 entries sent" in run("export", "--push")


def test_import_lints_and_refuses(directory, tmp_path):
    evil = Store(tmp_path / "evil")
    evil.get_or_build(
        Key.make({"x": 1}), lambda: {"kernel.py": "import os\nos.system('true')\n"}, {}
    )
    evil.export(tmp_path / "evil.tar")
    with pytest.raises(CacheTrustError, match="refused"):
        run("import", str(tmp_path / "evil.tar"))
    (tmp_path / "noise.tar").write_bytes(b"noise" * 200)
    with pytest.raises(CacheError, match="not a whole archive"):
        run("import", str(tmp_path / "noise.tar"))
    with tarfile.open(tmp_path / "path.tar", "w") as out:
        out.addfile(tarfile.TarInfo("../evil.py"))
    with pytest.raises(CacheTrustError, match=r"\.\./evil\.py"):
        run("import", str(tmp_path / "path.tar"))
    with pytest.raises(CacheError, match=r"none\.tar"):
        run("import", str(tmp_path / "none.tar"))
    assert "2 entries" in run("list")


def test_changes_need_mode_rw(directory, monkeypatch):
    monkeypatch.setenv("NMM_CACHE", "ro")
    for command in (["prune"], ["clear", "--yes"], ["import", "x.tar"]):
        with pytest.raises(CacheError, match="NMM_CACHE=rw"):
            run(*command)
    assert "2 entries" in run("list")


@pytest.mark.parametrize(
    "command", ["list", "show", "explain", "verify", "prune", "clear", "export", "import"]
)
def test_help_has_an_example(command):
    shown = run(command, "--help")
    assert f"nmm cache {command}" in shown
    assert "Example" in shown


def test_verify_rebuilds_real_kernels(tmp_path, monkeypatch):
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
    assert "-kernel.py: # lie" in shown
    store.prune(0)
    other = Key.make({**entry.key.to_dict(), "version": "0.0.0"})
    store.get_or_build(other, lambda: entry.files, entry.meta)
    assert "1 skipped" in run("verify")
