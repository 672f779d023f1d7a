"""Registers the commands of `nmm`, each from a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nmm_compiler.cli import (
    build,
    cache,
    calibrate,
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
    report,
    simulate,
    tune,
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
app.command(cls=PlainCommand)(demo.demo)
app.command(cls=kernel.KernelCommand)(kernel.kernel)
app.command(cls=PlainCommand)(explain.explain)
app.command(cls=PlainCommand)(plan.plan)
app.command(cls=PlainCommand)(build.build)
app.command(cls=PlainCommand)(tune.tune)
app.command(cls=PlainCommand)(report.report)
app.command(cls=PlainCommand)(simulate.simulate)
app.command(cls=PlainCommand)(profile.profile)
app.command(cls=PlainCommand)(profile.compare)
app.command(cls=PlainCommand)(lint.lint)
app.command(cls=PlainCommand)(compress.compress)
app.command("eval", cls=PlainCommand)(evaluate.evaluate)
app.command(cls=PlainCommand)(export.export)
app.command(cls=PlainCommand)(doctor.doctor)
app.command(cls=PlainCommand)(calibrate.calibrate)
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
