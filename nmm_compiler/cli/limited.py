"""Runs work on a user's file in a process of its own, with limits on time and memory.

A kernel file is Python: it may loop for ever, fill the memory, end the process or crash it. The
work runs in a forked child that answers with JSON. Whatever else happens to the child becomes one
error line here. This protects from accidents. It is no sandbox: the child may do everything that
the user may do.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nmm_compiler.errors import InternalFaultError, NmmError, WorkerError

_GIB = 1 << 30
_LONGEST_SECONDS = 1e6
_LARGEST_ANSWER_BYTES = 64 << 20
_OUT_OF_MEMORY = -1  # in the place of an exit code


def run_limited(
    work: Callable[[], Any],
    *,
    what: str,
    seconds: float,
    gigabytes: float,
) -> Any:
    """Return what `work` returns (a value that JSON holds), computed in a child process.

    what: the file, for messages. gigabytes: of address space that the child adds to what is mapped
    here (Linux; macOS does not enforce it). Import what the work needs before: that counts neither.
    Raises NmmError with the message and exit code of an error of the catalogue; WorkerError
    when the child ran too long, asked for too much memory, or ended in any other way.
    """
    if not (seconds > 0 and gigabytes > 0):
        raise WorkerError(
            f"--time-limit={seconds:g} and --memory-limit={gigabytes:g} must be above 0"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    here, there = multiprocessing.Pipe(duplex=False)
    given = (work, there, what, gigabytes)
    child = multiprocessing.get_context("fork").Process(target=_answer, args=given)
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
    return _value(answer, what, child.exitcode or 0, gigabytes)


def _value(answer: bytes, what: str, ended: int, gigabytes: float) -> Any:
    """Return the value of an answer, or raise the error that it or the child's end stands for.

    ended: the child's exit code, or the negative number of the signal that ended it.
    """
    try:
        value, code = json.loads(answer)
    except (ValueError, TypeError):
        how = f"left it with exit code {ended}"
        if ended == -signal.SIGKILL:
            how = "lost the way to answer, or the system killed it for want of memory"
        elif ended < 0:
            how = f"crashed it with {signal.Signals(-ended).name}"
        raise WorkerError(
            f"{what} ended the process that worked on it: it {how}; nothing was computed"
        ) from None
    if not code:
        return _printable(value)
    if code == _OUT_OF_MEMORY:
        raise WorkerError(
            f"{what} needed more memory than --memory-limit={gigabytes:g} GiB; raise the limit"
        )
    refused = NmmError(_printable(value))
    refused.exit_code = code
    raise refused


def _printable(value: Any) -> Any:
    """Return texts without the control characters and half characters of a kernel's messages."""
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "?" for c in value)
    return value


def _answer(work: Callable[[], Any], there: Connection, what: str, gigabytes: float) -> None:
    """Run in the child: do the work, send (value, 0) or (message, exit code)."""
    os.setsid()
    _limit(resource.RLIMIT_CORE, 0)
    value, code = "", _OUT_OF_MEMORY
    try:
        _limit(resource.RLIMIT_AS, _address_space() + int(min(gigabytes, 1 << 20) * _GIB))
        value, code = json.dumps(work()), 0
    except NmmError as error:
        if not isinstance(error.__cause__, MemoryError):
            value, code = json.dumps(str(error)), error.exit_code
    except MemoryError:
        pass
    except KeyboardInterrupt as error:  # the file's own: Ctrl-C does not reach this session
        value = json.dumps(f"{what} raised KeyboardInterrupt: {error}")
        code = NmmError.exit_code
    except BaseException as error:  # a traceback of the child must not reach the user
        place = "".join(traceback.format_tb(error.__traceback__)[-1:]).split("\n")[0].strip()
        code = InternalFaultError.exit_code
        value = json.dumps(
            f"a fault in nmm_compiler while it worked on {what}: {type(error).__name__}: {error} "
            f"({place}); please report it with this command"
        )
    with contextlib.suppress(OSError):  # the file has closed the pipe, which the parent sees
        there.send_bytes(f"[{value or 'null'}, {code}]".encode())


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    """Return the bytes of address space that this process has mapped; 0 where that is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return pages * resource.getpagesize()
    return 0
