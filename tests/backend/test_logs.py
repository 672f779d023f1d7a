"""TORCH_LOGS, TORCH_TRACE with tlparse and NMM_PRINT_KERNELS."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, ran
from torch._logging._internal import trace_log
from toy_models import Pair

from nmm_compiler.backend import report
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import LowRankSpec

PROGRAM = """
import logging, sys, torch
u, v = torch.randn(64, 16), torch.randn(16, 48)
f = torch.compile(lambda x: x @ u @ v, backend="nmm", options={"inner": "eager"}, dynamic=False)
import nmm_compiler
f(torch.randn(8, 64))
print("LESS", file=sys.stderr)
for name in [one for one in logging.root.manager.loggerDict if one.startswith("nmm_compiler")]:
    logging.getLogger(name).setLevel(logging.INFO)  # as without the plus
torch._logging._internal.trace_log.handlers.clear()  # and without a trace
f(torch.randn(9, 64))
assert "nmm_compiler.backend.ahead_of_time" not in sys.modules  # torch 2.9 lacks what it imports
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A run under TORCH_LOGS and TORCH_TRACE: what it said, more first, and where its trace is."""
    path = tmp_path_factory.mktemp("traced") / "program.py"
    path.write_text(PROGRAM)
    trace = path.parent / "trace"
    logs = {"TORCH_LOGS": "+nmm_compiler", "TORCH_TRACE": str(trace)}
    return ran(path, PYTHONPATH=str(ROOT), **logs).stderr.split("LESS"), trace


def test_torch_logs_has_a_line_for_each_graph(traced):
    (_, said), _ = traced
    assert "1 chain rewritten as 1 call" in said
    assert "def forward" not in said


def test_torch_logs_has_all_texts_of_a_graph_when_asked_for_more(traced):
    (said, _), _ = traced
    assert "import nki.isa as nisa" in said
    assert "torch.ops.nmm.lowrank_matmul" in said
    assert "closed form" in said


def test_tlparse_shows_the_artefacts(traced, tmp_path):
    tlparse = Path(sys.executable).parent / "tlparse"
    if not tlparse.is_file():
        pytest.skip("tlparse is not installed: pip install tlparse")
    _, trace = traced
    (log,), (page,) = trace.glob("*.log"), trace.glob("*.html")
    done = subprocess.run(
        [str(tlparse), str(log), "-o", str(tmp_path / "out"), "--no-browser"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for wanted in ("nmm_compile_report", "nmm_graph_before", "nmm_graph_after", "nmm_schedules",
                   "nmm_report", "nmm_kernel_lowrank"):  # fmt: skip
        assert any(name.startswith(wanted) for name in names), (wanted, names)
    index = (tmp_path / "out" / "index.html").read_text()
    assert f'href="{page.as_uri()}"' in index, "the report opens as a page"
    assert "<svg" in page.read_text()
    shutil.rmtree(tmp_path / "out")


def test_a_page_is_made_for_torchs_own_trace_alone(monkeypatch):
    """Not for what listens to its logger: a page takes seconds of predictions."""
    monkeypatch.setattr(report, "compile_parts", None)
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()])
    options = {"inner": "eager", "kernels": "lazy"}
    torch.compile(Pair(16, 4, 8), backend="nmm", options=options)(torch.zeros(2, 16))
    assert report.last_report().chains == 1


def test_print_kernels_prints_the_source_of_each_kernel_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NMM_PRINT_KERNELS", "1")
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path))
    spec = LowRankSpec(m=8, k=80, r=16, n=112)
    source = build_kernel(spec).source
    build_kernel(spec)
    assert capsys.readouterr().err.count(source) == 1
