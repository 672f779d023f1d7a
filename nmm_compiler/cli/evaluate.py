"""`nmm eval`: the quality of a saved model, beside that of its dense original."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.cli.show import show
from nmm_compiler.outputs import write_text
from nmm_compiler.report.parts import Line
from nmm_compiler.report.text import counted

_EPILOG = "Example: nmm eval ./llama-lowrank --dense ./llama --tasks local,arc_easy --limit 200"


def _dense(name: str) -> str:
    return models.check(name, weights=True)


def _loaded(name: str) -> tuple[Any, Any]:
    """Return a packaged model and its tokenizer; a directory is loaded later."""
    return models.with_weights(name) if name in models.PACKAGED else (name, None)


def evaluate(
    model_dir: Annotated[str, values.model_argument(weights=True)],
    tasks: Annotated[
        str, typer.Option(help="local, perplexity, paper, or names of lm-eval tasks, with commas")
    ] = "local",
    dense: Annotated[
        str | None, typer.Option(help="the dense model", parser=values.refusing(_dense))
    ] = None,
    limit: Annotated[int | None, values.size_option(help_="at most this many items a task")] = None,
    batch: Annotated[int, values.size_option(help_="items at a time")] = 8,
    json: Annotated[Path | None, values.output_option(help_="report", make_parents=True)] = None,
) -> None:
    """Evaluate a model on tasks of lm-eval, a dense one beside it."""
    from nmm_compiler.compress.evaluate import evaluate as run
    from nmm_compiler.compress.lm_eval_output import without_chatter

    models.require_transformers("nmm eval", "eval")
    if sys.stderr.isatty():
        show(f"evaluating {model_dir}", stderr=True)
    judged, tokenizer = _loaded(model_dir)
    beside, _ = (None, None) if dense is None else _loaded(dense)
    with without_chatter() as cut:
        report = run(
            judged, tasks, dense=beside, tokenizer=tokenizer, limit=limit, batch_size=batch
        )
    show(str(report))
    if cut.count:
        many = counted(cut.count, "input")
        show([Line(f"{many} longer than the model takes: cut at the beginning")])
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_text(json, report.to_json())
        show(f"report    {json}")


evaluate.__doc__ = f"{evaluate.__doc__}\n\n{_EPILOG}"
