"""`NKIObject`: the base class of records inside kernels, and what `@dataclass` makes of them.

The NKI language guide says that such a class gets an initializer from its annotations, decorated or
not, and that a field which is not given is None.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


class NKIObject:
    """Base class for kernel-side classes."""

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made = type(self)
        fields: tuple[Any, ...] = dataclasses.fields(made) if dataclasses.is_dataclass(made) else ()
        notes = (name for base in reversed(made.__mro__) for name in inspect.get_annotations(base))
        names = [f.name for f in fields if f.init] or list(dict.fromkeys(notes))
        if len(args) > len(names):
            raise TypeError(f"{made.__name__} takes {len(names)} fields, got {len(args)}")
        for name in kwargs if fields else ():
            if name not in names and not hasattr(made, name):
                raise TypeError(f"{made.__name__} has no field {name!r}")
        values = {name: getattr(made, name, None) for name in names}
        for field in fields:
            if field.default_factory is not dataclasses.MISSING:
                values[field.name] = field.default_factory()
        values |= {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Run after the default initializer."""


def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Do dataclasses.dataclass; an NKIObject keeps the initializer of those."""
    if cls is None:
        return lambda c: dataclass(c, **options)
    own = "__init__" in vars(cls) or not options.get("init", True)
    made = dataclasses.dataclass(**options)(cls)
    if issubclass(made, NKIObject) and not own:
        made.__init__ = NKIObject.__init__  # type: ignore[method-assign]
    return made
