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
    kind, inner = type(error).__name__, error.__context__
    if kind in ("Exit", "NoArgsIsHelpError"):  # typer's own; the second has printed the help
        return int(error.exit_code), ""  # type: ignore[attr-defined]
    if hasattr(error, "format_message"):  # typer's, for words that it cannot read
        said = " ".join(error.format_message().split()).removesuffix(".")
        command = getattr(error.ctx, "command_path", "nmm")  # type: ignore[attr-defined]
        return REFUSED, f"error: {said}; {command} --help lists what it takes"
    if kind == "Abort":  # typer's, for the answer no
        return FAILED, "stopped: nothing was changed"
    if isinstance(error, KeyboardInterrupt) or isinstance(inner, KeyboardInterrupt):
        # a library may answer an interrupt with an error of its own
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
        whole = "no output file is half-written, and kernels that were built stay in the cache"
        return INTERRUPTED, f"{notes}interrupted: {whole}"
    if isinstance(inner if kind == "SystemExit" else error, BrokenPipeError):
        return NO_READER, ""  # rich leaves with SystemExit when its reader has gone
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        way_out = "pass smaller sizes, or a higher --memory-limit if the command has one"
        return REFUSED, f"error: out of memory ({one_line(error)}); {way_out}"
    if isinstance(error, NmmError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, OSError) and error.errno is not None:
        place = error.filename or "standard output, or a connection"
        wanted = "check the path, its space and who may use it"
        return REFUSED, f"error: {place}: {error.strerror}; {wanted}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = f"{kind}: {one_line(error)}{place}"
    if not isinstance(error, Exception):  # a user's file may raise SystemExit, and its own classes
        return REFUSED, f"error: a file that this command ran raised {text}; mend it there"
    return FAULT, (
        f"error: nmm itself failed: {text}. Please report it with "
        f"the output of: NMM_TRACEBACK=1 {shlex.join(['nmm', *WORDS])}"
    )


def say(text: str) -> None:
    """Write a text to standard error; it is lost when that cannot be written either."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text and f"{text}\n")
        sys.stderr.flush()
