"""Op calls through emitted kernels in the simulator: empty tables, and what is launched."""

import torch

from nmm_compiler.ops import registration
from nmm_compiler.runtime import executor
from nmm_compiler.runtime.kernels import KERNELS
from nmm_compiler.runtime.weights import PACKS


def with_empty_tables():
    """Empty the tables of kernels and packed weights around a yield, and seed torch."""
    torch.manual_seed(0)
    KERNELS.clear()
    PACKS.clear()
    yield
    KERNELS.clear()
    PACKS.clear()


def noted_launches(monkeypatch, noted=lambda kernel: kernel):
    """Return a list that gets what `noted` makes of each kernel that the simulator runs."""
    seen = []
    real = executor._launch_in_simulator

    def spy(kernel, operands):
        seen.append(noted(kernel))
        return real(kernel, operands)

    monkeypatch.setattr(registration.EXECUTORS["simulator"], "launcher", spy)
    return seen
