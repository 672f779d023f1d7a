"""The names of the stand-in `nki.language`, which each file enters where it defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
NAMES: dict[str, Any] = {}


def exported(function: Function) -> Function:
    """Enter a function or a class under its name."""
    NAMES[function.__name__] = function
    return function
