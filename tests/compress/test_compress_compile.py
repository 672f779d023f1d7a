"""A compressed model through the backend: every low-rank layer is in one kernel call."""

import pytest
import torch
from compress_models import stack

from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import LowRankLinear


def test_every_low_rank_layer_is_in_one_kernel_call():
    pytest.importorskip("nmm_compiler.backend.compile_graph")
    model = stack()
    compress(model, 0.3, align=4)
    layers = [m for m in model.modules() if isinstance(m, LowRankLinear)]
    reports = []
    options = {"inner": "eager", "kernels": "lazy", "report": reports.append}
    compiled = torch.compile(model, backend="nmm", options=options)
    x = torch.randn(5, 32)
    with torch.no_grad():
        expected = model(x)
        difference = (compiled(x) - expected).norm()
    (report,) = reports
    assert report.chains == len(layers) == 8  # q and k, which share x, are one call together
    assert len(report.matches) == 6
    # The toy's q * sigmoid(k) is no gate that a kernel computes; its products are in a call anyway.
    assert all("gate with the activation sigmoid" in r.reason for r in report.declined)
    # Sixteen products deep, each summing at most 64 terms in another order.
    assert difference <= 16 * 64**0.5 * torch.finfo(torch.float32).eps * 4 * expected.norm()
