"""How a rewritten call finds the options it was compiled with.

Of the options, an op call carries only the executor's name. Options that matter when the call runs
(buckets, freeze, strict, the cache) are named in that string, as "simulator#1f0c2a9b":
a digest of the options that differ from the default. It is the same in every process, so that
inner compilers find their cached code again; the options themselves are registered by the
backend, which runs in each process before its graph does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings

from nmm_compiler.options import Options

_known: dict[str, Options] = {}
_DEFAULT = Options()


def executor_name(options: Options) -> str:
    """Return the executor argument for calls compiled with `options`, and remember these."""
    given = options.call_options()
    if not given:
        return options.executor
    tag = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
    _known[tag] = dataclasses.replace(_DEFAULT, **given)
    return f"{options.executor}#{tag}"


def options_of(executor: str) -> Options:
    """Return the call's options; for a digest of another process, the defaults with a warning.

    These options decide about copies of weights and token counts, and never about values.
    """
    _, _, tag = executor.partition("#")
    if not tag:
        return _DEFAULT
    found = _known.get(tag)
    if found is None:
        warnings.warn(
            f"nmm: options {tag!r} of a compiled call are not known in this process; using the "
            "defaults (buckets, freeze, cache). Compile the model here to use its own.",
            stacklevel=2,
        )
        found = _known[tag] = _DEFAULT
    return found
