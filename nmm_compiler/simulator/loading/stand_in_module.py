"""Stand-in modules of any dialect of NKI: a missing name is an error that says so."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from nmm_compiler.errors import UnsupportedInstructionError, closest
from nmm_compiler.simulator.machine import kernel_frame


class StandIn(ModuleType):
    """A module whose missing names raise UnsupportedInstructionError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        file, line = kernel_frame()
        known = [n for n in self.__dict__ if not n.startswith("_")]
        raise UnsupportedInstructionError(
            f"{self.__name__}.{name} is not in the NKI API that the simulator has"
            f"{closest(name, known)}; see docs/simulator.md",
            file,
            line,
        )


def module(name: str, names: dict[str, Any]) -> StandIn:
    """Return the stand-in for module `name` with these names."""
    made = StandIn(name, f"Stand-in for {name} inside the simulator.")
    made.__dict__.update(names)
    made.__package__ = name
    made.__path__ = []
    return made
