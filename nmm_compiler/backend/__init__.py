"""`torch.compile(model, backend="nmm")`: start at `compile_graph.py`, which reads top to bottom."""

from nmm_compiler.backend.compile_graph import last_report, nmm, reports, reset

__all__ = ["last_report", "nmm", "reports", "reset"]
