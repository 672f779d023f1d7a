"""Runs when Python starts, from nmm_compiler_startup.pth: waits for transformers, imports little.

A model that nmm_compiler made low-rank says so in its config.json, and transformers can load it
only when nmm_compiler has told it how. So that this needs no import in the user's program (or in
`lm_eval`), this file puts one finder in front of `sys.meta_path`. The finder lets every import
pass, until transformers' list of quantizers is imported: then it imports nmm_compiler, whose own
hook (`compress/hf_hook.py`) adds to that list. It does the same for torch's list of log names
where TORCH_LOGS speaks of nmm, because torch refuses names that it does not know. When
nmm_compiler is gone and only this file was left behind, nothing happens.
"""

import os
import sys

NAMES = {"transformers.quantizers.auto"}
if "nmm" in os.environ.get("TORCH_LOGS", ""):
    NAMES.add("torch._logging._registrations")


class LowRankFinder:
    """Imports nmm_compiler just before transformers' list of quantizers, or torch's of logs."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return None for all modules but NAMES, which the finders behind this one then find."""
        if name not in NAMES:
            return None
        NAMES.discard(name)
        if not NAMES and cls in sys.meta_path:
            sys.meta_path.remove(cls)
        try:
            import nmm_compiler  # noqa: F401  (its hook is now the first of sys.meta_path)
        except Exception:  # gone, or half removed: transformers works without it
            return None
        import importlib.util

        return importlib.util.find_spec(name)


sys.meta_path.insert(0, LowRankFinder)
