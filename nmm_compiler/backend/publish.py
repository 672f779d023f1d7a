"""Keeps the reports of this process and hands each to the user, to logs and to torch's trace.

`options={"report": "out.html"}` is one page of all graphs that were compiled with this option. It
is written again after each graph, whole or not at all. TORCH_LOGS="nmm_compiler" logs a line for
each graph, "+nmm_compiler" also the report, the graph before and after, the kernels' sources and
their schedules. TORCH_TRACE=DIRECTORY gets all of them and the page, which tlparse shows.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._logging._internal import trace_log

from nmm_compiler.backend.report import CompileReport, kernel_parts
from nmm_compiler.errors import OutputError
from nmm_compiler.options import Options
from nmm_compiler.outputs import write_text
from nmm_compiler.report.page import page, write_page
from nmm_compiler.report.parts import Line, Part, Section
from nmm_compiler.report.text import as_text

_log = logging.getLogger("nmm_compiler.backend")
_REPORTS_KEPT = 256
_reports: deque[CompileReport] = deque(maxlen=_REPORTS_KEPT)
_pages: dict[str, list[CompileReport]] = {}


def reports() -> list[CompileReport]:
    """Return the reports of the latest graphs, oldest first (at most 256, since the last reset)."""
    return list(_reports)


def last_report() -> CompileReport | None:
    """Return the report of the graph compiled last, or None."""
    return _reports[-1] if _reports else None


def forget() -> None:
    """Forget all reports, and begin their pages anew; torch._dynamo.reset() calls this."""
    _reports.clear()
    _pages.clear()


def publish(
    report: CompileReport,
    options: Options,
    before: fx.GraphModule | None = None,
    after: fx.GraphModule | None = None,
) -> None:
    """Keep the report, hand it to the user, and put it into logs and torch's structured trace.

    before, after: the graph before and after the passes, if both are still in memory. Raises
    OutputError for a page that cannot be written.
    """
    _reports.append(report)
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report)
        for name, text in _artifacts(report, before, after):
            _log.debug("%s of graph %d\n%s", name, report.graph, text)
    _artifact("nmm_compile_report", report.to_json, "json")
    if trace_log.handlers:
        _trace(report, before, after)
    if isinstance(options.report, str):
        shown = _pages.setdefault(options.report, [])
        shown.append(report)
        write_page("nmm_compiler report", compile_parts(shown), options.report)
    elif callable(options.report):
        options.report(report)
    elif options.report:
        print(report)


def compile_parts(reports: Sequence[CompileReport]) -> list[Part]:
    """Return the parts of a page: each graph's report and pictures, then all kernels once."""
    kernels = {str(kernel.path): kernel for report in reports for kernel in report.built}
    each = [(*report.parts(), *report.pictures) for report in reports]
    shown: list[Part] = list(each[0])
    if len(each) > 1:
        titles = (f"graph {report.graph}" for report in reports)
        shown = [Section(title, parts) for title, parts in zip(titles, each, strict=True)]
    return [*shown, *kernel_parts(list(kernels.values()))]


def _artifacts(
    report: CompileReport, before: fx.GraphModule | None, after: fx.GraphModule | None
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the graph before and after, each kernel and all schedules."""
    from nmm_compiler.codegen.choice_table import schedule_table
    from nmm_compiler.codegen.choose import choose
    from nmm_compiler.passes.result import readable

    if report.matches and before is not None and after is not None:
        yield "nmm_graph_before", readable(before)
        yield "nmm_graph_after", readable(after)
    for kernel in report.built:
        yield f"nmm_kernel_{kernel.spec.short().replace(' ', '_')}", kernel.source
    if report.built:
        tables = (
            as_text([Line(one.spec.short()), schedule_table(choose(one.spec, one.target))])
            for one in report.built
        )
        yield "nmm_schedules", "\n\n".join(tables)


def _artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    about = {"name": name, "encoding": encoding}
    torch._logging.trace_structured("artifact", metadata_fn=lambda: about, payload_fn=text)


def _trace(report: CompileReport, before: Any, after: Any) -> None:
    """Write all of a graph's texts to torch's structured trace, and its page beside it.

    tlparse shows artefacts as plain text only, so the page is a file that the trace links to.
    """
    shown = page(f"nmm_compiler: graph {report.graph}", compile_parts([report]))
    for name, text in (*_artifacts(report, before, after), ("nmm_report.html", shown)):
        _artifact(name, text.__str__)
    places = (getattr(handler, "root_dir", None) for handler in trace_log.handlers)
    folder = next(filter(None, places), None)
    if folder is not None:
        name = f"nmm_report_{report.graph}"
        place = Path(folder).resolve() / f"{name}_of_{os.getpid()}.html"
        try:
            link = {"name": name, "url": write_text(place, [shown]).as_uri()}
        except OutputError as error:
            _log.warning("%s", error)
        else:
            torch._logging.trace_structured("link", metadata_fn=lambda: link)
