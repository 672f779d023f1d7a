"""`nmm explain`: what would be fused in a model, what not and why, what factorizing would save."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def explain(
    model: Annotated[str, typer.Argument(help="DIRECTORY, FILE.py:function or all-MiniLM-L6-v2")],
    tokens: Annotated[int, typer.Option(help="tokens of the example input")] = 64,
    target: Annotated[str, typer.Option(help="trn1, trn2 or trn3")] = "trn2",
    json: Annotated[Path | None, typer.Option(help="also write the report as JSON here")] = None,
) -> None:
    """Dry run of the passes over every graph of a model; nothing is compiled.

    Example: nmm explain all-MiniLM-L6-v2
    """
    import nmm_compiler
    from nmm_compiler.cli import models

    console = Console()
    with console.status(f"loading {model}"):
        loaded, inputs = models.load(model, tokens)
    with console.status("tracing and matching"):
        named: dict[str, Any] = dict(inputs)
        report = nmm_compiler.explain(loaded, options={"target": target}, **named)
    console.print(str(report), markup=False, soft_wrap=True)
    if json is not None:
        json.write_text(report.to_json(indent=2))
        console.print(f"report: {json}")
