"""The shared store: read-through, explicit push, and no trust in what lies there."""

import contextlib
import http.server
import io
import os
import threading
import time
import warnings

import fsspec
import pytest
from cache_helpers import Builder, key_of

from nmm_compiler.cache import archive, remote as remote_module
from nmm_compiler.cache.disk import FOLDER
from nmm_compiler.cache.entry import make
from nmm_compiler.cache.remote import Remote
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheError, CacheWarning


class Handler(http.server.BaseHTTPRequestHandler):
    """GET of objects held in memory; the server's `status` is answered instead of theirs."""

    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        time.sleep(server.seconds)
        data = server.objects.get(self.path)
        status = server.status or (200 if data is not None else 404)
        self.send_response(status)
        body = data if status == 200 else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the reader gave up, as it should
            self.wfile.write(body[: server.cut])

    def log_message(self, *args):
        """Keep stderr quiet."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.objects, running.asked = {}, []
        running.status, running.cut, running.seconds = None, None, 0.0
        running.url = f"http://127.0.0.1:{running.server_port}/kernels"
        for number in range(3):
            path = f"/kernels/{FOLDER}/{key_of(number).digest}.tar"
            running.objects[path] = _object({"kernel.py": f"y = {number}\n"}, number)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    fsspec.filesystem("memory").store.clear()
    return "memory://team/kernels" if request.param == "memory" else f"file://{tmp_path}/shared"


def _object(files, *numbers):
    out = io.BytesIO()
    archive.pack(out, [make(key_of(n), files, {"n": n}) for n in numbers])
    return out.getvalue()


def _filled(tmp_path, url):
    store = Store(tmp_path / "source", remote=url)
    for number in range(3):
        store.get_or_build(key_of(number), Builder(f"y = {number}\n"), {"n": number})
    return store


def _put(url, data):
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(f"{path}/{FOLDER}", exist_ok=True)
    filesystem.pipe_file(f"{path}/{FOLDER}/{key_of(1).digest}.tar", data)


def test_push_is_explicit_and_reading_goes_through(tmp_path, url):
    source = _filled(tmp_path, url)
    assert (source.push(), source.push()) == (3, 0)
    build = Builder()
    reader = Store(tmp_path / "b", remote=url)
    entry = reader.get_or_build(key_of(1), build)
    assert build.calls == 0
    assert (entry.files, entry.meta) == ({"kernel.py": "y = 1\n"}, {"n": 1})
    assert entry.path.is_relative_to(tmp_path / "b")
    # From now on without the shared store.
    assert Store(tmp_path / "b").get(key_of(1)).files == entry.files
    assert Store(tmp_path / "b").get(key_of(2)) is None
    filesystem, path = fsspec.core.url_to_fs(url)
    names = [name.rpartition("/")[2] for name in filesystem.ls(f"{path}/{FOLDER}", detail=False)]
    assert sorted(names) == sorted(f"{key_of(n).digest}.tar" for n in range(3))


def test_push_replaces_a_damaged_object(tmp_path, url):
    _put(url, b"half an upl")
    assert _filled(tmp_path, url).push() == 3
    assert Remote(url).get(key_of(1).digest).files == {"kernel.py": "y = 1\n"}


@pytest.mark.parametrize("mode", ["ro", "require"])
def test_reading_modes_use_the_shared_store_and_write_nothing(tmp_path, url, mode, monkeypatch):
    """The shared store may be declared by the environment."""
    _filled(tmp_path, url).push()
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("NMM_CACHE", mode)
    monkeypatch.setenv("NMM_REMOTE_CACHE", url)
    store, build = Store.open(), Builder()
    assert store.get_or_build(key_of(1), build).files == {"kernel.py": "y = 1\n"}
    assert store.get(key_of(1)) is store.get(key_of(1))
    assert build.calls == 0
    assert not (tmp_path / "none").exists()


def _not_taken(tmp_path, url, match):
    store, build = Store(tmp_path / "victim", remote=url), Builder("built = 1\n")
    with pytest.warns(CacheWarning, match=match):
        entry = store.get_or_build(key_of(1), build)
    assert build.calls == 1
    assert entry.files == {"kernel.py": "built = 1\n"}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"half an upload", "not a whole archive"),
        (_object({"kernel.py": "y = 1\n"}, 1)[:-9000], "not a whole archive"),
        (_object({"kernel.py": "y = 1\n"}, 1).replace(b"y = 1", b"y = 2"), "sha256"),
        (_object({"kernel.py": "evil"}, 2), "does not hold that one"),
        (_object({"kernel.py": "evil"}, 1, 2), "does not hold that one"),
        (_object({"kernel.py": "import os\nos.system('x')\n"}, 1), "at the top level|import of os"),
    ],
)
def test_objects_that_are_not_the_entry_or_not_a_kernel(tmp_path, url, data, match):
    _put(url, data)
    _not_taken(tmp_path, url, match)


def test_it_is_asked_only_for_a_miss_and_only_where_it_is_declared(tmp_path, server):
    Store(tmp_path / "a").get_or_build(key_of(1), Builder())
    assert server.asked == []
    store = Store(tmp_path / "b", remote=server.url)
    for _ in range(3):
        assert store.get(key_of(1)).files == {"kernel.py": "y = 1\n"}
    assert Store(tmp_path / "b", remote=server.url).get(key_of(1))
    assert len(server.asked) == 1
    assert store.get(key_of(9), remote=False) is None
    with warnings.catch_warnings(action="error"):
        assert store.get(key_of(9)) is None  # 404: no word
    assert len(server.asked) == 2
    with pytest.raises(CacheError, match="NMM_REMOTE_CACHE"):
        Store(tmp_path / "b").push()


@pytest.mark.parametrize(
    "fault", [{"status": 403}, {"status": 500}, {"cut": 700}, {"seconds": 1.0}]
)
def test_a_failing_server_costs_one_warning_and_three_requests(
    tmp_path, server, fault, monkeypatch
):
    """A timeout costs seconds, so there is only one."""
    monkeypatch.setattr(remote_module, "ENTRY_SECONDS", 0.2)
    vars(server).update(fault)
    store, build = Store(tmp_path / "b", remote=server.url), Builder()
    with pytest.warns(CacheWarning, match="nothing was taken") as caught:
        found = [store.get_or_build(key_of(number), build).files for number in range(5)]
    assert all(found)
    assert len(caught) == 1
    assert build.calls == 5
    assert len(server.asked) == (1 if "seconds" in fault else 3)


def test_urls_of_nothing_are_said_without_their_passwords(tmp_path):
    store = Store(tmp_path / "b", remote="nosuch://user:secret@host/x")
    with pytest.warns(CacheWarning, match="nosuch") as caught:
        assert store.get_or_build(key_of(1), Builder()).files
    assert "secret" not in str(caught[0].message) + str(store)
    assert "***@host/x" in str(store)
    with pytest.raises(CacheError, match="#minisign"):
        Store(tmp_path / "b", remote="s3://bucket/kernels#minisign=RWQ")


def test_a_fifo_and_a_directory_that_is_not_there(tmp_path):
    shared = tmp_path / "shared" / FOLDER
    shared.mkdir(parents=True)
    os.mkfifo(shared / f"{key_of(1).digest}.tar")
    _not_taken(tmp_path, f"file://{tmp_path}/shared", "not a regular file")
    store = Store(tmp_path / "c", remote=f"file://{tmp_path}/absent")
    with pytest.warns(CacheWarning, match="absent"):
        assert store.get(key_of(1)) is None
    shared_store = Store(tmp_path / "c", remote=f"file://{tmp_path}/shared")
    with warnings.catch_warnings(action="error"):
        assert shared_store.get(key_of(2)) is None  # the directory is there, the entry is not
