"""`nmm plan`: a model's predicted latency, dense and low-rank, before a device is rented."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.errors import OptionTypeError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.report.page import write_page


def _stack(name: str) -> str:
    """Return the name of a stack, without a version that no figure is told apart by."""
    return str(pkgutil.resolve_name("nmm_compiler.prediction.stacks:stack_named")(name).name)


def plan(
    model: values.Model,
    target: values.Targets = ("trn2",),
    forms: Annotated[
        Sequence[str] | None,
        values.listed(str, "FORMS", "of the weights: bf16, fp8, lowrank:0.2, mxfp4+32fp8, ..."),
    ] = None,
    ratio: Annotated[
        Sequence[float] | None,
        values.listed(values.share, "SHARES", "low rank alone, instead of --forms"),
    ] = None,
    batch: Annotated[Sequence[int], values.listed(values.size, "SIZES", "sequences at once")] = (
        1,
    ),
    prompt: Annotated[
        Sequence[int], values.listed(values.size, "SIZES", "tokens of the prompt")
    ] = (512,),
    context: Annotated[
        Sequence[int], values.listed(values.size, "SIZES", "tokens in the cache")
    ] = (2048,),
    tp: values.Cores = (1,),
    lnc: Annotated[int, typer.Option(min=1, max=2, help="physical cores of a core, 1 or 2")] = 1,
    weights: Annotated[
        str | None,
        values.choice_option(
            "format",
            "nmm_compiler.options:WEIGHTS",
            "stored matrices: also float8_e4m3",
        ),
    ] = None,
    include: values.Include = None,
    exclude: values.Exclude = None,
    price: Annotated[
        str,
        values.choice_option(
            "price",
            "nmm_compiler.prices.kernel:PRICES",
            "of a kernel: simulated, tuned (nmm build --search), closed_form",
        ),
    ] = "simulated",
    stack: Annotated[
        str,
        values.option(_stack, "NAME", "what runs the programs: launch gaps, host time"),
    ] = "own",
    measured: Annotated[
        Path | None,
        values.input_option("your time a token: milliseconds, or a profiler's JSON"),
    ] = None,
    routing: Annotated[
        Path | None,
        values.input_option("how often each expert was chosen: a JSON list of counts"),
    ] = None,
    html: values.Html = None,
) -> values.Answer:
    """Predict a model's latency in each form of its weights, without weights or a device.

    Example: nmm plan llama-3.1-8b --target trn2,trn3 --forms bf16,fp8,lowrank:0.2,mxfp4+32fp8
    """
    from nmm_compiler.prediction.plan import read_measured

    if forms and ratio:
        raise OptionTypeError("ratio", ratio, "it as a form, e.g. --forms bf16,lowrank:0.2")
    own = None
    if measured is not None:
        own = read_measured(measured.read_text(errors="replace"), str(measured))
    models.require_transformers("a model without its weights")
    from nmm_compiler.prediction.experts import read_routing
    from nmm_compiler.prediction.forms import DEFAULT
    from nmm_compiler.prediction.plan import plan as run

    low_rank = ratio or ((0.2,) if weights else ())
    chosen = forms or (["bf16", *(f"lowrank:{one:g}" for one in low_rank)] if low_rank else DEFAULT)
    with steps(f"reading {model}") as step:
        planned = run(
            models.described(model),
            targets=target,
            forms=chosen,
            batches=batch,
            prompts=prompt,
            contexts=context,
            tps=tp,
            lnc=lnc,
            weights=weights,
            include=include,
            exclude=exclude,
            price=price,
            stack=stack,
            measured=own,
            routing=None if routing is None else read_routing(routing),
            progress=step,
        )
    said = [str(planned)]
    if html is not None:
        said.append(f"report: {write_page(f'plan of {planned.name}', planned.parts(), html)}")
    return values.Answer(planned.to_dict(), said)
