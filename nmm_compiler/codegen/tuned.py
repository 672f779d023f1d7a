"""Schedules that were found by timing many candidates, as entries of the kernel cache.

    tuning_key -> {"best.json": the chosen schedule, "candidates.jsonl": every candidate's times,
                   "default.json": what `choose` takes, with its time}

`nmm build --search` makes such an entry and `build_kernel` looks for one before it chooses. Its key
has the digests of the code, timing constants included: what another version timed is not found.
"""

from __future__ import annotations

import functools
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
from nmm_compiler.errors import (
    CacheTrustError,
    CacheWarning,
    CapacityError,
    ShapeError,
    SpecError,
    UnknownNameError,
)
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import INSTRUCTION_BUDGET
from nmm_compiler.targets import Target, get
from nmm_compiler.targets.this_machine import differences

BEST, CANDIDATES, DEFAULT = "best.json", "candidates.jsonl", "default.json"

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
        best = None if entry is None else _best(entry, spec, target)
        _FOUND[place] = found = None if best is None else best.schedule
    return found


def tuned_choice(spec: KernelSpec, target: Target, budget: int, store: Store) -> Choice | None:
    """Return what tuning chose for a kernel, with its times; None where the disk has no tuning."""
    entry = None
    if store.mode != "off":
        entry = store.get(tuning_key(spec, target, budget), remote=False)
    return None if entry is None else _best(entry, spec, target)


def tuning_files(
    spec: KernelSpec, target: Target, budget: int, store: Store
) -> dict[str, str] | None:
    """Return the files of a kernel's tuning, None where the cache has none."""
    entry = store.get(tuning_key(spec, target, budget)) if store.mode != "off" else None
    return None if entry is None else _files_in(entry.files)


def schedule_in(files: dict[str, str], spec: KernelSpec, target: Target) -> Any:
    """Return the schedule of the files of a tuning from elsewhere.

    Raises CacheTrustError for files that are no tuning of the kernel.
    """
    try:
        best, _ = choice_of(json.loads(files[BEST]), spec), files[CANDIDATES].splitlines()
        best.schedule.check(spec, target)
    except _NO_TUNING as error:
        raise CacheTrustError(
            f"the tuning of {spec.short()} is none: {type(error).__name__}: {error}"
        ) from None
    return best.schedule


def keep_tuning(
    spec: KernelSpec, target: Target, budget: int, store: Store, files: dict[str, str]
) -> None:
    """Put the tuning of a kernel into the cache, unless that has one."""
    wanted = _files_in(files)
    store.get_or_build(tuning_key(spec, target, budget), lambda: wanted, {"tuning": "exported"})
    forget()


def _files_in(files: dict[str, str]) -> dict[str, str]:
    """Return the files of a tuning among those of an entry; the default's may be absent."""
    found = {name: files[name] for name in (BEST, CANDIDATES)}
    return found | ({DEFAULT: files[DEFAULT]} if DEFAULT in files else {})


def forget() -> None:
    """Look again for what was tuned, when a kernel is built next."""
    with _GUARD:
        _FOUND.clear()


_NO_TUNING = (
    AttributeError, KeyError, TypeError, ValueError, CapacityError, ShapeError, SpecError,
    UnknownNameError,
)  # fmt: skip


def _best(entry: Entry, spec: KernelSpec, target: Target) -> Choice | None:
    """Return the choice of an entry; None, with a warning, where it is not legal here."""
    try:
        best = choice_of(json.loads(entry.files[BEST]), spec)
        best.schedule.check(spec, target)
    except _NO_TUNING as error:
        warnings.warn(
            f"the tuning of {spec.short()} in cache entry {entry.key.digest[:12]} is not used: "
            f"{type(error).__name__}: {error}; nmm cache clear removes it",
            CacheWarning, stacklevel=2,
        )  # fmt: skip
        return None
    return best


def plain_choice(choice: Choice) -> dict[str, Any]:
    """Return a candidate and its times as JSON data."""
    return {**vars(choice), "schedule": schedule_data(choice.schedule)}


# A search writes each schedule about ten times: in a task, in the journal and in the entry.
@functools.lru_cache(maxsize=16_384)
def schedule_data(schedule: Any) -> dict[str, Any]:
    """Return a schedule as JSON data, which is shared: not to be changed."""
    data: dict[str, Any] = schedule.to_dict()
    return data


def schedule_text(choice: Choice) -> str:
    """Return the schedule of a candidate as the text that names it."""
    return _text(choice.schedule)


@functools.lru_cache(maxsize=16_384)
def _text(schedule: Any) -> str:
    return str(schedule.to_json())


def choice_of(told: dict[str, Any], spec: KernelSpec) -> Choice:
    """Return a candidate from the data of `plain_choice`; unknown fields raise TypeError."""
    schedule = FAMILIES[spec.family].schedule_class.from_dict(told["schedule"])
    return Choice(**{**told, "schedule": schedule})


def files_of(
    best: Choice, choices: Iterable[Choice], default: Choice | None = None
) -> dict[str, str]:
    """Return the files of an entry: the best candidate, all of them, one a line, and the default.

    default: what `choose` takes, if that is known.
    """
    made = {BEST: _line(best), CANDIDATES: "".join(map(_line, choices))}
    return made if default is None else {**made, DEFAULT: _line(default)}


def _line(choice: Choice) -> str:
    return json.dumps(plain_choice(choice), sort_keys=True) + "\n"
