"""Runs a command on a user's file in a process of its own, with limits on time and memory.

A kernel file is Python: it may loop for ever, fill the memory, end the process or crash it. The
command runs whole in a forked child, which prints, and answers with an exit code and a line for the
user. Whatever else happens to the child becomes one error line here. This protects from accidents.
It is no sandbox: the child may do everything that the user may do.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from nmm_compiler.cli.endings import ending
from nmm_compiler.errors import WorkerError

_GIB = 1 << 30
_LARGEST_ANSWER_BYTES = 1 << 20


def run_limited(
    work: Callable[[], int], what: str, time_limit: float, memory_limit: float = 2
) -> tuple[int, str]:
    """Return the exit code that `work` returns in a child process, or that of what it raises, and
    the line for the user.

    what: the file, for messages. time_limit: in seconds. memory_limit: GiB of address space that
    the child adds to what is mapped here (Linux; macOS does not enforce it). Import what the work
    needs before: that counts neither.
    Raises WorkerError when the child ran too long, or ended in any other way.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_answer, args=(work, there, memory_limit)
    )
    child.start()
    there.close()
    answer = b""
    try:
        in_time = here.poll(time_limit)
        with contextlib.suppress(EOFError, OSError):  # of a child that closed its pipe, or ended
            answer = here.recv_bytes(_LARGEST_ANSWER_BYTES) if in_time else b""
    finally:
        child.join(1)  # it ends by itself where it answered or closed its pipe
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # with what the child has started
        child.kill()
        child.join()
    if not in_time:
        raise WorkerError(
            f"{what} ran longer than --time-limit={time_limit:g} seconds; is a loop endless? "
            "Otherwise raise --time-limit"
        )
    if not answer:
        ended = child.exitcode or 0
        how = f"exit code {ended}" if ended >= 0 else f"signal {signal.Signals(-ended).name}"
        raise WorkerError(
            f"{what} ended the process that worked on it, with {how}; its output is not whole. "
            "SIGKILL may mean want of memory"
        )
    code, said = json.loads(answer)
    return code, "".join(c if c.isprintable() or c == "\n" else "?" for c in said)


def _answer(work: Callable[[], int], there: Connection, gigabytes: float) -> None:
    """Run in the child: do the work, send the exit code and the line for the user."""
    os.setsid()
    before = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux" and before[1] == resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + int(gigabytes * _GIB)
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        ended = work(), ""
    except BaseException as error:  # the file's own classes too; `ending` says what to print
        resource.setrlimit(resource.RLIMIT_AS, before)
        ended = ending(error)
    with contextlib.suppress(OSError):  # the file has closed the pipe, which the parent sees
        there.send_bytes(json.dumps(ended).encode())
