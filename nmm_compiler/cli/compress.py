"""`nmm compress` makes a transformers model low-rank; `nmm eval` judges a saved one by lm-eval.

The model is written with its report as JSON; lm-eval loads such directories itself.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.errors import MissingPackageError, ModelError, NmmError, OptionTypeError
from nmm_compiler.lowrank_models.progress import steps

if TYPE_CHECKING:
    import torch

_LENGTH, _BATCH = 256, 8
"""Tokens of a calibration sequence, and sequences of a batch."""


def compress(
    model: Annotated[str, values.model_argument(weights=True)],
    out_dir: Annotated[
        Path,
        typer.Argument(help="directory for the low-rank model", file_okay=False),
    ],
    ratio: Annotated[
        float | None, values.option(values.share, "SHARE", "share of parameters to remove")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", min=0, help="one rank for all, instead of --ratio; 0: the base alone"
        ),
    ] = None,
    base: Annotated[
        str | None,
        values.choice_option(
            "format",
            "nmm_compiler.kernels.packed_formats:FORMATS",
            "round the weights to mxfp4, fp8, int4, ...; factors mend what that loses",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        values.input_option("calibration text, one passage a line"),
    ] = None,
    include: values.Include = None,
    exclude: values.Exclude = None,
    factors: Annotated[
        str | None,
        values.choice_option(
            "format",
            "nmm_compiler.options:FACTORS",
            "round the factors: fp8, int8, or mxfp8 beside an MX base",
        ),
    ] = None,
    recover_steps: Annotated[
        int,
        typer.Option("--recover", min=0, help="steps of fine-tuning against the original"),
    ] = 0,
    target: values.Target = "trn2",
) -> values.Answer:
    """Factorize a model's linear layers and save it for from_pretrained.

    OUT_DIR/compression.json has all figures. `nmm explain OUT_DIR --html FILE` makes a page of it.

    Example: nmm compress ./llama ./llama-lowrank --ratio 0.2 --text calibration.txt
    """
    from nmm_compiler.lowrank_models import hf
    from nmm_compiler.lowrank_models.config import CompressionConfig
    from nmm_compiler.prediction.headlines import compress as run

    settings: dict[str, Any] = {
        "ratio": ratio, "rank": rank, "include": include or None, "exclude": exclude or None,
        "target": target, "factors": factors, "base": base,
    }  # fmt: skip
    CompressionConfig(**settings, calibration=text)
    for name, rounded in (("factors", factors), ("base", base)):
        if rounded and recover_steps:
            wanted = "it without --recover: what is rounded is not trained"
            raise OptionTypeError(name, rounded, wanted)
    if recover_steps and text is None:
        raise ModelError("--recover needs text to train on; pass --text FILE")
    with steps(f"loading {model}"):
        loaded, tokenizer = models.with_weights(model)
    batches = None if text is None else read_batches(text, tokenizer, loaded)
    original = copy.deepcopy(loaded) if recover_steps else None
    report = run(loaded, **settings, calibration=batches)
    said = [str(report)]
    figures: dict[str, Any] = {"compression": report.to_dict()}
    figures["compression"]["achieved_ratio"] = report.achieved_ratio
    if original is not None:
        from nmm_compiler.lowrank_models.recover import recover

        recovery = recover(loaded, batches, teacher=original, steps=recover_steps)
        said.append(recovery.summary())
        figures["recovery"] = recovery.to_dict()
    files = {"compression.json": json.dumps(figures, indent=2)}
    hf.save(loaded, out_dir, tokenizer=tokenizer, files=files)
    return values.Answer(figures, ["\n".join((*said, f"saved     {out_dir}"))])


def read_batches(path: Path, tokenizer: Any, model: Any) -> list[dict[str, torch.Tensor]]:
    """Return calibration batches of a text file.

    For a causal language model the text is one stream, cut into sequences; for others each line is
    a sequence, padded. Raises ModelError without a tokenizer or text.
    """
    import torch

    if tokenizer is None:
        raise ModelError(
            "--text needs a tokenizer, and the model's directory has none; save one there with "
            "tokenizer.save_pretrained"
        )
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--text {path} cannot be read as UTF-8 text: {error}") from error
    if not lines:
        raise ModelError(f"--text {path} has no text; pass a file with some hundred lines")
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        ids = torch.tensor(tokenizer("\n".join(lines), truncation=False)["input_ids"])
        pieces = [piece for piece in ids.split(_LENGTH) if len(piece) == _LENGTH] or [ids]
        return [
            {"input_ids": torch.stack(pieces[i : i + _BATCH])}
            for i in range(0, len(pieces), _BATCH)
        ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"padding": True, "truncation": True, "max_length": _LENGTH, "return_tensors": "pt"}
    return [dict(tokenizer(lines[i : i + _BATCH], **options)) for i in range(0, len(lines), _BATCH)]


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
