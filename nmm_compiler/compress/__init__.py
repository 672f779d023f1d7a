"""Makes models low-rank: see docs/compress.md. Start reading at `apply.py`.

`nmm_compiler.compress` is the function `apply.compress`, whose report predicts the whole model
(`prediction/compressed.py`), while `import nmm_compiler.compress.apply` names this package. The
function has the modules of this package as attributes, so that both spellings reach them.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """This package: an attribute that is set here is set on the function as well."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, types.ModuleType) and "apply" in vars(self):
            modules = {k: v for k, v in vars(self).items() if isinstance(v, types.ModuleType)}
            vars(vars(self)["apply"].compress).update(modules)


sys.modules[__name__].__class__ = _Room
