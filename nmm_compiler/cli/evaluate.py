"""`nmm eval`: the quality of a saved model, by lm-eval, which loads such directories itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Annotated

import typer

from nmm_compiler.cli import models
from nmm_compiler.errors import MissingPackageError, NmmError


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="DIRECTORY of the model", metavar="DIRECTORY")],
) -> None:
    """Evaluate a causal language model with EleutherAI's lm-eval; what follows is lm-eval's.

    Example: nmm eval ./llama-lowrank --tasks arc_easy,wikitext --limit 200 --batch_size 8
    """
    models.check(model, directory=True)
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm_eval", "nmm eval", "eval")
    given = f"pretrained={model},trust_remote_code=True"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", given]
    code = subprocess.run([*command, *context.args], check=False).returncode
    if code:
        raise NmmError(f"lm-eval ended with exit code {code}; what it said is above")
