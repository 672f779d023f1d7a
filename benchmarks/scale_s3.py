"""One remote cache on S3, read and written by processes that are killed, behind a faulty network.

    8 processes, 4 on each of 2 cache directories -> proxy that fails -> moto's S3 server

Each process asks for every kernel, builds what it does not find, and pushes what it has.
The proxy answers some requests with 500, some not at all, and cuts some bodies short. A process is
killed now and then and started again. Counted at the end:

    lost         kernels that a reader without faults does not find at the remote level
    torn         objects that are not whole, entries on disk that are damaged, wrong texts served
    duplicated   kernels that one directory built again after a process had them

This file is also the program of the processes.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEYS = 24
PROCESSES = 8
DIRECTORIES = 2
KILLS = 10
ENTRY_SECONDS = 1.5  # the deadline of an entry here; a user's is 10 s
FAULTY = 0.08  # of the requests, for each kind of fault


def key_of(number: int) -> Any:
    from nmm_compiler.cache.key import Key

    return Key.make({"scale": number})


def text_of(number: int) -> str:
    return f"y = {number}\n" * 50


def accept(name: str, text: str) -> None:
    """Take any source: the store's own check of its shape still runs."""


class _Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.guard:
            kind = server.drawn.random() if server.faulty else 1.0
        if FAULTY <= kind < 2 * FAULTY:
            server.counts["no answer"] += 1
            time.sleep(2 * ENTRY_SECONDS)
            self.close_connection = True
            return
        if kind < FAULTY:
            server.counts["500"] += 1
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        onward = http.client.HTTPConnection(*server.onward, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        onward.request(self.command, self.path, body=body, headers=headers)
        answer = onward.getresponse()
        data = answer.read()
        server.counts["answered"] += 1
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if 2 * FAULTY <= kind < 3 * FAULTY and self.command == "GET" and len(data) > 1:
            server.counts["truncated"] += 1
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(data)
        onward.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Keep stderr quiet."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error of the proxy's."""


@contextlib.contextmanager
def served(seed: int) -> Iterator[tuple[Any, str]]:
    """Yield (proxy, URL of S3 behind it), with an empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    s3.start()
    proxy: Any = _Server(("127.0.0.1", 0), _Proxy)
    proxy.onward, proxy.drawn, proxy.guard = s3.get_host_and_port(), random.Random(seed), None
    proxy.guard, proxy.counts = threading.Lock(), Counter()
    proxy.faulty = False
    threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield proxy, f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        s3.stop()


def open_store(directory: str, endpoint: str, url: str) -> Any:
    """Return a store whose remote level is S3 at the endpoint."""
    import fsspec

    from nmm_compiler.cache import remote
    from nmm_compiler.cache.store import Store

    remote.ENTRY_SECONDS = ENTRY_SECONDS
    fsspec.config.conf["s3"] = {"key": "x", "secret": "y", "endpoint_url": endpoint}
    return Store(directory, remote=url, check=accept)


def work(directory: str, endpoint: str, url: str, log: str, seed: int) -> None:
    """Be one process: read or build every kernel, push, again; write a line for each build."""
    warnings.simplefilter("ignore")
    numbers = list(range(KEYS))
    random.Random(seed).shuffle(numbers)
    store = open_store(directory, endpoint, url)
    with open(log, "a", buffering=1) as lines:
        built: list[int] = []

        def build(number: int) -> dict[str, str]:
            time.sleep(0.02)
            built.append(number)
            return {"kernel.py": text_of(number)}

        for i, number in enumerate(numbers):
            entry = store.get_or_build(key_of(number), functools.partial(build, number))
            if built:  # and published: a process that is killed before writes no line
                lines.write(json.dumps({"built": built.pop()}) + "\n")
            if entry.files != {"kernel.py": text_of(number)}:
                lines.write(json.dumps({"wrong": number}) + "\n")
            if i % 8 == 7:
                push(store, numbers[i - 7 : i + 1])
    parent = os.getppid()
    while not push(store, numbers) and os.getppid() == parent:
        time.sleep(0.05)


def push(store: Any, numbers: list[int]) -> bool:
    """Send kernels one by one; drop those that are there from `numbers`; False if any is left."""
    for number in list(numbers):
        try:
            store.push(key_of(number).digest)
        except Exception:  # whatever the filesystem raised: the next call tries again
            continue
        numbers.remove(number)
    return not numbers


def run(seed: int = 0) -> dict[str, Any]:
    """Return the counts of one run, and how many processes were killed and faults were met."""
    import fsspec

    from nmm_compiler.cache.store import Store

    drawn = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="nmm-scale-") as temporary, served(seed) as (
        proxy, endpoint,
    ):  # fmt: skip
        folder = Path(temporary)
        url = "s3://bucket/kernels"
        settings = {"key": "x", "secret": "y", "endpoint_url": endpoint}
        files = fsspec.filesystem("s3", **settings)
        files.mkdir("bucket")
        proxy.faulty = True
        killed = _processes(folder, endpoint, url, drawn)
        proxy.faulty = False
        files.invalidate_cache()
        reader = open_store(str(folder / "reader"), endpoint, url)
        lost = sum(reader.get(key_of(number)) is None for number in range(KEYS))
        lines = [json.loads(line) for p in folder.glob("log*") for line in _whole_lines(p)]
        torn = sum("wrong" in line for line in lines)
        stores = [Store(folder / f"host{i}") for i in range(DIRECTORIES)]
        torn += sum(info.state != "ok" for store in stores for info in store.entries())
        lost += sum(KEYS - len(list(store.entries())) for store in stores)
        duplicated = 0
        for i in range(DIRECTORIES):
            built = Counter(
                line["built"]
                for p in folder.glob(f"log{i}-*")
                for line in map(json.loads, _whole_lines(p))
                if "built" in line
            )
            duplicated += sum(count - 1 for count in built.values())
        return {
            "killed": killed, "faults": dict(proxy.counts),
            "lost": lost, "torn": torn, "duplicated": duplicated,
        }  # fmt: skip


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _processes(folder: Path, endpoint: str, url: str, drawn: random.Random) -> int:
    """Run the processes to their ends, KILLS of them begun again; return how many were killed."""

    def start(i: int) -> subprocess.Popen[bytes]:
        directory = i % DIRECTORIES
        told = (str(folder / f"host{directory}"), endpoint, url,
                str(folder / f"log{directory}-{i}"), str(drawn.randrange(1 << 30)))  # fmt: skip
        env = {**os.environ, "AWS_MAX_ATTEMPTS": "2"}
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, __file__, *told], env=env, stdout=quiet, stderr=quiet
        )

    running = {i: start(i) for i in range(PROCESSES)}
    killed = 0
    last = time.monotonic()
    while running:
        time.sleep(0.05)
        for i, process in list(running.items()):
            if process.poll() is not None:
                if process.returncode == 0:
                    del running[i]
                else:
                    running[i] = start(i)
        if killed < KILLS and running and time.monotonic() - last > 1.0:
            victim = drawn.choice(list(running.values()))
            if victim.poll() is None and any(map(_whole_lines, folder.glob("log*"))):
                victim.send_signal(signal.SIGKILL)
                killed += 1
                last = time.monotonic()
    return killed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    work(*sys.argv[1:5], int(sys.argv[5]))
