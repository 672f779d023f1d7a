"""Each test starts with torch's compiler and this package's tables empty, on one thread.

Kernels are built in this process: tests/codegen and tests/scale start processes for them.
"""

import pytest
import torch

from nmm_compiler.backend import compile_graph as backend
from nmm_compiler.codegen import build_many


@pytest.fixture(autouse=True)
def fresh_torch(monkeypatch):
    monkeypatch.setattr(build_many, "cores", lambda: 1)
    torch._dynamo.reset()
    backend.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
