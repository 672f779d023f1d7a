"""How commands end: an exit code, and one line for whatever one raised.

No command needs a handler, and no traceback reaches a user:

    0    done
    1    done, and a check failed; an error in a kernel; or the question was declined
    2    an argument or a file is wrong: one line that names it and the way out
    70   a fault of nmm itself: one line that asks to report it
    130  Ctrl-C                       141  the reader of the output went away (nmm ... | head)

NMM_TRACEBACK=1 shows the traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import traceback

from nmm_compiler import options
from nmm_compiler.errors import NmmError, one_line

FAILED, REFUSED, FAULT, INTERRUPTED, NO_READER = 1, 2, 70, 130, 141
WORDS: list[str] = []
"""The words of the command line, which `main` sets."""


def ending(error: BaseException) -> tuple[int, str]:
    """Return (exit code, line for the user) of what ended a command."""
    if options.is_on("NMM_TRACEBACK"):
        say("".join(traceback.format_exception(error)).rstrip())
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, KeyboardInterrupt):  # a library may answer it with an error of its own
            error = inner
        seen.add(id(inner))
        inner = inner.__cause__ or inner.__context__
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, BrokenPipeError):  # rich leaves with SystemExit when its reader has gone
        _drop_output()
        return NO_READER, ""
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        what = f"out of memory ({one_line(error)})".replace(" ()", "")
        way_out = "pass smaller sizes, or a higher --memory-limit if the command has one"
        return REFUSED, f"error: {what}; {way_out}"
    if isinstance(error, NmmError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
        whole = "no output file is half-written, and kernels that were built stay in the cache"
        return INTERRUPTED, f"{notes}interrupted: {whole}"
    if type(error).__name__ == "Abort":  # typer's, for the answer no
        return FAILED, "stopped: nothing was changed"
    if isinstance(error, OSError) and error.errno is not None:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO):
            _drop_output()
            return REFUSED, f"error: standard output cannot be written: {error.strerror}; "\
                "free some space or send it elsewhere"  # fmt: skip
        place = "" if error.filename is None else f"{error.filename}: "
        return REFUSED, f"error: {place}{error.strerror}; check the path and who may use it"
    if sys.stdout.closed:
        return REFUSED, "error: a file that this command ran closed standard output; remove that"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = f"{type(error).__name__}: {one_line(error)}{place}"
    # A user's file may also raise SystemExit and other classes that are no Exception.
    if not isinstance(error, Exception) or (frames and _is_the_users(frames[-1].filename)):
        return REFUSED, f"error: a file that this command ran raised {text}; mend it there"
    return FAULT, (
        f"error: nmm itself failed: {text}. Please report it with "
        f"the output of: NMM_TRACEBACK=1 {shlex.join(['nmm', *WORDS])}"
    )


def _is_the_users(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to the Python installation."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = (package + os.sep, sys.prefix + os.sep, sys.base_prefix + os.sep)
    path = os.path.abspath(file)
    return os.path.isfile(path) and not path.startswith(installed) and "-packages" not in path


def say(text: str) -> None:
    """Write a text to standard error, which a terminal gets broken between words.

    It is lost when it cannot be written either.
    """
    if not text:
        return
    if sys.stderr.isatty():
        from nmm_compiler.report.text import fitted

        text = fitted(text)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _drop_output() -> None:
    """Point standard output at the null device, which takes what is still buffered."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
