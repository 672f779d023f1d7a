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
from nmm_compiler.errors import FileError, WorkerError

_GIB = 1 << 30
_LONGEST_SECONDS = 1e6
_LARGEST_ANSWER_BYTES = 1 << 20


def run_limited(
    work: Callable[[], int], what: str, seconds: float, gigabytes: float
) -> tuple[int, str]:
    """Return the exit code that `work` returns in a child process, or that of what it raises, and
    the line for the user.

    what: the file, for messages. gigabytes: of address space that the child adds to what is mapped
    here (Linux; macOS does not enforce it). Import what the work needs before: that counts neither.
    Raises WorkerError when the child ran too long, or ended in any other way.
    """
    if not (seconds > 0 and gigabytes > 0):
        raise WorkerError(
            f"--time-limit={seconds:g} and --memory-limit={gigabytes:g} must be above 0"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_answer, args=(work, there, what, gigabytes)
    )
    child.start()
    there.close()
    answer, in_time = b"", False
    try:
        in_time = here.poll(min(seconds, _LONGEST_SECONDS))
        answer = here.recv_bytes(_LARGEST_ANSWER_BYTES) if in_time else b""
    except (EOFError, OSError):
        in_time = True
    finally:
        here.close()
        child.join(1 if in_time else 0)  # it ends by itself where it answered or closed its pipe
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # with what the child has started
        child.kill()
        child.join()
    if not in_time:
        raise WorkerError(
            f"{what} ran longer than --time-limit={seconds:g} seconds; is a loop endless? "
            "Otherwise raise --time-limit"
        )
    with contextlib.suppress(ValueError, TypeError):
        code, said = json.loads(answer)
        return code, "".join(c if c.isprintable() or c == "\n" else "?" for c in said)
    ended = child.exitcode or 0
    how = f"left it with exit code {ended}"
    if ended == -signal.SIGKILL:
        how = "lost the way to answer, or the system killed it for want of memory"
    elif ended < 0:
        how = f"crashed it with {signal.Signals(-ended).name}"
    raise WorkerError(
        f"{what} ended the process that worked on it: it {how}; its output is not whole"
    )


def _answer(work: Callable[[], int], there: Connection, what: str, gigabytes: float) -> None:
    """Run in the child: do the work, send the exit code and the line for the user."""
    os.setsid()
    _limit(resource.RLIMIT_CORE, 0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = 0  # bytes of address space that this process has, where that is known
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        mapped = pages * resource.getpagesize()
    try:
        _limit(resource.RLIMIT_AS, mapped + int(min(gigabytes, 1 << 20) * _GIB))
        ended = work(), ""
    except KeyboardInterrupt as error:  # the file's own: Ctrl-C does not reach this session
        ended = ending(FileError(f"{what} raised KeyboardInterrupt: {error}"))
    except BaseException as error:  # the file's own classes too; `ending` says what to print
        resource.setrlimit(resource.RLIMIT_AS, before)
        ended = ending(error)
    with contextlib.suppress(OSError):  # the file has closed the pipe, which the parent sees
        there.send_bytes(json.dumps(ended).encode())


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
