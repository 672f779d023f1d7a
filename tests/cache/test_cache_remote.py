"""The second level: read-through, explicit push, and no trust in what lies there."""

from __future__ import annotations

import http.server
import io
import os
import stat
import threading
import time
import types
import urllib.error
import urllib.request
import warnings

import fsspec
import pytest
from cache_helpers import Builder, key_of

from nmm_compiler.cache import archive
from nmm_compiler.cache import remote as remote_module
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.remote import Remote
from nmm_compiler.cache.signing import Signer
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheError, CacheWarning


def accept(name: str, text: str) -> None:
    """A check that has nothing against any source."""


# A file server on this machine, and the fsspec filesystem that speaks to it.


class Handler(http.server.BaseHTTPRequestHandler):
    """GET, HEAD and PUT of objects held in memory; `faults` maps a path to a status to answer."""

    def do_GET(self):
        server = self.server
        server.asked.append((self.command, self.path))
        data = server.objects.get(self.path)
        status = server.faults.get(self.path, 200 if data is not None else 404)
        self.send_response(status)
        body = data if status == 200 else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: server.cut])

    do_HEAD = do_GET

    def do_PUT(self):
        self.server.asked.append((self.command, self.path))
        self.server.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Keep stderr quiet."""


class Served(fsspec.AbstractFileSystem):
    """`served://host:port/path`: whole objects over HTTP, with the standard library only."""

    protocol = "served"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("served://").rstrip("/")

    def _open(self, path, mode="rb", **kwargs):
        try:
            with urllib.request.urlopen(f"http://{self._strip_protocol(path)}", timeout=10) as got:
                return io.BytesIO(got.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise FileNotFoundError(path) from error
            raise

    def pipe_file(self, path, value, **kwargs):
        request = urllib.request.Request(
            f"http://{self._strip_protocol(path)}", data=value, method="PUT"
        )
        urllib.request.urlopen(request, timeout=10).close()

    def makedirs(self, path, exist_ok=False):
        """An object store has none."""


fsspec.register_implementation("served", Served, clobber=True)


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.objects, running.faults, running.asked, running.cut = {}, {}, [], None
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(params=["memory", "file", "served"])
def url(request, tmp_path):
    if request.param == "memory":
        filesystem = fsspec.filesystem("memory")
        filesystem.store.clear()
        return "memory://team/kernels"
    if request.param == "file":
        return f"file://{tmp_path}/shared/kernels"
    running = request.getfixturevalue("server")
    return f"served://127.0.0.1:{running.server_port}/kernels"


def _filled(tmp_path, url, count=3):
    store = Store(tmp_path / "source", remote=url, check=accept)
    for number in range(count):
        store.get_or_build(key_of(number), Builder(f"y = {number}\n"), {"n": number})
    return store


def _put(url, digest, data):
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(f"{path}/v1", exist_ok=True)
    filesystem.pipe_file(f"{path}/v1/{digest}.tar", data)


def _read(url, digest):
    filesystem, path = fsspec.core.url_to_fs(url)
    with filesystem.open(f"{path}/v1/{digest}.tar", "rb") as source:
        return source.read()


def test_push_is_explicit_and_reading_goes_through(tmp_path, url):
    source = _filled(tmp_path, url)
    assert Store(tmp_path / "a", remote=url, check=accept).get(key_of(1)) is None
    pushed = source.push()
    assert (len(pushed.sent), len(pushed.present)) == (3, 0)
    assert len(source.push().present) == 3
    build = Builder()
    reader = Store(tmp_path / "b", remote=url, check=accept)
    entry = reader.get_or_build(key_of(1), build)
    assert build.calls == 0
    assert entry.files == {"kernel.py": "y = 1\n"}
    assert entry.meta == {"n": 1}
    assert entry.path.is_relative_to(tmp_path / "b")
    # From now on without the remote level.
    assert Store(tmp_path / "b").get(key_of(1)).files == entry.files
    assert Store(tmp_path / "b").get(key_of(2)) is None


def test_push_of_one_and_repair_of_a_damaged_object(tmp_path, url):
    source = _filled(tmp_path, url)
    assert len(source.push(key_of(1).digest[:16]).sent) == 1
    _put(url, key_of(1).digest, b"half an upl")
    assert source.push().sent == tuple(
        i.digest for i in source.list() if i.digest in {key_of(n).digest for n in range(3)}
    )
    assert Remote(url).get(key_of(1).digest).files == {"kernel.py": "y = 1\n"}


@pytest.mark.parametrize("mode", ["ro", "require"])
def test_reading_modes_use_the_remote_level_and_write_nothing(tmp_path, url, mode):
    _filled(tmp_path, url).push()
    store, build = Store(tmp_path / "none", mode, remote=url, check=accept), Builder()
    assert store.get_or_build(key_of(1), build).files == {"kernel.py": "y = 1\n"}
    assert store.get(key_of(1)) is store.get(key_of(1))
    assert build.calls == 0
    assert not (tmp_path / "none").exists()
    assert store.explain(key_of(2)).where == "remote"


def _not_taken(tmp_path, url, match, check=accept):
    store, build = Store(tmp_path / "victim", remote=url, check=check), Builder("built = 1\n")
    with pytest.warns(CacheWarning, match=match):
        entry = store.get_or_build(key_of(1), build)
    assert build.calls == 1
    assert entry.files == {"kernel.py": "built = 1\n"}
    store.clear()


def test_flips_all_over_an_object_give_the_entry_or_a_refusal(tmp_path):
    source = _filled(tmp_path, "memory://flips")
    source.push()
    data = _read("memory://flips", key_of(1).digest)
    used = 2 * 512 + 2 * 512 + 512  # two headers, the manifest's blocks, the source's block
    refused = 0
    for position in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        _put("memory://flips", key_of(1).digest, bytes(flipped))
        try:
            entry = Remote("memory://flips").get(key_of(1).digest)
        except CacheError:
            refused += 1
        else:
            assert entry.files == {"kernel.py": "y = 1\n"}  # the flip hit padding
            assert entry.manifest == source.get(key_of(1)).manifest
    assert refused > used // 5 // 3


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not a whole tar"),
        (b"half an upload", "not a whole tar"),
        (archive.pack_one(make(key_of(2), {"kernel.py": "evil"}, {})), "does not hold that one"),
    ],
)
def test_objects_that_are_not_the_entry(tmp_path, url, data, match):
    _put(url, key_of(1).digest, data)
    _not_taken(tmp_path, url, match)


def test_two_entries_in_one_object(tmp_path, url):
    out = io.BytesIO()
    archive.pack([make(key_of(n), {"kernel.py": "evil"}, {}) for n in (1, 2)], out)
    _put(url, key_of(1).digest, out.getvalue())
    _not_taken(tmp_path, url, "does not hold that one")


def test_an_entry_that_the_check_refuses(tmp_path, url):
    evil = make(key_of(1), {"kernel.py": "tile = 9999\n", "notes.txt": "?"}, {})
    _put(url, key_of(1).digest, archive.pack_one(evil))
    seen = []

    def check(name, text):
        seen.append(name)
        if "9999" in text:
            raise ValueError("line 1: a tile of 9999")

    _not_taken(tmp_path, url, "a tile of 9999", check)
    assert seen == ["kernel.py"]


def test_an_entry_that_is_more_than_a_kernel(tmp_path, url):
    evil = make(key_of(1), {"kernel.py": "import os\nos.system('x')\n"}, {})
    _put(url, key_of(1).digest, archive.pack_one(evil))
    _not_taken(tmp_path, url, "line 2: code at the top level|line 1: import of os")


def test_without_a_check_nothing_is_taken(tmp_path, url):
    _filled(tmp_path, url).push()
    _not_taken(tmp_path, url, "nobody gave a check", check=None)


def test_an_undeclared_url_is_never_asked(tmp_path, server):
    url = f"served://127.0.0.1:{server.server_port}/kernels"
    _filled(tmp_path, url).push()
    server.asked.clear()
    Store(tmp_path / "b", check=accept).get_or_build(key_of(1), Builder())
    assert server.asked == []
    with pytest.raises(CacheError, match="NMM_REMOTE_CACHE"):
        Store(tmp_path / "b").push()


def test_a_hit_at_hand_does_not_ask_the_remote_level(tmp_path, server):
    url = f"served://127.0.0.1:{server.server_port}/kernels"
    _filled(tmp_path, url).push()
    server.asked.clear()
    store = Store(tmp_path / "b", remote=url, check=accept)
    for _ in range(3):
        store.get(key_of(1))
    assert Store(tmp_path / "b", remote=url, check=accept).get(key_of(1))
    assert len(server.asked) == 1


def test_a_failing_server_costs_one_warning_and_three_requests(tmp_path, server):
    url = f"served://127.0.0.1:{server.server_port}/kernels"
    for number in range(10):
        server.faults[f"/kernels/v1/{key_of(number).digest}.tar"] = 500
    store = Store(tmp_path / "b", remote=url, check=accept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(10):
            assert store.get_or_build(key_of(number), Builder()).files
    assert len(caught) == 1
    assert "500" in str(caught[0].message)
    assert len(server.asked) == 3


def test_a_cut_transfer(tmp_path, server):
    url = f"served://127.0.0.1:{server.server_port}/kernels"
    _filled(tmp_path, url).push()
    server.cut = 700
    _not_taken(tmp_path, url, "kernels are built here|not a whole tar")


def test_a_url_of_an_unknown_filesystem(tmp_path):
    store = Store(tmp_path / "b", remote="nosuchprotocol://x/y", check=accept)
    with pytest.warns(CacheWarning, match="nosuchprotocol"):
        assert store.get_or_build(key_of(1), Builder()).files


def test_passwords_do_not_reach_messages(tmp_path):
    store = Store(tmp_path / "b", remote="nosuch://user:secret@host/x", check=accept)
    with pytest.warns(CacheWarning) as caught:
        store.get(key_of(1))
    assert "secret" not in str(caught[0].message) + str(store)
    assert "***@host/x" in str(store)


def test_a_pushed_file_is_whole_or_absent(tmp_path):
    """A directory as remote level is written through a rename, as others may read meanwhile."""
    url = f"file://{tmp_path}/shared"
    _filled(tmp_path, url).push()
    names = sorted(os.listdir(tmp_path / "shared" / "v1"))
    assert names == sorted(f"{key_of(n).digest}.tar" for n in range(3))
    assert all(stat.S_ISREG((tmp_path / "shared" / "v1" / n).stat().st_mode) for n in names)


def test_the_environment_declares_it(tmp_path, monkeypatch, url):
    _filled(tmp_path, url).push()
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("NMM_REMOTE_CACHE", url)
    build = Builder()
    assert Store.open(check=accept).get_or_build(key_of(1), build).files
    assert build.calls == 0


def test_http_is_read_without_another_package_and_its_faults_are_said(tmp_path, server):
    """fsspec's own HTTP files answer 403 and 500 with FileNotFoundError: a silent miss."""
    _filled(tmp_path, f"served://127.0.0.1:{server.server_port}/kernels").push()
    url = f"http://127.0.0.1:{server.server_port}/kernels"
    build = Builder()
    assert Store(tmp_path / "b", remote=url, check=accept).get_or_build(key_of(1), build).files
    assert build.calls == 0
    assert Store(tmp_path / "b", remote=url, check=accept).get(key_of(9)) is None  # 404: no word
    for status in (403, 500):
        server.faults = {f"/kernels/v1/{key_of(n).digest}.tar": status for n in range(10)}
        server.asked.clear()
        store = Store(tmp_path / f"c{status}", remote=url, check=accept)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CacheWarning)
            for number in range(10):
                assert store.get_or_build(key_of(number), Builder()).files
        said = [w for w in caught if w.category is CacheWarning]
        assert len(said) == 1
        assert str(status) in str(said[0].message)
        assert len(server.asked) == 3


def test_a_reader_that_hangs_meets_the_deadlines(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "ENTRY_SECONDS", 0.05)
    let_go = threading.Event()
    asked = []

    class Hanging(Served):
        def _open(self, path, mode="rb", **kwargs):
            asked.append(path)
            let_go.wait(20)
            raise FileNotFoundError(path)

    fsspec.register_implementation("hanging", Hanging, clobber=True)
    store = Store(tmp_path / "b", remote="hanging://x/y", check=accept)
    start = time.monotonic()
    with pytest.warns(CacheWarning, match="TimeoutError") as caught:
        found = [store.get_or_build(key_of(number), Builder()).files for number in range(10)]
    assert all(found)
    assert len(caught) == 1
    assert "not asked again" in str(caught[0].message)
    assert len(asked) == 1  # one timeout, however many kernels
    assert time.monotonic() - start < 10
    let_go.set()


def test_a_slow_remote_has_a_budget_for_the_process(tmp_path, monkeypatch, url):
    from nmm_compiler.cache import levels

    _filled(tmp_path, url).push()
    seconds = iter(range(0, 1000, 3))  # every entry takes three seconds
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(levels, "time", clock)
    monkeypatch.setattr(levels, "REMOTE_SECONDS", 3.0)
    store = Store(tmp_path / "b", remote=url, check=accept)
    with pytest.warns(CacheWarning, match="is slow: 4 s were lost to it") as caught:
        found = [store._get_remote(key_of(number)) is not None for number in range(3)]
    assert found == [True, True, False]
    assert len(caught) == 1


def test_a_fifo_and_a_directory_that_is_not_there(tmp_path):
    (tmp_path / "shared" / "v1").mkdir(parents=True)
    os.mkfifo(tmp_path / "shared" / "v1" / f"{key_of(1).digest}.tar")
    _not_taken(tmp_path, f"file://{tmp_path}/shared", "not a regular file")
    store = Store(tmp_path / "c", remote=f"file://{tmp_path}/absent", check=accept)
    with pytest.warns(CacheWarning, match="absent is no directory"):
        assert store.get(key_of(1)) is None
    shared = Store(tmp_path / "c", remote=f"file://{tmp_path}/shared", check=accept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shared.get(key_of(2)) is None  # the directory is there, the entry is not


def test_a_remote_that_requires_signatures(tmp_path, url):
    minisign = pytest.importorskip("minisign")
    pair, other = minisign.KeyPair.generate(), minisign.KeyPair.generate()
    (tmp_path / "key").write_bytes(bytes(pair.secret_key))
    keys = [k.public_key.to_base64().decode() for k in (pair, other)]
    _filled(tmp_path, url).push()
    _not_taken(tmp_path, f"{url}#minisign={keys[0]}", "not signed and a signature is required")
    store = Store(tmp_path / "source", remote=f"{url}#minisign={keys[0]}", check=accept)
    assert len(store.push(signer=Signer(tmp_path / "key")).sent) == 3  # the unsigned are replaced
    _not_taken(tmp_path, f"{url}#minisign={keys[1]}", "not signed by a key that is trusted")
    build = Builder()
    for number, given in enumerate((keys[0], ",".join(reversed(keys)))):
        store = Store(tmp_path / f"d{number}", remote=f"{url}#minisign={given}", check=accept)
        assert store.get_or_build(key_of(1), build).files
        assert "minisign" not in str(store.remote)
    assert build.calls == 0
    with pytest.raises(CacheError, match="no minisign public key"):
        Store(tmp_path / "e", remote=f"{url}#minisign=RWnonsense", check=accept)
