"""`NKIObject`: the base class of records inside kernels.

A subclass without `@dataclass` still gets an initializer from its annotations, as the NKI
language guide says.
"""

from __future__ import annotations

import inspect
from typing import Any


class NKIObject:
    """Base class for kernel-side classes."""

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names: list[str] = []
        for base in reversed(type(self).__mro__):
            annotations = inspect.get_annotations(base)
            names += [n for n in annotations if n not in names]
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} fields, got {len(args)}")
        values = dict(zip(names, args, strict=False))
        values.update(kwargs)
        for name in names:
            if name not in values:
                values[name] = getattr(type(self), name, None)
        for name, value in values.items():
            setattr(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Run after the default initializer."""
