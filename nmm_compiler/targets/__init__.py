"""Hardware as data: `get("trn2")` returns the frozen record of one NeuronCore generation."""

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.targets.base import Source, Target
from nmm_compiler.targets.trn1 import TARGET as _TRN1
from nmm_compiler.targets.trn2 import TARGET as _TRN2
from nmm_compiler.targets.trn3 import TARGET as _TRN3

__all__ = ["Source", "Target", "get", "names"]

_TARGETS = {target.name: target for target in (_TRN1, _TRN2, _TRN3)}


def names() -> tuple[str, ...]:
    """Return the names of all targets, oldest first."""
    return tuple(_TARGETS)


def get(name: str | Target) -> Target:
    """Return the target called `name`; a Target passes through.

    Raises UnknownNameError with the closest name.
    """
    if isinstance(name, Target):
        return name
    if name not in _TARGETS:
        raise UnknownNameError("target", name, names())
    return _TARGETS[name]
