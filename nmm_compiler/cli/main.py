"""`nmm`: one thin file per command, mounted here.

Errors of the catalogue become one line on stderr and exit code 2; anything else is a bug and keeps
its traceback. Ctrl-C ends with code 130 and leaves no half-written file.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from nmm_compiler.cli import cache, compress, demo, doctor, explain, export, kernel, lint, simulate
from nmm_compiler.errors import NmmError

app = typer.Typer(
    name="nmm",
    help="A compiler for low-rank models on AWS Trainium: kernels, proofs and timings on a CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(demo.demo)
app.command()(kernel.kernel)
app.command()(explain.explain)
app.command()(simulate.simulate)
app.command()(lint.lint)
app.command()(compress.compress)
app.command()(export.export)
app.command()(doctor.doctor)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; the entry point of `nmm`."""
    try:
        app()
    except NmmError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", style="yellow")
        sys.exit(130)


if __name__ == "__main__":
    main()
