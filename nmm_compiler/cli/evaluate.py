"""`nmm eval`: the quality of a saved model, beside that of its dense original."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.show import show
from nmm_compiler.outputs import write_text
from nmm_compiler.report.parts import Line
from nmm_compiler.report.text import counted

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
    from nmm_compiler.compress.lm_eval_output import without_chatter

    models.require_transformers("nmm eval", "eval")
    if sys.stderr.isatty():
        show(f"evaluating {model_dir}", stderr=True)
    with without_chatter() as cut:
        report = run(model_dir, tasks, dense=dense, limit=limit, batch_size=batch)
    show(str(report))
    if cut.count:
        many = counted(cut.count, "input")
        show([Line(f"{many} longer than the model takes: cut at the beginning")])
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_text(json, report.to_json())
        show(f"report    {json}")


evaluate.__doc__ = f"{evaluate.__doc__}\n\n{_EPILOG}"
