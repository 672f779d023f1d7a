"""`nmm eval`: the quality of a saved model, by lm-eval, whose models load by `from_pretrained`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Annotated
from unittest import mock

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.errors import MissingPackageError


def evaluate(
    context: typer.Context, model: Annotated[str, values.model_argument(weights=True)]
) -> None:
    """Evaluate a causal language model with EleutherAI's lm-eval; what follows is lm-eval's.

    Example: nmm eval ./llama-lowrank --tasks arc_easy,wikitext --limit 200 --batch_size 8
    """
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
