"""Op calls through emitted kernels in the simulator: empty tables, and what is launched."""

from nmm_compiler.ops import registration
from nmm_compiler.runtime import executor


def noted_launches(monkeypatch, noted=lambda kernel: kernel):
    """Return a list that gets what `noted` makes of each kernel that the simulator runs."""
    seen = []
    real = executor._launch_in_simulator

    def spy(kernel, operands):
        seen.append(noted(kernel))
        return real(kernel, operands)

    monkeypatch.setattr(registration.EXECUTORS["simulator"], "launcher", spy)
    return seen
