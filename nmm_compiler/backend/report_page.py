"""`options={"report": "out.html"}`: one page of all graphs that were compiled with this option.

The page is written again after each graph, whole or not at all, so it can be read at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nmm_compiler.backend.kernel_parts import kernel_parts
from nmm_compiler.backend.report import CompileReport
from nmm_compiler.report.page import write_page
from nmm_compiler.report.parts import Part, Section

_pages: dict[str, list[CompileReport]] = {}


def add_to_page(path: str, report: CompileReport) -> Path:
    """Write the page of `path` with one more report. Raises OutputError."""
    found = _pages.setdefault(path, [])
    found.append(report)
    return write_page("nmm_compiler report", compile_parts(found), path)


def forget_pages() -> None:
    """Forget the graphs of all pages; torch._dynamo.reset() calls this."""
    _pages.clear()


def compile_parts(reports: Sequence[CompileReport]) -> list[Part]:
    """Return the parts of a page: each graph's report and pictures, then all kernels once."""
    kernels = {str(kernel.path): kernel for report in reports for kernel in report.built}
    if len(reports) == 1:
        (report,) = reports
        return [*report.parts(), *report.pictures, *kernel_parts(list(kernels.values()))]
    shown: list[Part] = [
        Section(f"graph {report.graph}", (*report.parts(), *report.pictures)) for report in reports
    ]
    return [*shown, *kernel_parts(list(kernels.values()))]
