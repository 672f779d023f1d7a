"""`nmm eval`: the quality of a saved model, by lm-eval, whose models load by `from_pretrained`.

lm-eval takes many seconds to import, so that words that are no task are refused before, by the
names that its files of tasks hold.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from unittest import mock

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.errors import MissingPackageError, UnknownNameError

_NO_TASKS = (".py", ".pyc", ".md", ".json", ".jsonl")
"""What else stands beside lm-eval's files of tasks, some of which have no suffix."""
_NAMED = re.compile(
    rb"""(?:task|group|tag)["']?: *["']?(\w[^\s"'\[\]#]*)|^[ \t]*- *["']?(\w[^\s"':]*)""",
    re.MULTILINE,
)


def evaluate(
    context: typer.Context, model: Annotated[str, values.model_argument(weights=True)]
) -> None:
    """Evaluate a causal language model with EleutherAI's lm-eval; what follows is lm-eval's.

    Example: nmm eval ./llama-lowrank --tasks arc_easy,wikitext --limit 200 --batch_size 8
    """
    _check_tasks(context.args)
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise MissingPackageError("lm_eval", "nmm eval", "eval") from None
    from nmm_compiler.lowrank_models import hf

    hf.register()
    with contextlib.ExitStack() as stack:
        directory = model
        if model in models.PACKAGED:  # its package has a form of its own
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="nmm-eval-"))
            for part in models.with_weights(model):
                part.save_pretrained(directory)
        words = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={directory}"]
        stack.enter_context(mock.patch.object(sys, "argv", [*words, *context.args]))
        code: object = None
        with models.foreign(directory, "lm-eval raised"):
            try:
                cli_evaluate()
            except SystemExit as ended:  # what lm-eval says stands on standard error
                code = ended.code
    if code:
        raise typer.Exit(code if isinstance(code, int) else 2)


def _check_tasks(words: Sequence[str]) -> None:
    """Raise UnknownNameError for a task that no file of lm-eval names.

    Patterns, paths, and the tasks of other directories are left to lm-eval.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tasks", "-t", nargs="*", default=[])
    parser.add_argument("--include_path")
    given = parser.parse_known_args(words)[0]
    tasks = [task for word in given.tasks for task in word.split(",")]
    asked = [task for task in tasks if not re.search(r"[*?\[]", task) and not Path(task).exists()]
    package = importlib.util.find_spec("lm_eval")
    if not asked or given.include_path or package is None or package.origin is None:
        return
    names: set[str] = set()
    for file in (Path(package.origin).parent / "tasks").rglob("*"):
        if file.suffix not in _NO_TASKS and file.is_file():
            found = _NAMED.findall(file.read_bytes())
            names.update((key or item).decode("utf-8", "replace") for key, item in found)
    for task in asked:
        if task not in names:
            raise UnknownNameError("task of lm-eval", task, sorted(names), ["lm-eval ls tasks"])
