"""Makes models low-rank: see docs/compress.md. Start reading at `apply.py`.

`nmm_compiler.compress` is both this package and the function of the public door: importing any
module of a package binds the package's name in its parent. So the package itself can be called.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call `apply.compress`."""
        from nmm_compiler.compress.apply import compress

        return compress(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
