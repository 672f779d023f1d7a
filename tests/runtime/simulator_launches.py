"""What the simulator is given to run, noted in order."""

from nmm_compiler.ops import registration
from nmm_compiler.runtime import executor


def noted_launches(monkeypatch):
    """Return a list that gets the spec of each kernel that the simulator runs."""
    seen = []
    real = executor._launch_in_simulator

    def spy(kernel, operands):
        seen.append(kernel.spec)
        return real(kernel, operands)

    monkeypatch.setattr(registration.EXECUTORS["simulator"], "launcher", spy)
    return seen
