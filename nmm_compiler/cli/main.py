"""`nmm`: runs a command and turns every way it can end into an exit code and one line.

No command needs a handler, and no traceback reaches a user:

    0    done
    1    done, and a check failed; an error in a kernel; or the question was declined
    2    an argument or a file is wrong: one line that names it and the way out
    70   a fault of nmm itself: one line that asks to report it
    130  Ctrl-C                       141  the reader of the output went away (nmm ... | head)

NMM_TRACEBACK=1 shows the traceback. This file imports only the standard library when it loads, so
that a failing import is handled too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

from nmm_compiler import options
from nmm_compiler.errors import NmmError, one_line

FAILED, REFUSED, FAULT, INTERRUPTED, NO_READER = 1, 2, 70, 130, 141


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line of `arguments`, or of the process; always raises SystemExit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if options.completion_wanted():
        from nmm_compiler.cli.commands import app

        app(prog_name="nmm")
    try:
        _prepare()
        code = _run(given)
        sys.stdout.flush()  # the interpreter's exit does not report a full disk
    except BaseException as error:  # every exception becomes one line
        code = _answer(error, given)
    sys.exit(code)


def _run(given: list[str]) -> int:
    """Run a command; return typer's exit code. Other exceptions come out as they were raised."""
    import typer

    from nmm_compiler.cli import commands, values

    values.WORDS[:] = given
    group = typer.main.get_command(commands.app)
    try:
        with group.make_context("nmm", [*given]) as context:  # no box, which would break paths
            group.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except commands.UsageError as wrong:
        if type(wrong).__name__ != "NoArgsIsHelpError":  # that one has printed the help
            said = " ".join(wrong.format_message().split()).removesuffix(".")
            command = "nmm" if wrong.ctx is None else wrong.ctx.command_path
            _say(f"error: {said}; {command} --help lists what it takes")
        return REFUSED
    return 0


def _answer(error: BaseException, given: list[str]) -> int:
    """Print one line about the exception that ended the command; return the exit code."""
    if options.traceback_wanted():
        _say("".join(traceback.format_exception(error)).rstrip())
    code, said = _verdict(error, given)
    if said:
        _say(said)
    with contextlib.suppress(OSError, ValueError):  # only the first error is reported
        sys.stdout.flush()
    return code


def _verdict(error: BaseException, given: list[str]) -> tuple[int, str]:
    """Return (exit code, line for the user) of what ended a command."""
    for inner in _chain(error):  # a library may answer Ctrl-C with an error of its own
        if isinstance(inner, KeyboardInterrupt):
            error = inner
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, BrokenPipeError):  # rich leaves with SystemExit when its reader has gone
        _drop_output()
        return NO_READER, ""
    if isinstance(error, NmmError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
        whole = "no output file is half-written, and kernels that were built stay in the cache"
        return INTERRUPTED, f"{notes}interrupted: {whole}"
    if type(error).__name__ == "Abort":  # typer's, for the answer no
        return FAILED, "stopped: nothing was changed"
    if isinstance(error, MemoryError):
        return REFUSED, f"error: out of memory ({error}); pass smaller sizes"
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
    again = shlex.join(["nmm", *given])
    return FAULT, (
        f"error: nmm itself failed: {text}. Please report it with "
        f"the output of: NMM_TRACEBACK=1 {again}"
    )


def _is_the_users(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to the Python installation."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = (package + os.sep, sys.prefix + os.sep, sys.base_prefix + os.sep)
    path = os.path.abspath(file)
    return os.path.isfile(path) and not path.startswith(installed) and "-packages" not in path


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from or over, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _say(text: str) -> None:
    """Write one line to standard error, which a terminal gets broken between words.

    It is lost when it cannot be written either.
    """
    if sys.stderr.isatty():
        from nmm_compiler.report.text import fitted

        text = fitted(text)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _prepare() -> None:
    """Prepare the standard streams and the environment for every command.

    A closed stream becomes the null device; text that the terminal's encoding lacks is escaped.
    A warning is one line.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            bad = stream.errors in ("strict", "surrogateescape")
            stream.reconfigure(errors="backslashreplace" if bad else stream.errors)
    warnings.showwarning = lambda message, *more: _say(f"warning: {message}")
    options.drop_bad_terminal_sizes()


def _drop_output() -> None:
    """Point standard output at the null device, which takes what is still buffered."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    main()
