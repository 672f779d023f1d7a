"""Schedules that were found by timing all candidates, as entries of the kernel cache.

    tuning_key -> {"candidates.jsonl": every candidate with its times, the best first,
                   "default.jsonl": what `choose` takes, with its times}

`nmm build --search` makes such an entry and `build_kernel` looks for one before it chooses. Its key
has the digests of the code, timing constants included: what another version timed is not found.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterable, Mapping

from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.choose import Choice
from nmm_compiler.codegen.code_digests import key_fields
from nmm_compiler.errors import CacheWarning, CapacityError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.targets import Target

BEST, DEFAULT = "candidates.jsonl", "default.jsonl"


def tuning_key(spec: KernelSpec, target: Target, budget: int = INSTRUCTION_BUDGET) -> Key:
    """Return the key of what was timed for a kernel: everything that can change its times."""
    return Key.make({"tuning": 1, **key_fields(spec, target, budget)})


@functools.lru_cache(maxsize=4096)
def tuned_choice(
    spec: KernelSpec, target: Target, budget: int, store: Store, kernel: Key | None = None
) -> Choice | None:
    """Return what tuning chose for a kernel, with its times; None where the disk has no tuning.

    kernel: its key without tuning; the remote level is asked if the cache lacks that kernel. A
    process looks once; `forget` makes it look again.
    """
    key = tuning_key(spec, target, budget)
    lacks = kernel is not None and store.get(kernel, remote=False) is None
    entry = store.get(key, remote=lacks)
    if entry is None:
        return None
    try:
        best, *_ = choices_in(entry.files, BEST, spec)
        best.schedule.check(spec, target)
    except _NO_TUNING as error:
        warnings.warn(
            f"the tuning of {spec.short()} is none: {type(error).__name__}: {error}; cache entry "
            f"{key.digest[:12]} is not used, and nmm cache clear removes it",
            CacheWarning, stacklevel=2,
        )  # fmt: skip
        return None
    return best


forget = tuned_choice.cache_clear
"""Look again for what was tuned, when a kernel is built next."""


_NO_TUNING = (AttributeError, LookupError, TypeError, ValueError, CapacityError)


def choices_in(files: Mapping[str, str], name: str, spec: KernelSpec) -> list[Choice]:
    """Return the candidates of a file that `files_of` made; unknown fields raise TypeError."""
    read = FAMILIES[spec.family].schedule_class.from_dict
    told = map(json.loads, files[name].splitlines())
    return [Choice(**{**one, "schedule": read(one["schedule"])}) for one in told]


def files_of(choices: Iterable[Choice], default: Choice) -> dict[str, str]:
    """Return the files of an entry: all candidates, the best first, and what `choose` takes."""
    return {BEST: "\n".join(one.to_json() for one in choices), DEFAULT: default.to_json()}
