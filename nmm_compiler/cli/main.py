"""`nmm`: runs a command; whatever it raises becomes an exit code and one line (`endings.py`).

This file imports only the standard library when it loads, so that a failing import is handled too.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from nmm_compiler import options
from nmm_compiler.cli.endings import WORDS, ending, say


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line of `arguments`, or of the process; always raises SystemExit."""
    WORDS[:] = sys.argv[1:] if arguments is None else arguments
    if options.setting("_NMM_COMPLETE"):
        from nmm_compiler.cli.commands import app

        app(prog_name="nmm")
    code, said = 0, ""
    # What is imported stays: to look through all of it again and again takes a second.
    gc.set_threshold(10_000, 20, 100)
    try:
        for name in ("stdin", "stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # it was closed
                setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
            elif isinstance(
                stream, io.TextIOWrapper
            ):  # what a terminal's encoding lacks is escaped
                stream.reconfigure(errors="backslashreplace")
        warnings.showwarning = lambda message, *more: say(f"warning: {message}")
        from nmm_compiler.cli import commands

        group = commands.click_of(commands.app)
        with group.make_context("nmm", [*WORDS]) as context:  # no box, which would break paths
            group.invoke(context)
        sys.stdout.flush()  # the interpreter's exit does not report a full disk
    except BaseException as error:  # every exception becomes one line
        code, said = ending(error)
    say(said)
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        try:
            sys.stdout.flush()
        except OSError:  # it was said; what is left must not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
