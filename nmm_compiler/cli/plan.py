"""`nmm plan`: a model's predicted latency, dense and low-rank, before a device is rented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.progress import steps
from nmm_compiler.cli.show import show, write_html
from nmm_compiler.options import WEIGHTS


def _prices() -> Sequence[str]:
    from nmm_compiler.prices.kernel import PRICES

    return tuple(PRICES)


def _stacks() -> Sequence[str]:
    from nmm_compiler.prediction.stacks import STACKS

    return tuple(STACKS)


def plan(
    model: values.Model,
    target: values.Targets = "trn2",
    ratio: Annotated[str, values.list_option("share", "shares of the parameters")] = "0.1,0.2",
    batch: Annotated[str, values.list_option("size", "sequences at once")] = "1",
    prompt: Annotated[str, values.list_option("size", "tokens of the prompt")] = "512",
    context: Annotated[str, values.list_option("size", "tokens in the cache")] = "2048",
    tp: values.Cores = "1",
    lnc: Annotated[int, typer.Option(min=1, max=2, help="physical cores of a core, 1 or 2")] = 1,
    weights: Annotated[
        str | None,
        values.choice_option(
            "format", lambda: WEIGHTS, "stored matrices: also float8_e4m3 or int8"
        ),
    ] = None,
    include: Annotated[list[str] | None, typer.Option(help="only layers like mlp, q_proj")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="never these layers")] = None,
    price: Annotated[
        str,
        values.choice_option(
            "price",
            _prices,
            "of a kernel: simulated, tuned (nmm build --search), closed_form",
        ),
    ] = "simulated",
    stack: Annotated[
        str,
        values.choice_option("stack", _stacks, "what runs the programs: launch gaps, host time"),
    ] = "own",
    measured: Annotated[
        Path | None,
        typer.Option(help="your time a token: a file of milliseconds, or a profiler's JSON"),
    ] = None,
    as_json: values.AsJson = False,
    html: values.Html = None,
) -> None:
    """Predict a model's latency, dense and low-rank, without weights or a device.

    Example: nmm plan llama-3.2-1b --target trn2,trn3 --ratio 0.1,0.2 --batch 1,8 --tp 1,4
    """
    from nmm_compiler.cli import models
    from nmm_compiler.prediction.measured import read_measured
    from nmm_compiler.prediction.plan import plan as run

    models.require_transformers("a model without its weights")

    def listed(text: str, kind: Callable[[str], Any]) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    own = None if measured is None else read_measured(measured.read_text(), str(measured))
    with steps(f"reading {model}") as step:
        made = run(
            models.described(model),
            targets=listed(target, str),
            ratios=listed(ratio, float),
            batches=listed(batch, int),
            prompts=listed(prompt, int),
            contexts=listed(context, int),
            tps=listed(tp, int),
            lnc=lnc,
            weights=weights,
            include=include,
            exclude=exclude,
            price=price,
            stack=stack,
            measured=own,
            progress=step,
        )
    print(made.to_json(indent=2)) if as_json else show(str(made))
    if html is not None:
        write_html(f"plan of {made.name}", made.parts(), html, said=not as_json)
