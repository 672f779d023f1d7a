"""Runs work on a user's file in a process of its own, with limits on time and memory.

A kernel file is Python: it may loop for ever, fill the memory, end the process or crash it. The
work runs in a forked child that answers with one line of JSON. Whatever else happens to the child
becomes one error line here. This protects from accidents. It is no sandbox: the child may do
everything that the user may do.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from nmm_compiler.errors import InternalFaultError, NmmError, WorkerError

_GIB = 1 << 30
_START_SECONDS = 60.0
_LARGEST_ANSWER_BYTES = 64 << 20


def run_limited(
    work: Callable[[], Any],
    *,
    what: str,
    seconds: float,
    gigabytes: float,
    modules: tuple[str, ...] = (),
) -> Any:
    """Return what `work` returns (a value that JSON holds), computed in a child process.

    what: the file, for messages. modules: imported before the memory limit is set, which counts
    the address space that is added from then on (Linux; macOS does not enforce it).
    Raises NmmError with the message and exit code of an error of the catalogue; WorkerError
    when the child ran too long or asked for too much memory; WorkerError when it ended in any
    other way.
    """
    if not (seconds > 0 and gigabytes > 0):
        raise WorkerError(
            f"--time-limit={seconds:g} and --memory-limit={gigabytes:g} must be above 0"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    answer_end, child_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(answer_end)
        _answer(work, child_end, what, gigabytes, modules)
    os.close(child_end)
    line: bytes | None = None
    try:
        line = _read_line(answer_end, seconds)
    finally:
        os.close(answer_end)
        status = _end(child, gently=line is not None)
    if line is None:
        raise WorkerError(
            f"{what} ran longer than --time-limit={seconds:g} seconds; is a loop endless? "
            "Otherwise raise --time-limit"
        )
    return _value(line, what, status, gigabytes)


def _end(child: int, *, gently: bool) -> int:
    """Kill the child and what it has started; return the child's wait status.

    gently: the child has answered or closed its pipe, so it gets a second to end by itself.
    """
    found, status = 0, 0
    until = time.monotonic() + 1
    while gently and not found and time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if found else 0.002)
    for kill in (os.killpg, *(() if found else (os.kill,))):
        try:  # the group exists once the child has called setsid
            kill(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return status if found else os.waitpid(child, 0)[1]


def _read_line(end: int, seconds: float) -> bytes | None:
    """Return the bytes up to the first line end, or to the end of all; None when time is up.

    The child's first byte says that it has imported its modules; the time counts from there.
    """
    data, deadline = b"", time.monotonic() + _START_SECONDS
    while b"\n" not in data and len(data) < _LARGEST_ANSWER_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if not select.select([end], [], [], min(left, _START_SECONDS))[0]:
            continue
        part = os.read(end, 1 << 16)
        if not part:
            break
        if not data:
            deadline = time.monotonic() + seconds
        data += part
    return data.partition(b"\n")[0]


def _value(line: bytes, what: str, status: int, gigabytes: float) -> Any:
    try:
        answer = json.loads(line)
        kind, value, code = answer["kind"], _printable(answer["value"]), answer.get("code")
    except (ValueError, TypeError, KeyError):
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            how = f"crashed it with {signal.Signals(os.WTERMSIG(status)).name}"
        elif os.WIFEXITED(status):
            how = f"left it with exit code {os.WEXITSTATUS(status)}"
        else:
            how = "lost the way to answer, or the system killed it for want of memory"
        raise WorkerError(
            f"{what} ended the process that worked on it: it {how}; nothing was computed"
        ) from None
    if kind == "value":
        return value
    if kind == "memory":
        raise WorkerError(
            f"{what} needed more memory than --memory-limit={gigabytes:g} GiB; raise the limit"
        )
    refused = NmmError(str(value))
    refused.exit_code = code
    raise refused


def _printable(value: Any) -> Any:
    """Return texts without the control characters and half characters of a kernel's messages."""
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "?" for c in value)
    return value


def _answer(
    work: Callable[[], Any], end: int, what: str, gigabytes: float, modules: tuple[str, ...]
) -> NoReturn:
    """Run in the child: do the work, write one line, exit without cleaning up."""
    code = 1
    try:

        def started() -> Any:
            os.write(end, b" ")
            return work()

        text = json.dumps(_outcome(started, what, gigabytes, modules)).encode() + b"\n"
        while text:
            text = text[os.write(end, text) :]
        code = 0
        sys.stdout.flush()
    finally:
        os._exit(code)


def _outcome(
    work: Callable[[], Any], what: str, gigabytes: float, modules: tuple[str, ...]
) -> dict[str, Any]:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _limit(resource.RLIMIT_CORE, 0)
        for module in modules:
            importlib.import_module(module)
        _limit(resource.RLIMIT_AS, _address_space() + int(min(gigabytes, 1 << 20) * _GIB))
        return {"kind": "value", "value": work()}
    except NmmError as error:
        if isinstance(error.__cause__, MemoryError):
            return {"kind": "memory", "value": ""}
        return {"kind": "error", "value": str(error), "code": error.exit_code}
    except MemoryError:
        return {"kind": "memory", "value": ""}
    except KeyboardInterrupt as error:  # the file's own: Ctrl-C does not reach this session
        said = f"{what} raised KeyboardInterrupt: {error}"
        return {"kind": "error", "value": said, "code": NmmError.exit_code}
    except BaseException as error:  # a traceback of the child must not reach the user
        place = "".join(traceback.format_tb(error.__traceback__)[-1:]).split("\n")[0].strip()
        return {
            "kind": "error",
            "code": InternalFaultError.exit_code,
            "value": f"a fault in nmm_compiler while it worked on {what}: {type(error).__name__}: "
            f"{error} ({place}); please report it with this command",
        }


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    """Return the bytes of address space that this process has mapped; 0 where that is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
