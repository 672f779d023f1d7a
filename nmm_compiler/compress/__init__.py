"""Makes models low-rank: see docs/compress.md. Start reading at `apply.py`.

`nmm_compiler.compress` is the function `apply.compress` (the package door keeps it so), while
`import nmm_compiler.compress.apply` names this package. So that both spellings reach the modules of
the room, the function carries them as attributes too.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """This package: a module that is bound here is bound on the function as well."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, types.ModuleType) and "apply" in vars(self):
            modules = {k: v for k, v in vars(self).items() if isinstance(v, types.ModuleType)}
            vars(vars(self)["apply"].compress).update(modules)


sys.modules[__name__].__class__ = _Room
