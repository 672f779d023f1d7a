"""Keeps the reports of this process, and hands each to the user, to logs and to torch's trace."""

from __future__ import annotations

from collections import deque

from torch import fx

from nmm_compiler.backend.logs import log_report
from nmm_compiler.backend.report import CompileReport
from nmm_compiler.backend.report_page import add_to_page, forget_pages
from nmm_compiler.options import Options

_REPORTS_KEPT = 256
_reports: deque[CompileReport] = deque(maxlen=_REPORTS_KEPT)


def publish(
    report: CompileReport,
    options: Options,
    before: fx.GraphModule | None = None,
    after: fx.GraphModule | None = None,
) -> None:
    """Keep the report, hand it to the user, and put it into logs and torch's structured trace.

    before, after: the graph before and after the passes, if both are still in memory.
    """
    _reports.append(report)
    log_report(report, lambda: _code(before), lambda: _code(after))
    if isinstance(options.report, str):
        add_to_page(options.report, report)
    elif callable(options.report):
        options.report(report)
    elif options.report:
        print(report)


def _code(graph: fx.GraphModule | None) -> str:
    from nmm_compiler.passes.result import readable

    return "not known: compiled in another process" if graph is None else readable(graph)


def reports() -> list[CompileReport]:
    """Return the reports of the latest graphs, oldest first (at most 256, since the last reset)."""
    return list(_reports)


def last_report() -> CompileReport | None:
    """Return the report of the graph compiled last, or None."""
    return _reports[-1] if _reports else None


def forget() -> None:
    """Forget all reports, and begin their pages anew."""
    _reports.clear()
    forget_pages()
