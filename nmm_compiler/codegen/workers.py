"""Processes that run functions of this package, as a `concurrent.futures.Executor`.

A worker is this file as a program: it reads one JSON line per call, runs it and answers with a
line. Workers are started by command line and not forked, so they share neither threads nor the main
module with the caller. When one is killed, its call runs again in a new one. Functions take and
return text, so that any other executor with `submit` can run them too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor, as_completed
from typing import Any, Protocol

from nmm_compiler.errors import NmmError, WorkerError

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nmm_compiler.codegen.workers import serve; serve()"
)
Task = Callable[[str], str]
ATTEMPTS = 3
"""How often a call is begun whose worker dies each time."""


class Submits(Protocol):
    """What runs tasks: `submit(function, text)` returns a future of its text."""

    def submit(self, function: Task, text: str, /) -> Future[str]:
        """Return the future of `function(text)`."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class Workers(ThreadPoolExecutor):
    """`count` processes, each started by a thread when there is work for it."""

    def __init__(self, count: int) -> None:
        super().__init__(max(count, 1))
        self._processes: dict[int, subprocess.Popen[str]] = {}  # by the thread that started it
        self._stopped = False

    def submit(self, function: Task, text: str, /) -> Future[str]:  # type: ignore[override]
        """Return the future of `function(text)`; the function is one of a module of this package.

        The future raises BrokenExecutor where the worker died with the call.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        return super().submit(self._answer, json.dumps({"function": name, "text": text}))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the workers end after the calls that wait; with cancel_futures, now."""
        if cancel_futures:
            self._stopped = True
            for process in list(self._processes.values()):
                process.kill()  # entries of the cache are whole or absent
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            for thread in list(self._processes):
                self._end(thread)

    def __exit__(self, kind: Any, *error: Any) -> None:
        """End the workers after their calls, or at once where an error leaves the block."""
        self.shutdown(cancel_futures=kind is not None)

    def _answer(self, line: str) -> str:
        """Return what the worker of this thread answers; the next call replaces one that died."""
        thread = threading.get_ident()
        worker: Any = self._processes.get(thread) or self._start(thread)
        answer = ""
        with contextlib.suppress(OSError, ValueError):  # killed, and its pipe is closed
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        if not answer.endswith("\n"):
            self._end(thread)
            raise BrokenExecutor("a worker process ended within a call")
        told = json.loads(answer)
        if "error" in told:
            raise WorkerError(f"a worker process failed: {told['error']}")
        return str(told["text"])

    def _start(self, thread: int) -> Any:
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
        try:
            worker = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise WorkerError(
                f"a worker process failed: {type(error).__name__}: {error}"
            ) from error
        self._processes[thread] = worker
        if self._stopped:  # since `shutdown` looked
            worker.kill()
        return worker

    def _end(self, thread: int) -> None:
        worker: Any = self._processes.pop(thread)
        with contextlib.suppress(OSError), worker:  # leaving closes its pipes, and waits
            worker.stdin.close()


def serve() -> None:
    """Run the calls that standard input names, line by line, and print each result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    answers = sys.stdout
    sys.stdout = sys.stderr  # output of libraries is no answer
    for line in sys.stdin:
        told = json.loads(line)
        module, _, name = told["function"].partition(":")
        try:
            answer = {"text": getattr(importlib.import_module(module), name)(told["text"])}
        except Exception as error:  # told to the caller, who raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def run(
    executor: Submits, function: Task, texts: Sequence[str]
) -> Iterator[tuple[int, str | Exception]]:
    """Yield (index, result or exception) of `function` on every text, in the order of their ends.

    A call that the executor lost is begun ATTEMPTS times in all. Calls that have not begun are
    cancelled where the caller stops early.
    """
    waiting = {executor.submit(function, text): (i, 1) for i, text in enumerate(texts)}
    try:
        while waiting:
            for future in as_completed(list(waiting)):
                i, begun = waiting.pop(future)
                error = future.exception()
                if error is None:
                    yield i, future.result()
                elif not isinstance(error, Exception):
                    raise error
                elif isinstance(error, NmmError):
                    yield i, error
                elif begun >= ATTEMPTS:
                    yield (
                        i,
                        WorkerError(
                            f"each of {ATTEMPTS} workers ended within the same call ({error}); the "
                            "machine may be short of memory, so try fewer with jobs="
                        ),
                    )
                else:  # the executor's own error: its process or its machine has gone
                    waiting[executor.submit(function, texts[i])] = i, begun + 1
    finally:
        for future in waiting:
            future.cancel()
