"""`nmm`: runs a command; whatever it raises becomes an exit code and one line (`endings.py`).

This file imports only the standard library when it loads, so that a failing import is handled too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from nmm_compiler import options
from nmm_compiler.cli.endings import REFUSED, WORDS, ending, say


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line of `arguments`, or of the process; always raises SystemExit."""
    WORDS[:] = sys.argv[1:] if arguments is None else arguments
    if options.setting("_NMM_COMPLETE"):
        from nmm_compiler.cli.commands import app

        app(prog_name="nmm")
    try:
        # a closed stream becomes the null device; what the encoding of a terminal lacks is escaped
        for name in ("stdin", "stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
            elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
                bad = stream.errors in ("strict", "surrogateescape")
                stream.reconfigure(errors="backslashreplace" if bad else stream.errors)
        warnings.showwarning = lambda message, *more: say(f"warning: {message}")
        options.drop_bad_terminal_sizes()
        code = _run()
        sys.stdout.flush()  # the interpreter's exit does not report a full disk
    except BaseException as error:  # every exception becomes one line
        code, said = ending(error)
        say(said)
        with contextlib.suppress(OSError, ValueError):  # only the first error is reported
            sys.stdout.flush()
    sys.exit(code)


def _run() -> int:
    """Run a command; return typer's exit code. Other exceptions come out as they were raised."""
    import typer

    from nmm_compiler.cli import commands

    group = typer.main.get_command(commands.app)
    try:
        with group.make_context("nmm", [*WORDS]) as context:  # no box, which would break paths
            group.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except commands.UsageError as wrong:
        if type(wrong).__name__ != "NoArgsIsHelpError":  # that one has printed the help
            said = " ".join(wrong.format_message().split()).removesuffix(".")
            command = "nmm" if wrong.ctx is None else wrong.ctx.command_path
            say(f"error: {said}; {command} --help lists what it takes")
        return REFUSED
    return 0


if __name__ == "__main__":
    main()
