"""`nmm explain`: what would be fused in a model, what not and why, what low rank would save."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from nmm_compiler.cli import models, values
from nmm_compiler.cli.show import show, write_html
from nmm_compiler.errors import NmmError, OptionTypeError
from nmm_compiler.outputs import write_text


def explain(
    model: values.Model,
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
    rules: Annotated[
        list[str] | None,
        typer.Option(
            help="FILE.py:name, a rule or a list of rules of your own; may be repeated",
            parser=values.refusing(models.check_rules),
            metavar="FILE.py:NAME",
        ),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="predict what it takes, and low-rank at ratio 0.2")
    ] = False,
    json: Annotated[
        Path | None, values.output_option(help_="also write the report as JSON here")
    ] = None,
    html: values.Html = None,
    repro: Annotated[
        Path | None,
        values.output_option("--repro", help_="write a script that rewrites one match and checks"),
    ] = None,
    match: Annotated[
        str | None, typer.Option(help="of --repro: the match's node or module; default: the first")
    ] = None,
) -> None:
    """Dry run of the passes over every graph of a model; nothing is compiled.

    Example: nmm explain all-MiniLM-L6-v2
    """
    if match is not None and repro is None:
        raise OptionTypeError("match", match, "it with --repro FILE, which it is for")
    from nmm_compiler.cli.predicted import predict_loaded, predicted_parts
    from nmm_compiler.passes.pipeline import explain as run

    with Console(markup=False, stderr=True).status(Text(f"loading {model}")):
        loaded, inputs = models.load(model, tokens)
    with Console(markup=False, stderr=True).status("tracing and matching"):
        own = [rule for name in rules or () for rule in models.rules_of(name)]
        report = run(loaded, dict(inputs), options={"target": target, "rules": own})
    show(str(report))
    made: Any = None
    if predict or html is not None:
        dense = not any(match.rewritten for match in report.matches)
        ratio = 0.2 if dense and report.opportunities else None
        with Console(markup=False, stderr=True).status("predicting the whole model"):
            try:
                made = predict_loaded(model, loaded, inputs, target, ratio)
            except NmmError as error:
                if predict:
                    raise
                made = error  # the page is about the graph, and says why this is not on it
    if predict:
        show(f"with ratio {ratio}: " * (ratio is not None) + made.headline())
    elif report.opportunities and (Path(model) / "config.json").is_file():
        show(f"next: nmm plan {model} says what low rank would gain, for whole models")
    if json is not None:
        write_text(json, report.to_json(indent=2))
        show(f"report: {json}")
    if repro is not None:
        write_text(repro, report.reproducer(match, target=target))
        show(f"script: {repro}")
    if html is not None:
        parts = [*report.page_parts(), *predicted_parts(made)]
        write_html(f"{model} on {target}", parts, html)
