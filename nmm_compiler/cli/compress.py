"""`nmm compress`: makes a transformers model low-rank; writes it, a report, a plot and JSON."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from nmm_compiler.cli import values
from nmm_compiler.cli.show import show, write_html
from nmm_compiler.compress.config import ALLOCATIONS, BUDGETS, METHODS, SENSITIVITIES
from nmm_compiler.errors import CalibrationError, NmmError, OptionTypeError
from nmm_compiler.options import FACTORS
from nmm_compiler.outputs import write_text

if TYPE_CHECKING:
    import torch

    from nmm_compiler.compress.config import CompressionConfig

_EPILOG = "Example: nmm compress ./llama ./llama-lowrank --ratio 0.2 --text calibration.txt"


def compress(
    model_dir: Annotated[str, values.model_argument(weights=True)],
    out_dir: Annotated[Path, typer.Argument(help="directory for the low-rank model")],
    ratio: Annotated[float | None, values.share_option("share of parameters to remove")] = None,
    rank: Annotated[
        int | None, values.size_option(help_="one rank for all, instead of --ratio")
    ] = None,
    text: Annotated[
        Path | None, values.input_option(help_="calibration text, one passage a line")
    ] = None,
    include: Annotated[list[str] | None, typer.Option(help="only layers like mlp, q_proj")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="never these layers")] = None,
    method: Annotated[
        str, values.choice_option("method", lambda: METHODS, "auto, svd, whitened or two-sided")
    ] = "auto",
    allocation: Annotated[
        str,
        values.choice_option("allocation", lambda: ALLOCATIONS, "auto, uniform or global ranks"),
    ] = "auto",
    sensitivity: Annotated[
        str,
        values.choice_option(
            "sensitivity", lambda: SENSITIVITIES, "global ranks by: gradient or output"
        ),
    ] = "gradient",
    align: Annotated[int | None, values.size_option(help_="ranks are multiples of it")] = None,
    budget: Annotated[
        str, values.choice_option("budget", lambda: BUDGETS, "parameters, or predicted latency")
    ] = "parameters",
    tokens: Annotated[
        int, values.size_option(help_="tokens per call that times are predicted for")
    ] = 512,
    target: Annotated[str, values.target_option("; that times are predicted for")] = "trn2",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="NAME=TOKENS:WEIGHT, e.g. decode=1:0.8: a mix of calls; may be repeated"),
    ] = None,
    allow_slower: Annotated[
        bool,
        typer.Option("--allow-slower", help="also layers predicted to be slower than dense"),
    ] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="fit each layer behind the compressed earlier ones")
    ] = False,
    factors: Annotated[
        str | None,
        values.choice_option("format", lambda: FACTORS, "round the factors to float8_e4m3 or int8"),
    ] = None,
    config: Annotated[
        Path | None,
        values.input_option(help_="JSON file of a CompressionConfig, e.g. with ranks per layer"),
    ] = None,
    recover_steps: Annotated[
        int,
        values.count_option("--recover", help_="steps of fine-tuning against the original"),
    ] = 0,
    length: Annotated[int, values.size_option(help_="longest calibration sequence, tokens")] = 256,
    batch: Annotated[int, values.size_option(help_="calibration sequences per batch")] = 8,
    resume: Annotated[Path | None, typer.Option(help="directory to continue from")] = None,
    memory: Annotated[
        str | None, typer.Option(help="for calibration, like 8GiB: block by block if it must be")
    ] = None,
    json: Annotated[
        Path | None,
        values.output_option(help_="report; default OUT_DIR/compression.json", make_parents=True),
    ] = None,
    html: values.Html = None,
    plot: Annotated[
        Path | None,
        values.output_option(help_="PNG of rank and error per layer", make_parents=True),
    ] = None,
) -> None:
    """Factorize a model's linear layers and save it for from_pretrained."""
    import json as json_module

    from nmm_compiler.cli import models
    from nmm_compiler.compress import hf
    from nmm_compiler.compress.config import CompressionConfig
    from nmm_compiler.compress.teacher import remember
    from nmm_compiler.prediction.compressed import compress as run

    settings = CompressionConfig(
        ratio=ratio, rank=rank, method=method, allocation=allocation, budget=budget, align=align,
        sensitivity=sensitivity, sequential=sequential,
    )  # fmt: skip
    if config is not None:
        settings = read_config(config, settings)
    if factors and recover_steps:
        raise OptionTypeError(
            "factors", factors, "it without --recover: rounded factors are not trained"
        )
    if out_dir.exists() and not out_dir.is_dir():
        raise OptionTypeError("out_dir", str(out_dir), "a directory, new or old: this is a file")
    if recover_steps and text is None:
        raise CalibrationError("--recover needs text to train on; pass --text FILE")
    transformers = models.require_transformers("nmm compress")
    with Console(markup=False, stderr=True).status(Text(f"loading {model_dir}")):
        model, tokenizer = models.with_weights(model_dir)
    batches = None
    if text is not None:
        batches = read_batches(text, tokenizer, model, length, batch)
    original = remember(model, batches) if recover_steps else None
    transformers.logging.disable_progress_bar()
    dense = copy.deepcopy(model.config)

    report = run(
        model, settings, calibration=batches, include=include or None,
        exclude=exclude or None, target=target, tokens=tokens, workload=read_workload(workload),
        allow_slower=allow_slower, resume=resume, memory=memory, factors=factors,
    )  # fmt: skip
    show(str(report))
    figures: dict[str, Any] = {"compression": report.to_dict()}
    figures["compression"]["achieved_ratio"] = report.achieved_ratio
    if original is not None:
        from nmm_compiler.compress.recover import recover

        recovery = recover(model, batches, teacher=original, steps=recover_steps)
        show(recovery.summary())
        figures["recovery"] = recovery.to_dict()

    text_of_report = json_module.dumps(figures, indent=2)
    files = {"compression.json": text_of_report} if json is None else {}
    hf.save_pretrained(model, out_dir, tokenizer=tokenizer, files=files)
    for path in (json, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json is not None:
        write_text(json, text_of_report)
    json = json or out_dir / "compression.json"
    show(f"saved     {out_dir}\nfigures   {json}")
    if html is not None:
        from nmm_compiler.cli.predicted import predicted_parts
        from nmm_compiler.prediction.predict import predict

        try:
            whole: Any = predict(model, target, prompt=tokens, dense=dense)
        except NmmError as error:  # the page is about the factors, and says why this is not on it
            whole = error
        parts = [*report.page_parts(), *predicted_parts(whole)]
        write_html(f"{model_dir}, compressed", parts, html)
    if plot is not None:
        from nmm_compiler.compress.plot import plot_report

        show(f"plot      {plot_report(report, plot)}")


compress.__doc__ = f"{compress.__doc__}\n\n{_EPILOG}"


def read_workload(given: list[str] | None) -> dict[str, tuple[int, float]] | None:
    """Return the mix of calls that --workload names; OptionTypeError for what is none."""
    mix: dict[str, tuple[int, float]] = {}
    for text in given or ():
        name, _, numbers = text.partition("=")
        tokens, _, weight = numbers.partition(":")
        try:
            mix[name] = int(tokens), float(weight or 1)
        except ValueError:
            wanted = "NAME=TOKENS:WEIGHT, like decode=1:0.8"
            raise OptionTypeError("workload", text, wanted) from None
    return mix or None


def read_config(path: Path, options: CompressionConfig) -> CompressionConfig:
    """Return the CompressionConfig of a JSON file, which takes the place of the options.

    Raises OptionTypeError when it cannot be read, or one of the options is given beside it.
    """
    from nmm_compiler.compress.config import CompressionConfig

    given = [k for k, v in options.to_dict().items() if v != CompressionConfig().to_dict()[k]]
    if given:
        raise OptionTypeError(
            "config", str(path), f"it or --{', --'.join(given)}: put all of them into the file"
        )
    try:
        return CompressionConfig.from_json(path.read_text(encoding="utf-8"))
    except NmmError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise OptionTypeError(
            "config", str(path), f'JSON like {{"ratio": 0.2, "align": 64}} ({error})'
        ) from error


def read_batches(
    path: Path, tokenizer: Any, model: Any, length: int, batch: int
) -> list[dict[str, torch.Tensor]]:
    """Return calibration batches of a text file.

    For a causal language model the text is one stream, cut into sequences of `length` tokens; for
    others each line is a sequence, padded. Raises CalibrationError without a tokenizer or text.
    """
    import torch

    if tokenizer is None:
        raise CalibrationError(
            "--text needs a tokenizer, and the model's directory has none; save one there with "
            "tokenizer.save_pretrained"
        )
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"--text {path} cannot be read as UTF-8 text: {error}") from error
    if not lines:
        raise CalibrationError(f"--text {path} has no text; pass a file with some hundred lines")
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        ids = torch.tensor(tokenizer("\n".join(lines), truncation=False)["input_ids"])
        pieces = [piece for piece in ids.split(length) if len(piece) == length] or [ids]
        return [
            {"input_ids": torch.stack(pieces[i : i + batch])} for i in range(0, len(pieces), batch)
        ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    return [dict(tokenizer(lines[i : i + batch], **options)) for i in range(0, len(lines), batch)]
