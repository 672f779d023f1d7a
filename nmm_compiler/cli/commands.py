"""Registers the commands of `nmm`, each from a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nmm_compiler.cli import (
    build,
    cache,
    compress,
    demo,
    doctor,
    evaluate,
    explain,
    export,
    kernel,
    lint,
    plan,
    profile,
    simulate,
    values,
)
from nmm_compiler.cli.help_text import PlainCommand, WrappedHelp
from nmm_compiler.version import VERSION

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for words that it cannot read; typer exports only this class below it."""


class Stopped(BaseException):
    """Carries exceptions past typer to `main`: Ctrl-C, SystemExit, a closed pipe."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Commands(WrappedHelp):
    """The top group: every exception but typer's own goes to `main`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words, so that an output can be compared with the other files they name."""
        values.WORDS.set(tuple(args))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the context names."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, SystemExit, OSError, EOFError) as error:
            raise Stopped(error) from error


app = typer.Typer(
    name="nmm",
    cls=Commands,
    help="A compiler for low-rank models on AWS Trainium: kernels, proofs and timings on a CPU.",
    epilog="An error is one line; NMM_TRACEBACK=1 adds the traceback.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_REST: Any = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Of commands that read the words themselves that no option takes."""

app.command(cls=PlainCommand)(demo.demo)
app.command(cls=kernel.KernelCommand, context_settings=_REST)(kernel.kernel)
for command in (
    explain.explain, plan.plan, build.build, simulate.simulate, profile.profile, lint.lint,
    compress.compress,
):  # fmt: skip
    app.command(cls=PlainCommand)(command)
app.command("eval", cls=PlainCommand, context_settings=_REST)(evaluate.evaluate)
app.command(cls=PlainCommand)(export.export)
app.command(cls=PlainCommand)(doctor.doctor)
app.add_typer(cache.app, name="cache")


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
