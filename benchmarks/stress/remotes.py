"""Remote levels that fail, against real local HTTP and S3 servers on 127.0.0.1.

Each fault gets a store of its own, which is asked for five kernels. Right: every kernel is there
and exact (built here, or read where the fault still lets it through), the server was asked three
times at most when nothing can be read, with one warning, within the deadlines. The S3 part needs
moto's server and s3fs; where they are absent it says so.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import logging
import os
import random
import shutil
import socketserver
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stress.tally import Tally

KEYS = 5
ENTRY_SECONDS = 1.0  # the deadline of an entry in these attempts; a user's is ten times longer
MAX_SECONDS = 3 * ENTRY_SECONDS + 2.0


@dataclass(frozen=True)
class Fault:
    """A fault: its name, what the server does, and whether kernels can still be read."""

    name: str
    answer: Callable[[Any, bytes], None]
    readable: bool = False
    warns: bool = True


def _status(code: int) -> Callable[[Any, bytes], None]:
    def answer(handler: Any, data: bytes) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def _send(handler: Any, data: bytes, length: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def _close(handler: Any, data: bytes) -> None:
    handler.close_connection = True


def _cut(handler: Any, data: bytes) -> None:
    _send(handler, data[: len(data) // 2], len(data))
    handler.close_connection = True


def _drip(handler: Any, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for index in range(40):
        handler.wfile.write(data[index : index + 1])
        handler.wfile.flush()
        time.sleep(0.1)


def _hang(handler: Any, data: bytes) -> None:
    time.sleep(2 * ENTRY_SECONDS)
    handler.close_connection = True


def _endless(handler: Any, data: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1600):  # 100 MiB, over what an entry may have
        handler.wfile.write(bytes(1 << 16))


def _flip(handler: Any, data: bytes) -> None:
    changed = bytearray(data)
    changed[len(changed) // 3] ^= 4
    _send(handler, bytes(changed))


def _loop(handler: Any, data: bytes) -> None:
    handler.send_response(302)
    handler.send_header("Location", handler.path)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _noise(handler: Any, data: bytes) -> None:
    handler.wfile.write(b"\xff\x00 no HTTP at all\r\n\r\n")
    handler.close_connection = True


HTTP = (
    Fault("500", _status(500)), Fault("503", _status(503)), Fault("403", _status(403)),
    Fault("404 for all", _status(404), warns=False), Fault("closed at once", _close),
    Fault("cut", _cut), Fault("dripping", _drip), Fault("hanging", _hang),
    Fault("endless", _endless), Fault("one bit flipped", _flip),
    Fault("a page for every path", lambda handler, data: _send(handler, b"<html>hello</html>")),
    Fault("redirects in a circle", _loop), Fault("not HTTP", _noise),
    Fault("none", lambda handler, data: _send(handler, data), readable=True, warns=False),
)  # fmt: skip


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        digest = self.path.rpartition("/")[2]
        server.asked.append(digest)
        with contextlib.suppress(ConnectionError):  # the reader gave up, as it should
            server.fault.answer(self, server.objects.get(digest, b"x" * 2000))

    def log_message(self, *args: object) -> None:
        """Keep stderr quiet."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that goes away is no error of the server's."""


def _text(number: int) -> str:
    return f"y = {number}\n"


def _keys() -> list[Any]:
    from nmm_compiler.cache.key import Key

    return [Key.make({"number": number}) for number in range(KEYS)]


def _objects(folder: Path) -> dict[str, bytes]:
    """Return the objects of a remote level, by name."""
    from nmm_compiler.cache import archive
    from nmm_compiler.cache.store import Store

    store = Store(folder / "source")
    made = {}
    for number, key in enumerate(_keys()):
        entry = store.get_or_build(key, lambda n=number: {"kernel.py": _text(n)})
        made[f"{key.digest}.tar"] = archive.pack_one(entry)
    return made


def _ask(url: str, directory: Path) -> tuple[int, int, list[str], float, bool]:
    """Return (built here, failures, warnings, seconds, exact) of asking for every key."""
    from nmm_compiler.cache.store import Store

    built: list[int] = []
    exact = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.monotonic()
        store = Store(directory, remote=url, check=lambda name, text: None)
        for number, key in enumerate(_keys()):

            def build(n: int = number) -> dict[str, str]:
                built.append(n)
                return {"kernel.py": _text(n)}

            exact &= store.get_or_build(key, build).files == {"kernel.py": _text(number)}
        seconds = time.monotonic() - start
    said = [str(w.message) for w in caught if "remote cache" in str(w.message)]
    return len(built), store._remote_failures, said, seconds, exact


def _judge(fault: Fault, url: str, folder: Path, tally: Tally, asked: list[str] | None) -> None:
    tally.attempts += 1
    directory = Path(tempfile.mkdtemp(dir=folder))
    try:
        built, failures, said, seconds, exact = _ask(url, directory / "cache")
    except Exception as error:
        tally.tracebacks += 1
        tally.examples.append(f"{fault.name}: {type(error).__name__}: {error!s:.200}")
        return
    refused = all(line.startswith("not taken from the remote cache") for line in said)
    warned = len(said) == 1 or (refused and len(said) == 3) if fault.warns else not said
    stopped = failures >= 3 if fault.warns else failures == 0
    few = asked is None or len(asked) <= (33 if fault.name.startswith("redirects") else KEYS)
    if fault.warns and asked is not None and not fault.name.startswith("redirects"):
        few = len(asked) <= 3
    if not exact or (built == 0) != fault.readable:
        tally.wrong += 1
    elif warned and stopped and few and seconds <= MAX_SECONDS:
        tally.right += 1
        return
    tally.examples.append(
        f"{fault.name}: exact {exact}, {built} built, {failures} failures, {len(said)} warnings "
        f"{said[:1]}, {len(asked or ())} requests, {seconds:.1f} s"[:500]
    )


def attempt(count: int, seed: int) -> Tally:
    """Make at least `count` attempts: every fault of HTTP, of files and of S3 equally often."""
    from nmm_compiler.cache import remote

    tally, drawn = Tally(), random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="nmm-stress-remotes-"))
    objects = _objects(folder)
    usual, remote.ENTRY_SECONDS = remote.ENTRY_SECONDS, ENTRY_SECONDS
    try:
        with contextlib.ExitStack() as open_servers:
            attempts = [*_http(objects, open_servers), *_files(folder), *_s3(objects, open_servers)]
            times = -(-count // len(attempts))  # every fault, however small the count
            todo = attempts * times
            drawn.shuffle(todo)
            for fault, url, asked in todo:
                if asked is not None:
                    asked.clear()
                _judge(fault, url, folder, tally, asked)
    finally:
        remote.ENTRY_SECONDS = usual
        shutil.rmtree(folder, ignore_errors=True)
    return tally


_Attempt = tuple[Fault, str, list[str] | None]


def _http(objects: dict[str, bytes], open_servers: contextlib.ExitStack) -> Iterator[_Attempt]:
    for fault in HTTP:
        server: Any = open_servers.enter_context(_Server(("127.0.0.1", 0), _Handler))
        server.fault, server.objects, server.asked = fault, objects, []
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        open_servers.callback(server.shutdown)
        yield fault, f"http://127.0.0.1:{server.server_port}/kernels", server.asked
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as closed:
        port = closed.server_address[1]
    yield Fault("nobody listens", _close), f"http://127.0.0.1:{port}/kernels", None


def _files(folder: Path) -> Iterator[_Attempt]:
    fifos = folder / "fifos" / "v1"
    fifos.mkdir(parents=True)
    for key in _keys():
        os.mkfifo(fifos / f"{key.digest}.tar")
    yield Fault("FIFOs", _close), f"file://{fifos.parent}", None
    yield Fault("a directory that is not there", _close), f"file://{folder}/absent", None


def _s3(objects: dict[str, bytes], open_servers: contextlib.ExitStack) -> Iterator[_Attempt]:
    if not all(importlib.util.find_spec(name) for name in ("moto", "s3fs", "flask")):
        print("remotes: the S3 part is skipped; it needs moto[server] and s3fs (docs/cache.md)")
        return
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request else
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    open_servers.callback(server.stop)
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    settings = {"key": "x", "secret": "y", "endpoint_url": endpoint}
    fsspec.config.conf["s3"] = settings  # as a user's ~/.config/fsspec would say
    filesystem = fsspec.filesystem("s3", **settings)
    filesystem.mkdir("whole")
    filesystem.mkdir("empty")
    filesystem.mkdir("damaged")
    for name, data in objects.items():
        filesystem.pipe_file(f"whole/kernels/v1/{name}", data)
        filesystem.pipe_file(f"damaged/kernels/v1/{name}", data[:-700])
    yield Fault("S3, whole", _close, readable=True, warns=False), "s3://whole/kernels", None
    yield Fault("S3, empty bucket", _close, warns=False), "s3://empty/kernels", None
    yield Fault("S3, no such bucket", _close), "s3://missing/kernels", None
    yield Fault("S3, damaged objects", _close), "s3://damaged/kernels", None
