"""Schedules that were found by timing many candidates, as entries of the kernel cache.

    tuning_key -> {"best.json": the chosen schedule, "candidates.jsonl": every candidate's times}

`nmm tune` makes such an entry and `build_kernel` looks for one before it chooses. Its key has the
digests of the code, timing constants included: what another version timed is not found.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable
from typing import Any

from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.choose import Choice
from nmm_compiler.codegen.code_digests import code_fields
from nmm_compiler.errors import CacheWarning, CapacityError, ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.targets import Target, get
from nmm_compiler.targets.this_machine import differences

BEST, CANDIDATES = "best.json", "candidates.jsonl"

# What this process found: (digest of the kernel's key, cache) -> schedule, or None for none.
_FOUND: dict[tuple[str, Store], Any] = {}
_FOUND_HELD = 4096
_GUARD = threading.Lock()


def tuning_key(spec: KernelSpec, target: Target, budget: int = INSTRUCTION_BUDGET) -> Key:
    """Return the key of what was timed for a kernel: everything that can change its times."""
    return Key.make(
        {
            "tuning": 1,
            "family": spec.family,
            "spec": spec.to_dict(),
            "target": target.name,
            "machine": differences(target, get(target.name)),
            "instruction_budget": budget,
            **code_fields(),
        }
    )


def tuned_schedule(
    spec: KernelSpec, target: Target, budget: int, store: Store, kernel: Key
) -> Any | None:
    """Return the schedule that tuning chose for a kernel, or None.

    kernel: its key without tuning. The remote level is asked only if the cache lacks that kernel.
    A process looks once; `forget` makes it look again.
    """
    if store.mode == "off":
        return None
    place = (kernel.digest, store)
    if place in _FOUND:
        return _FOUND[place]
    key = tuning_key(spec, target, budget)
    entry = store.get(key, remote=False)
    if entry is None and store.remote is not None and store.get(kernel, remote=False) is None:
        entry = store.get(key)
    with _GUARD:
        if len(_FOUND) >= _FOUND_HELD:
            _FOUND.clear()
        _FOUND[place] = found = None if entry is None else _best(entry, spec, target)
    return found


def forget() -> None:
    """Look again for what was tuned, when a kernel is built next."""
    with _GUARD:
        _FOUND.clear()


def _best(entry: Entry, spec: KernelSpec, target: Target) -> Any | None:
    """Return the schedule of an entry; None, with a warning, where it is not legal here."""
    try:
        schedule = choice_of(json.loads(entry.files[BEST]), spec).schedule
        schedule.check(spec, target)
    except (KeyError, TypeError, ValueError, CapacityError, ShapeError, SpecError,
            UnknownNameError) as error:  # fmt: skip
        warnings.warn(
            f"the tuning of {spec.short()} in cache entry {entry.key.digest[:12]} is not used: "
            f"{type(error).__name__}: {error}; nmm cache clear removes it",
            CacheWarning, stacklevel=2,
        )  # fmt: skip
        return None
    return schedule


def plain_choice(choice: Choice) -> dict[str, Any]:
    """Return a candidate and its times as JSON data."""
    return {**vars(choice), "schedule": choice.schedule.to_dict()}


def schedule_text(choice: Choice) -> str:
    """Return the schedule of a candidate as the text that names it."""
    return str(choice.schedule.to_json())


def choice_of(told: dict[str, Any], spec: KernelSpec) -> Choice:
    """Return a candidate from the data of `plain_choice`; unknown fields raise TypeError."""
    schedule = FAMILIES[spec.family].schedule_class.from_dict(told["schedule"])
    return Choice(**{**told, "schedule": schedule})


def files_of(best: Choice, choices: Iterable[Choice]) -> dict[str, str]:
    """Return the files of an entry: the best candidate, and all of them, one a line."""
    lines = [json.dumps(plain_choice(choice), sort_keys=True) for choice in choices]
    return {
        BEST: json.dumps(plain_choice(best), sort_keys=True) + "\n",
        CANDIDATES: "".join(f"{line}\n" for line in lines),
    }
