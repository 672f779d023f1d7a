"""Registers the commands of `nmm`, each from a file of its kind.

A command returns an `Answer`, and ends with 1 where its check did not pass. With --json standard
output is the JSON alone: all else that is printed goes to standard error. A command that takes
--time-limit runs in a process of its own (`limited.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nmm_compiler.cli import (
    cache,
    demo,
    doctor,
    kernels,
    on_models,
)
from nmm_compiler.cli.endings import FAILED, say
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.version import VERSION


class Command(TyperCommand):
    """A command of `nmm`: what all do with their answers. Its first argument is the user's file."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; the help shows no type for a switch, which takes no value."""
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def invoke(self, ctx: Any) -> None:
        """Run the command and print its answer."""
        given = ctx.params
        as_json = given.pop("as_json", False)
        limits = {name: given.pop(name) for name in ("time_limit", "memory_limit") if name in given}
        run = super().invoke

        def work() -> int:
            with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
                answer = run(ctx)
            answer.say(as_json, given.get("html"))
            sys.stdout.flush()
            return 0 if answer.passed else FAILED

        file = str(given[self.params[0].name])
        code, said = run_limited(work, file, **limits) if limits else (work(), "")
        say(said)
        if code:
            raise typer.Exit(code)


def _group(help_: str, epilog: str, **more: Any) -> typer.Typer:
    return typer.Typer(help=help_, epilog=epilog, no_args_is_help=True,
                       pretty_exceptions_enable=False, rich_markup_mode="rich", **more)  # fmt: skip


def _add(group: typer.Typer, name: str, command: Any, epilog: str | None = None) -> None:
    """Add a command: an empty line of its docstring ends a paragraph."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    # Who takes typer's context reads the words that no option takes.
    rest = "context" in inspect.signature(command).parameters
    settings = {"allow_extra_args": rest, "ignore_unknown_options": rest}
    add = group.command(name, cls=Command, help=text, epilog=epilog, context_settings=settings)
    add(command)


app = _group(
    "A compiler for low-rank models on AWS Trainium: kernels, proofs and timings on a CPU.",
    "An error is one line; NMM_TRACEBACK=1 adds the traceback.",
    name="nmm",
)
cache_group = _group(
    "The kernel cache: list, verify, clear; nmm build fills it.",
    "Where: NMM_CACHE_DIR. How: NMM_CACHE=off|ro|rw|require. See docs/cache.md.",
)
_add(app, "kernel", kernels.kernel, kernels.OPTIONS)
for group, name, command in (
    (app, "demo", demo.demo),
    (app, "explain", on_models.explain),
    (app, "plan", on_models.plan),
    (app, "build", cache.build),
    (app, "compress", on_models.compress),
    (app, "simulate", kernels.simulate),
    (app, "profile", kernels.profile),
    (app, "lint", kernels.lint),
    (app, "eval", on_models.evaluate),
    (app, "export", on_models.export),
    (app, "doctor", doctor.doctor),
    (cache_group, "list", cache.list_),
    (cache_group, "verify", cache.verify),
    (cache_group, "clear", cache.clear),
):
    _add(group, name, command)
app.add_typer(cache_group, name="cache")


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"nmm_compiler {VERSION}")
        raise typer.Exit()


@app.callback()
def nmm(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version and stop", callback=_say_version, is_eager=True
        ),
    ] = False,
) -> None:
    """A compiler for low-rank models on AWS Trainium: kernels, proofs and timings on a CPU."""


click_of = functools.cache(typer.main.get_command)
"""What typer makes of an app, once, however many lines a process runs."""
