"""`nmm eval`: the quality of a saved model, beside that of its dense original."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

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

    models.require_transformers("nmm eval")
    if sys.stderr.isatty():
        show(f"evaluating {model_dir}", stderr=True)
    with _without_chatter() as cut:
        report = run(model_dir, tasks, dense=dense, limit=limit, batch_size=batch)
    show(str(report))
    if cut.count:
        many = counted(cut.count, "input")
        show([Line(f"{many} longer than the model takes: cut at the beginning")])
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_text(json, report.to_json())
        show(f"report    {json}")


class _Cut(logging.Handler):
    """Counts the items that lm-eval says it cuts; takes its other remarks and drops them."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record if it is about an item that is too long."""
        self.count += "Truncating" in record.getMessage()


@contextlib.contextmanager
def _without_chatter() -> Iterator[_Cut]:
    """Let lm-eval draw its bars on terminals only, and keep back its remarks on how it is called.

    It also asks git for the version of the directory that the command runs in, which need not be a
    repository.
    """
    import tqdm

    set_up = tqdm.std.tqdm.__init__

    def hidden(self: Any, *args: Any, **keywords: Any) -> None:
        set_up(self, *args, **{**keywords, "disable": True})

    cut, log = _Cut(), logging.getLogger("lm_eval")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(log, "propagate", False))
        log.addHandler(cut)
        stack.callback(log.removeHandler, cut)
        for name in ("transformers", "datasets"):
            log = logging.getLogger(name)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)
        if not sys.stderr.isatty():
            stack.enter_context(mock.patch.object(tqdm.std.tqdm, "__init__", hidden))
        with contextlib.suppress(ImportError):  # `run` says what is missing
            from lm_eval import evaluator

            stack.enter_context(mock.patch.object(evaluator, "get_git_commit_hash", str))
        yield cut


evaluate.__doc__ = f"{evaluate.__doc__}\n\n{_EPILOG}"
