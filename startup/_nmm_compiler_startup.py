"""Runs when Python starts, from nmm_compiler_startup.pth: waits for transformers, imports nothing.

A model that nmm_compiler made low-rank says so in its config.json, and transformers can load it
only when nmm_compiler has told it how. So that this needs no import in the user's program (or in
`lm_eval`), this file puts one finder in front of `sys.meta_path`. The finder lets every import
pass, until transformers' list of quantizers is imported: then it imports nmm_compiler, whose own
hook (`compress/hf_hook.py`) adds to that list. When nmm_compiler is gone and only this file was
left behind, nothing happens.
"""

import sys


class LowRankFinder:
    """Imports nmm_compiler just before transformers' list of quantizers."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return None for all modules but one, which the finders behind this one then find."""
        if name != "transformers.quantizers.auto":
            return None
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        try:
            import nmm_compiler  # noqa: F401  (its hook is now the first of sys.meta_path)
        except Exception:  # gone, or half removed: transformers works without it
            return None
        import importlib.util

        return importlib.util.find_spec(name)


sys.meta_path.insert(0, LowRankFinder)
