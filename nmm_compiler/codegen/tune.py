"""tune: times every candidate of each kernel and keeps the best one for `build_kernel`.

A worker times the candidates of one kernel and answers with their times. It writes nothing, and any
worker may die. This process publishes an entry of the cache for each kernel that is done, so a run
that was ended goes on with the others; asking again times nothing. It simulates nothing itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build_many import Progress, Request, each, request_of, request_text
from nmm_compiler.codegen.choose import preference, rank, refusal, search, simulated, timed
from nmm_compiler.codegen.code_digests import code_digests
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.tuned import BEST, DEFAULT, choices_in, files_of, forget, tuning_key
from nmm_compiler.codegen.workers import Submits
from nmm_compiler.errors import CapacityError, NmmError, WorkerError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import Options
from nmm_compiler.records import Record
from nmm_compiler.targets import Target, get
from nmm_compiler.targets.this_machine import differences

SEARCHES = ("candidates",)


@dataclass(frozen=True, kw_only=True)
class Tuned(Record):
    """The outcome for one kernel; times are simulated microseconds.

    candidates: schedules with a time. simulated: those that this run timed; the others were in the
    cache. default_us: what `build_kernel` takes without tuning.
    """

    kernel: str
    target: str
    candidates: int
    simulated: int
    best_us: float
    default_us: float
    schedule: str

    @property
    def gain(self) -> float:
        """How much faster the tuned schedule is."""
        return self.default_us / self.best_us


def tune(
    specs: Sequence[KernelSpec] | Sequence[Request],
    target: str = "trn2",
    *,
    executor: Submits | None = None,
    jobs: int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> list[Tuned]:
    """Time every candidate of each kernel and keep the best in the cache.

    Args:
        specs: specs, or (spec, target) each.
        target: hardware of specs that come without one.
        executor: anything with `submit` (concurrent.futures, dask, `RayExecutor`). The outcome
            does not depend on it.
        jobs: processes here, where there is no executor.
        options: which cache, and how many instructions at most.
        progress: called with a line, and how many of how many kernels are done.

    Returns:
        The outcomes, in order. What `build_kernel` takes without tuning is a candidate, so that no
        tuning is worse.

    Raises:
        CacheError: the cache is not writable.
        WorkerError: workers keep dying.
        SpecError, CapacityError: a kernel has no legal schedule.
    """
    made = options or Options()
    store = Store.open(made)
    requests = [one if isinstance(one, tuple) else (one, target) for one in specs]

    def key(request: Request) -> Key:
        spec, name = request
        return tuning_key(spec, machine_target(name, made), made.instruction_budget)

    for spec, name in requests:
        error = refusal(spec, machine_target(name, made))
        if error is not None:
            raise error
    failed: list[Exception] = []

    def took(request: Request, answer: str | Exception) -> str:
        if isinstance(answer, Exception):
            failed.append(answer)  # what the others bring is kept first
            return f"failed {request[0].short()}"
        files = json.loads(answer)
        store.get_or_build(key(request), lambda: files, {"tuning": "candidates"})
        return f"timed {request[0].short()} for {request[1]}"

    missing = each(
        time_candidates, {key(one): one for one in requests},
        lambda spec, name: _task(spec, name, made), took,
        store=store, executor=executor, jobs=jobs, progress=progress,
    )  # fmt: skip
    forget()
    if failed:
        raise failed[0]
    return [_outcome(one, store.get(key(one)), new=one in missing) for one in requests]


def _outcome(request: Request, entry: Any, *, new: bool) -> Tuned:
    spec, target = request
    (best, *others), (default,) = (choices_in(entry.files, n, spec) for n in (BEST, DEFAULT))
    assert best.simulated_us is not None
    assert default.simulated_us is not None
    count = 1 + len(others)
    return Tuned(
        kernel=spec.short(), target=target, candidates=count, simulated=count if new else 0,
        best_us=best.simulated_us, default_us=default.simulated_us, schedule=best.schedule.short(),
    )  # fmt: skip


def _task(spec: KernelSpec, target: str, options: Options) -> str:
    """Return what a worker is told: the request, and the code and machine that it is for."""
    told = json.loads(request_text(spec, target, options))
    return json.dumps({**told, **_here(machine_target(target, options))})


def _here(chip: Target) -> dict[str, Any]:
    machine = json.loads(json.dumps(differences(chip, get(chip.name))))
    return {"machine": machine, "code": dict(code_digests())}


def time_candidates(text: str) -> str:
    """Time the candidates of a kernel in the simulator; return the files of its tuning as JSON.

    A schedule that cannot run has no time. Raises WorkerError where this process has other code, or
    knows another machine, than the one that asks.
    """
    told = json.loads(text)
    spec, target, options = request_of(told)
    chip, budget = machine_target(target, options), options.instruction_budget
    if any(told[name] != value for name, value in _here(chip).items()):
        raise WorkerError(
            "a worker runs another version of nmm_compiler, or has other verdicts of the device"
        )
    timing = functools.cache(simulated)
    # of every schedule both times are kept, so none is compared with another here
    default = search(spec, chip, budget, lambda *asked: timing(*asked[:3]))[0]
    rows = []
    for choice in rank(spec, chip, budget):
        try:
            rows.append(timed(choice, timing(spec, choice.schedule, chip)))
        except NmmError:
            continue
    if not rows:
        raise CapacityError(f"{spec.short()}: no schedule could be timed on {target}")
    rows.sort(key=lambda row: (*preference(row, budget), row.schedule.to_json()))
    return json.dumps(files_of(rows, default))
