"""`nmm explain`: what would be fused in a model, what not and why; as a page also what it becomes.

The page compiles the model: it has the graphs, each kernel with its timeline and source, and the
whole model's prediction. All that it says of a call is simulated, so that a call has one price on
it; without a page the closed form answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nmm_compiler.cli import models, values
from nmm_compiler.errors import NmmError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.outputs import write_text
from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Line, Part, Section

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
