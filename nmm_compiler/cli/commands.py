"""Registers the commands of `nmm`, each from a file of its kind.

A command that returns an `Answer` gets the option --json, and the exit code 1 where its check did
not pass. With --json standard output is the JSON alone: all else that is printed goes to standard
error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from nmm_compiler.cli import (
    cache,
    demo,
    doctor,
    kernels,
    on_models,
    values,
)
from nmm_compiler.cli.endings import FAILED, say
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.version import VERSION

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for words that it cannot read; typer exports only this class below it."""


class Switches:
    """What has a help that shows no type for a switch: `--check <bool>` looks as if it took one."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help too."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(Switches, TyperCommand):
    """A command of `nmm`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; that of `kernel` lists the families, which nothing else loads."""
        if self.name == "kernel":
            argument: Any = next(one for one in self.params if one.name == "family")
            argument.help, self.epilog = kernels.families_help()
        super().format_help(ctx, formatter)


class Commands(Switches, TyperGroup):
    """A group of commands."""


def _group(help_: str, epilog: str, **more: Any) -> typer.Typer:
    return typer.Typer(cls=Commands, help=help_, epilog=epilog, no_args_is_help=True,
                       pretty_exceptions_enable=False, rich_markup_mode="rich", **more)  # fmt: skip


def _add(
    group: typer.Typer, command: Callable[..., Any], name: str | None = None, **limits: float
) -> None:
    """Add a command: an empty line of its docstring ends a paragraph.

    limits: the defaults of `values.LIMITS`, for a command that works on a user's files.
    """
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    takes = inspect.signature(command, eval_str=True)
    # Who takes typer's context reads the words that no option takes.
    rest = typer.Context in [one.annotation for one in takes.parameters.values()]
    settings = {"allow_extra_args": rest, "ignore_unknown_options": rest}
    if "Answer" in str(takes.return_annotation):
        command = _answering(command, takes, limits)
    group.command(name, cls=Command, help=text, context_settings=settings)(command)


def _answering(
    command: Callable[..., Any], takes: inspect.Signature, limits: dict[str, float]
) -> Callable[..., None]:
    """Return a command with --json that prints the answer of another one and ends as it says."""

    def answered(as_json: bool, given: dict[str, Any]) -> int:
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            answer = command(**given)
        answer.say(as_json)
        sys.stdout.flush()
        return 0 if answer.passed else FAILED

    @functools.wraps(command)
    def run(*, as_json: bool, **given: Any) -> None:
        work = functools.partial(answered, as_json, given)
        if limits:
            most = [given.pop(name) for name in limits]
            code, said = run_limited(work, str(next(iter(given.values()))), *most)
            say(said)
        else:
            code = work()
        if code:
            raise typer.Exit(code)

    added = [one.replace(default=limits[one.name]) for one in values.LIMITS if limits]
    parameters = [*takes.parameters.values(), *added, values.JSON]
    setattr(run, "__signature__", takes.replace(parameters=parameters))  # noqa: B010
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


app = _group(
    "A compiler for low-rank models on AWS Trainium: kernels, proofs and timings on a CPU.",
    "An error is one line; NMM_TRACEBACK=1 adds the traceback.",
    name="nmm",
)
for one in (
    demo.demo, kernels.kernel, on_models.explain, on_models.plan, cache.build, on_models.compress,
):  # fmt: skip
    _add(app, one)
_add(app, kernels.simulate, time_limit=15, memory_limit=4)
_add(app, kernels.profile, time_limit=60, memory_limit=4)
_add(app, kernels.lint, time_limit=60, memory_limit=2)
_add(app, on_models.evaluate, "eval")
_add(app, on_models.export)
_add(app, doctor.doctor)
cache_group = _group(
    "The kernel cache: list, verify, clear; nmm build fills it.",
    "Where: NMM_CACHE_DIR. How: NMM_CACHE=off|ro|rw|require. See docs/cache.md.",
)
_add(cache_group, cache.list_, "list")
_add(cache_group, cache.verify)
_add(cache_group, cache.clear)
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
