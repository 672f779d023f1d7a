"""`nmm report`: compiles a model for a target and writes everything about it as one HTML file."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nmm_compiler.cli import values
from nmm_compiler.cli.progress import steps
from nmm_compiler.cli.show import show, show_json, write_html
from nmm_compiler.errors import NmmError
from nmm_compiler.report.parts import Grid, Line, Part, Section

if TYPE_CHECKING:
    from nmm_compiler.backend.report import CompileReport
    from nmm_compiler.codegen.build import Kernel

_PHASES_OF_KERNELS = 12


def report(
    model: values.Model,
    html: Annotated[Path, values.output_option("--html", "-o", help_="the page to write")] = Path(
        "nmm-report.html"
    ),
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
    ratio: Annotated[
        float | None,
        values.share_option("factorize first, this share of parameters removed"),
    ] = None,
    as_json: values.AsJson = False,
) -> None:
    """Compile a model and write a page: graphs, kernels, timelines, sources, refusals, predictions.

    Nothing runs on a device; the rest of the model is left to PyTorch's eager mode. All latencies
    are the simulator's predictions.

    Example: nmm report all-MiniLM-L6-v2 --ratio 0.2 --html report.html
    """
    import torch

    from nmm_compiler.backend.report_page import compile_parts
    from nmm_compiler.cli import models
    from nmm_compiler.cli.predicted import predict_loaded, predicted_parts

    reports: list[CompileReport] = []
    first: list[Part] = []
    with steps(f"loading {model}") as step:
        loaded, inputs = models.load(model, tokens)
        step("predicting the whole model")
        try:
            whole: Any = predict_loaded(model, loaded, inputs, target, ratio)
        except NmmError as error:  # a page without it is still a page, and says so
            whole = error
        if ratio is not None:
            from nmm_compiler.compress.apply import compress

            step("factorizing")
            compressed = compress(loaded, ratio, progress=False)
            first = [Section("compression", tuple(compressed.page_parts()), folded=True)]
        step("compiling, building kernels")
        options: Any = {"target": target, "report": reports.append, "inner": "eager"}
        torch._dynamo.reset()
        with torch.no_grad(), models.foreign(model.partition(":")[0], "running it raised"):
            torch.compile(loaded, backend="nmm", options=options)(**inputs)
        kernels = [kernel for one in reports for kernel in one.built]
        calls = {line.name: line.calls for one in reports for line in one.kernels}
        rows = []
        for i, kernel in enumerate(kernels[:_PHASES_OF_KERNELS]):
            step("predicting prefill and decode", i, min(len(kernels), _PHASES_OF_KERNELS))
            rows.append(_phases(kernel, calls[kernel.name], target))
    table = [
        Section("each kernel against smaller calls and the fastest dense way", (_table(rows),))
    ]
    parts = compile_parts(reports)
    parts = [*parts[:1], *predicted_parts(whole), *table, *first, *parts[1:]]
    write_html(f"{model} on {target}", parts, html, said=not as_json)
    if as_json:
        found = None if isinstance(whole, NmmError) else whole.to_dict()
        show_json({"graphs": [one.to_dict() for one in reports], "phases": rows, "model": found})
    else:
        show([Line(one.summary()) for one in reports])


def _phases(kernel: Kernel, calls: int, target: str) -> dict[str, Any]:
    """Return a kernel's predicted latency, for its tokens and for one token."""
    from nmm_compiler.prices.ways import ways

    given: Any = kernel.spec
    row: dict[str, Any] = {"kernel": given.short(), "calls": calls}
    for phase, spec in (("", given), ("decode_", dataclasses.replace(given, m=1))):
        times = ways(spec, target, source="simulated")
        each = {"fused": times.fused, "separate": times.separate, "dense": times.dense}
        row |= {
            f"{phase}{way}": None if us is None or math.isinf(us) else us
            for way, us in each.items()
        }
    return row


def _table(rows: list[dict[str, Any]]) -> Grid:
    figures = ("fused", "separate", "dense", "decode_fused", "decode_separate", "decode_dense")
    cells = [
        (row["kernel"], row["calls"],
         *("-" if row[name] is None else f"{row[name]:.1f}" for name in figures))
        for row in rows
    ]  # fmt: skip
    head = ("kernel", "calls", "fused us", "separate us", "dense us", "1 token: fused us",
            "1 token: separate us", "1 token: dense us")  # fmt: skip
    return Grid.of(head, cells, right=head[1:])
