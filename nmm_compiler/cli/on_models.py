"""What a model becomes: `nmm explain` its graphs, `nmm plan` its time, `nmm export` its MLIR.

The page of explain compiles the model: it has the graphs, each kernel with its timeline and source,
and the whole model's prediction. All that it says of a call is simulated, so that a call has one
price on it; without a page the closed form answers at once. A plan is made before a device is
rented. An export writes each fused kernel as one call, with its source beside it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.errors import NmmError, OptionTypeError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.outputs import write_text
from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Grid, Line, Part, Section

if TYPE_CHECKING:
    from nmm_compiler.backend.report import CompileReport


def explain(
    model: values.Model,
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
    rules: Annotated[
        list[str] | None,
        values.option(
            models.check_rules, "FILE.py:NAME", "a rule or a list of rules of your own; may repeat"
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        values.option(values.share, "SHARE", "factorize first, this share of parameters removed"),
    ] = None,
    html: values.Html = None,
    repro: Annotated[
        Path | None,
        values.output_option(help_="write a script that rewrites the first match and checks it"),
    ] = None,
) -> values.Answer:
    """Dry run of the passes over every graph of a model; nothing is compiled.

    With --html the model is compiled too, for a page: graphs, kernels, timelines, sources,
    refusals, predictions. Nothing runs on a device; all latencies are the simulator's predictions.

    Example: nmm explain all-MiniLM-L6-v2

    Example: nmm explain llama-3.2-1b --ratio 0.2 --html report.html
    """
    from nmm_compiler.passes.pipeline import explain as run

    page: list[Part] = []
    with steps(f"loading {model}") as step, models.foreign(model, "running it raised"):
        loaded, inputs = models.load(model, tokens)
        own = [rule for name in rules or () for rule in models.rules_of(name)]
        before = None
        if ratio is not None:
            from nmm_compiler.lowrank_models.apply import compress
            from nmm_compiler.lowrank_models.meta_copies import without_data

            step("factorizing")
            before = without_data(loaded)
            compressed = compress(loaded, ratio, target=target, workload=tokens)
            page = [Section("compression", tuple(compressed.page_parts()), folded=True)]
        if html is not None:
            step("predicting the whole model")
            page = [_predicted(model, loaded, before, inputs, target), *page]
        step("tracing and matching")
        options: Any = {"target": target, "rules": [*own, *(["+simulated"] if html else [])]}
        result = run(loaded, dict(inputs), options=options)
        if html is not None:
            step("compiling, building kernels")
            top, *rest = _compiled(loaded, inputs, options)
            matched = Section("what is fused and what is not", tuple(result.parts()))
            page = [top, *page, matched, *rest]
    if repro is not None:
        write_text(repro, result.reproducer(target=target))
    said = [str(result)]
    if result.opportunities and (Path(model) / "config.json").is_file():
        said.append(f"next: nmm plan {model} says what low rank would gain, for whole models")
    if html is not None:
        said.append(f"report: {write_page(f'{model} on {target}', page, html)}")
    return values.Answer(result.to_dict(), said)


def _compiled(loaded: Any, inputs: dict[str, Any], options: dict[str, Any]) -> list[Part]:
    """Compile and run a model; return what the page says of its graphs and kernels."""
    import torch

    from nmm_compiler.backend.report import compile_parts

    reports: list[CompileReport] = []
    torch._dynamo.reset()
    given = {**options, "report": reports.append, "inner": "eager"}
    with torch.no_grad():
        torch.compile(loaded, backend="nmm", options=given)(**inputs)
    return compile_parts(reports)


def _predicted(name: str, model: Any, before: Any, inputs: dict[str, Any], target: str) -> Part:
    """Return the section with the whole model's prediction, or a line that says why it is not.

    A directory is predicted by its configuration, which knows the dense model that a low-rank one
    was; the others for the inputs that they run. before: the model that was factorized, if it was;
    what is predicted is then the very model that the page compiles.
    """
    from nmm_compiler.lowrank_models.meta_copies import without_data
    from nmm_compiler.prediction.predict import predict

    setting: dict[str, Any] = {"dense": before, "norms": False}  # as the page compiles it
    generates = getattr(model, "can_generate", bool)()
    first = next((value for value in inputs.values() if hasattr(value, "shape")), None)
    if first is not None:
        sizes = first.shape[:-1] if first.is_floating_point() else first.shape
        if 1 <= len(sizes) <= 2:  # [tokens] or [sequences, tokens]
            setting |= {"batch": sizes[0] if len(sizes) == 2 else 1, "prompt": sizes[-1]}
    given = model if before is None else without_data(model)
    if before is None and generates and (Path(name) / "config.json").is_file():
        dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
        given = name
        setting |= {"dtype": str(dtypes[0]).removeprefix("torch.") if dtypes else None}
    elif not generates:
        setting |= {"inputs": inputs}
    try:
        parts = predict(given, target, **setting).parts()
    except NmmError as error:  # a page without it is still a page, and says so
        return Line(f"the whole model is not predicted: {error}", "note")
    return Section("the whole model, predicted", tuple(parts))


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


def export(
    model: values.Model,
    output: Annotated[
        Path, values.output_option("--output", "-o", help_="the .mlir file to write")
    ],
    dialect: Annotated[
        str,
        values.choice_option(
            "dialect", "nmm_compiler.mlir.lower:DIALECTS", "torch, linalg or stablehlo"
        ),
    ] = "stablehlo",
    kernels: Annotated[
        str,
        values.choice_option(
            "way", "nmm_compiler.mlir.lower:MODES", "call, or inline (reference bodies)"
        ),
    ] = "call",
    weights: Annotated[
        str,
        values.choice_option(
            "way", "nmm_compiler.mlir.lower:WEIGHTS", "args, or resources (in the module)"
        ),
    ] = "args",
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
) -> values.Answer:
    """Rewrite a model and write it as MLIR, with a manifest and the NKI source of each kernel.

    Example: nmm export all-MiniLM-L6-v2 --dialect stablehlo -o encoder.mlir
    """
    from nmm_compiler.mlir.export import export_mlir

    with steps(f"loading {model}"):
        loaded, inputs = models.load(model, tokens)
    if any(p.is_meta for p in loaded.parameters()):  # a public name: shapes are all that args need
        if weights != "args":
            raise OptionTypeError("weights", weights, f"args: {model} is known by its shapes")
        loaded = loaded.to_empty(device="cpu")
        inputs = models.example_inputs(model, loaded, tokens)
    with steps("tracing, rewriting, lowering"), models.foreign(model, "running it raised"):
        module = export_mlir(
            loaded,
            inputs,
            dialect=dialect,
            kernels=kernels,
            weights=weights,
            options={"target": target},
        )
    written = module.save(output)
    rows = [
        (kernel.name, len(kernel.calls), len(kernel.sources), kernel.family)
        for kernel in module.kernels
    ]
    table = Grid.of(("kernel", "calls", "sources", "family"), rows, right=("calls", "sources"))
    nothing = f"nothing was fused; `nmm explain {model}` says why"
    files = [f"wrote {path}" for path in written]
    return values.Answer(module.manifest(), [[table] if rows else nothing, *files])
