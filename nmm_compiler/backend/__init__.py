"""`torch.compile(model, backend="nmm")`: start at `compile_graph.py`, which reads top to bottom."""

from nmm_compiler.backend.compile_graph import nmm, reset
from nmm_compiler.backend.publish import last_report, reports

__all__ = ["last_report", "nmm", "reports", "reset"]
