"""`nmm eval`: the quality of a saved model, beside that of its dense original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nmm_compiler.cli import values
from nmm_compiler.outputs import write_text

_EPILOG = "Example: nmm eval ./llama-lowrank --dense ./llama --tasks local,arc_easy --limit 200"


def evaluate(
    model_dir: Annotated[Path, typer.Argument(help="directory of a causal language model")],
    tasks: Annotated[
        str, typer.Option(help="local, perplexity, paper, or names of lm-eval tasks, with commas")
    ] = "local",
    dense: Annotated[Path | None, typer.Option(help="directory of the dense model")] = None,
    limit: Annotated[int | None, values.size_option(help_="at most this many items a task")] = None,
    batch: Annotated[int, values.size_option(help_="items at a time")] = 8,
    json: Annotated[Path | None, values.output_option(help_="report", make_parents=True)] = None,
) -> None:
    """Evaluate a model on tasks of lm-eval, a dense one beside it."""
    from nmm_compiler.cli import models
    from nmm_compiler.compress.evaluate import evaluate as run

    console = Console(markup=False)
    models.require_transformers("nmm eval")
    with Console(markup=False, stderr=True).status(Text(f"evaluating {model_dir}")):
        report = run(model_dir, tasks, dense=dense, limit=limit, batch_size=batch)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_text(json, report.to_json())
        console.print(f"report    {json}", markup=False, soft_wrap=True)


evaluate.__doc__ = f"{evaluate.__doc__}\n\n{_EPILOG}"
