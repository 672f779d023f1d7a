"""Writes each compiled graph to logs and to torch's structured trace, which tlparse shows.

TORCH_LOGS="nmm" writes one line for each graph and "+nmm" the whole report; nmm_graphs, nmm_kernels
and nmm_schedules write these artefacts. TORCH_TRACE=DIRECTORY gets all of them and the HTML report.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._logging._internal import getArtifactLogger, trace_log

from nmm_compiler import log_names
from nmm_compiler.backend.report import CompileReport
from nmm_compiler.backend.report_page import compile_parts
from nmm_compiler.errors import OutputError
from nmm_compiler.outputs import write_text
from nmm_compiler.report.page import page
from nmm_compiler.report.parts import Line
from nmm_compiler.report.text import as_text

log_names.watch()  # the loggers below need the names
_log = logging.getLogger("nmm_compiler.backend")
_artifacts = {name: getArtifactLogger("nmm_compiler.backend", name) for name in log_names.ARTIFACTS}


def log_report(report: CompileReport, before: Callable[[], str], after: Callable[[], str]) -> None:
    """Log what was done to one graph. before, after: functions that return the graph's code."""
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report)
    rewritten = bool(report.matches)
    if rewritten and _artifacts["nmm_graphs"].isEnabledFor(logging.DEBUG):
        text = f"graph {report.graph} before\n{before()}\n\nafter\n{after()}"
        _artifacts["nmm_graphs"].debug("%s", text)
    for kernel in report.built:
        if _artifacts["nmm_kernels"].isEnabledFor(logging.DEBUG):
            _artifacts["nmm_kernels"].debug("%s\n%s", kernel.name, kernel.source)
        if _artifacts["nmm_schedules"].isEnabledFor(logging.DEBUG):
            _artifacts["nmm_schedules"].debug("%s\n%s", kernel.name, schedules(kernel))
    _trace("nmm_compile_report", "json", report.to_json)
    if not trace_log.handlers:
        return
    if rewritten:
        _trace("nmm_graph_before", "string", before)
        _trace("nmm_graph_after", "string", after)
    for kernel in report.built:
        name = f"nmm_kernel_{kernel.spec.short().replace(' ', '_')}"
        _trace(name, "string", functools.partial(getattr, kernel, "source"))
    if report.built:
        _trace("nmm_schedules", "string", lambda: "\n\n".join(map(schedules, report.built)))
    title = f"nmm_compiler: graph {report.graph}"
    text = page(title, compile_parts([report]))
    _trace("nmm_report.html", "string", lambda: text)
    _link(f"nmm_report_{report.graph}", text)


def _link(name: str, text: str) -> None:
    """Write a page beside the trace and link to it: tlparse shows artefacts as plain text only."""
    places = (getattr(handler, "root_dir", None) for handler in trace_log.handlers)
    folder = next(filter(None, places), None)
    if folder is None:
        return
    place = Path(folder).resolve() / f"{name}_of_{os.getpid()}.html"
    try:
        url = write_text(place, [text]).as_uri()
    except OutputError as error:
        _log.warning("%s", error)
        return
    torch._logging.trace_structured("link", metadata_fn=lambda: {"name": name, "url": url})


def schedules(kernel: Any) -> str:
    """Return the chosen schedule of a kernel and the runners-up as a table."""
    from nmm_compiler.codegen.choice_table import schedule_table
    from nmm_compiler.codegen.choose import choose

    return as_text([Line(kernel.spec.short()), schedule_table(choose(kernel.spec, kernel.target))])


def _trace(name: str, encoding: str, payload: Callable[[], str]) -> None:
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload
    )
