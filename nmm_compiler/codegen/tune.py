"""tune: times a kernel's schedules on any executor and keeps the best one for `build_kernel`.

    space -> what a journal has is replayed -> groups timed by workers -> a worker finds what
    `choose` takes -> best -> cache entry

Times come as lines of a journal beside the cache, so that a run that was killed goes on where it
was. The finished entry holds the times of all candidates and of the default; asking again times
nothing. The workers only simulate: they write nothing, and any of them may die. This process ranks,
keeps the journals and publishes; it simulates nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build import build_kernel, check_foreign
from nmm_compiler.codegen.build_many import Progress, Request, request_of, request_text
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.codegen.choose import Choice, preference, search, simulated
from nmm_compiler.codegen.code_digests import code_digests
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.search_space import Space
from nmm_compiler.codegen.tuned import (
    BEST,
    CANDIDATES,
    DEFAULT,
    choice_of,
    files_of,
    forget,
    plain_choice,
    schedule_data,
    schedule_text,
    tuning_key,
)
from nmm_compiler.codegen.tuning_journal import Journal
from nmm_compiler.codegen.workers import Submits, Task, cores, on_processes, run
from nmm_compiler.errors import (
    CacheError,
    CapacityError,
    MissingPackageError,
    NmmError,
    OptionTypeError,
    UnknownNameError,
    WorkerError,
)
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import Options
from nmm_compiler.records import Record
from nmm_compiler.report.text import counted
from nmm_compiler.targets import Target, get
from nmm_compiler.targets.this_machine import differences

SEARCHES = ("candidates", "grid", "guided")
# A task of a worker is about this many simulated instructions, at 30 us each.
TASK_INSTRUCTIONS = 20_000
TASK_SCHEDULES = 16
# Kernels that are searched at once, so that workers have work while one is ranked or published.
AT_ONCE = 4
# A guided search asks for so many schedules at a time, whatever the number of workers: the answer
# must not depend on who is quick.
GUIDED_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Tuned(Record):
    """The outcome for one kernel; times are simulated microseconds.

    candidates: schedules with a time. simulated: those that this run timed; the others were in the
    journal or in the cache. default_us: what `build_kernel` takes without tuning.
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
    search: str = "candidates",
    trials: int = 64,
    executor: Submits | None = None,
    jobs: int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> list[Tuned]:
    """Time schedules of each kernel and keep the best in the cache.

    Args:
        specs: specs, or (spec, target) each.
        target: hardware of specs that come without one.
        search: "candidates" times every candidate of the family; "grid" every legal combination
            of their values; "guided" `trials` of the grid, as Optuna's TPE sampler picks them.
            What the last two find beyond the candidates is checked against float64.
        trials: schedules that "guided" times.
        executor: anything with `submit` (concurrent.futures, dask, `RayExecutor`). The outcome
            does not depend on it.
        jobs: processes here, where there is no executor.
        options: which cache, and how many instructions at most.
        progress: called with a line, and how many of how many schedules are timed.

    Returns:
        The outcomes, in order. What `build_kernel` takes without tuning is timed too, so that no
        tuning is worse.

    Raises:
        CacheError: the cache is not writable.
        WorkerError: workers keep dying.
        SpecError, CapacityError: a kernel has no legal schedule.
    """
    if search not in SEARCHES:
        raise UnknownNameError("search", search, SEARCHES)
    if search == "guided":
        _optuna()
        if trials < 1:
            raise OptionTypeError("trials", trials, "a number of schedules above 0")
    made = options or Options()
    store = Store.open(made, check=check_foreign)
    if store.mode != "rw":
        raise CacheError(f"{store} cannot keep tunings; set NMM_CACHE=rw")
    requests = [one if isinstance(one, tuple) else (one, target) for one in specs]
    with contextlib.ExitStack() as started:
        where = executor or started.enter_context(on_processes(jobs or cores()))
        work = _Work(where, made, store, search, trials, _Steps(progress))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            # kernels with the most work begin first, so that no worker is alone with one at the end
            order = sorted(dict.fromkeys(requests), key=lambda one: -one[0].flops())
            waiting = [threads.submit(work.tuned, *one) for one in order]
            try:
                found = [one.result() for one in waiting]
            except BaseException as error:  # Ctrl-C too; raised again
                if isinstance(error, KeyboardInterrupt):
                    done = sum(one.done() and one.exception() is None for one in waiting)
                    error.add_note(
                        f"tune: {done} of {counted(len(waiting), 'kernel')} done; times that were "
                        "taken are kept, and the same call goes on there"
                    )
                for one in waiting:
                    one.cancel()
                if executor is None:
                    where.shutdown(cancel_futures=True)  # type: ignore[attr-defined]
                raise
    forget()
    by_request = dict(zip(order, found, strict=True))
    return [by_request[one] for one in requests]


class _Steps:
    """Counts timed schedules of all kernels for the progress that the user sees."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.lock = progress, threading.Lock()
        self.done = self.known = 0

    def add(self, words: str, done: int = 0, known: int = 0) -> None:
        with self.lock:
            self.done += done
            self.known += known
            if self.progress is not None:
                self.progress(words, self.done, self.known)


@dataclass(frozen=True)
class _Work:
    """One run of `tune`."""

    executor: Submits
    options: Options
    store: Store
    search: str
    trials: int
    steps: _Steps
    # held to rank: the first kernel's schedules are with the workers before the second is ranked
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def tuned(self, spec: KernelSpec, target: str) -> Tuned:
        """Return the outcome for one kernel, from the cache when it is there."""
        chip, budget = machine_target(target, self.options), self.options.instruction_budget
        added = [0]

        def build() -> dict[str, str]:
            with Journal(self.store, spec, chip, budget) as journal:
                rows = self._timed(spec, target, chip, journal)
                timed = [c for c in rows.values() if c.simulated_us is not None]
                if not timed:
                    raise CapacityError(f"{spec.short()}: no schedule could be timed on {target}")
                default = self._default(spec, target, chip, timed)
                if schedule_text(default) not in rows:  # a tuning is never worse than none
                    journal.add(default)
                    timed.append(default)
                added[0] = journal.added
                ranked = sorted(timed, key=lambda c: (*preference(c, budget), schedule_text(c)))
                ranked = self._from_first_right(spec, target, chip, ranked, default)
                return files_of(ranked[0], ranked, default)

        key = tuning_key(spec, chip, budget)
        entry = self.store.get_or_build(key, build, {"tuning": self.search})
        Journal(self.store, spec, chip, budget).path.unlink(missing_ok=True)
        rows = [choice_of(json.loads(t), spec) for t in entry.files[CANDIDATES].splitlines()]
        best = choice_of(json.loads(entry.files[BEST]), spec)
        if DEFAULT in entry.files:
            default = choice_of(json.loads(entry.files[DEFAULT]), spec)
        else:  # an entry that was not made here
            default = self._default(spec, target, chip, rows)
        assert best.simulated_us is not None
        assert default.simulated_us is not None
        return Tuned(
            kernel=spec.short(),
            target=target,
            candidates=len(rows),
            simulated=added[0],
            best_us=best.simulated_us,
            default_us=default.simulated_us,
            schedule=best.schedule.short(),
        )

    def _default(
        self, spec: KernelSpec, target: str, chip: Target, timed: Sequence[Choice]
    ) -> Choice:
        """Return what `choose` takes, with its time; a worker looks for it."""
        told = self._told(spec, target, chip)
        text = json.dumps({**told, "timed": [plain_choice(choice) for choice in timed]})
        return choice_of(json.loads(self._answer(find_default, text)), spec)

    def _told(self, spec: KernelSpec, target: str, chip: Target) -> dict[str, Any]:
        """Return what every task of a kernel tells a worker."""
        request: dict[str, Any] = json.loads(request_text(spec, target, self.options))
        request["machine"] = differences(chip, get(chip.name))
        request["code"] = dict(code_digests())
        return request

    def _answer(self, function: Task, text: str) -> str:
        """Return what a worker answers to one task; raises what became of it."""
        ((_, answer),) = run(self.executor, function, [text])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _from_first_right(
        self, spec: KernelSpec, target: str, chip: Target, ranked: list[Choice], default: Choice
    ) -> list[Choice]:
        """Return the schedules without those before the first whose kernel is right.

        The family's own candidates are, and the default: its tests hold them to float64. Others run
        in the simulator on random arrays first.
        """
        own = {c.schedule for c in Space(spec, chip, self.options.instruction_budget).candidates}
        own.add(default.schedule)
        request = json.loads(request_text(spec, target, self.options))
        for i, choice in enumerate(ranked):
            if choice.schedule in own:
                return ranked[i:]
            text = json.dumps({**request, "schedule": choice.schedule.to_dict()})
            if json.loads(self._answer(prove_schedule, text)):
                return ranked[i:]
        raise CapacityError(f"{spec.short()}: no schedule that was timed gives a right kernel")

    def _timed(
        self, spec: KernelSpec, target: str, chip: Target, journal: Journal
    ) -> dict[str, Choice]:
        """Return every schedule that was timed, by its text."""
        space = Space(spec, chip, self.options.instruction_budget)
        if self.search == "guided":
            return self._guided(space, target, journal)
        with self.turn:
            choices = list(space.candidates if self.search == "candidates" else space.grid())
        return self._time(space, target, choices, journal)

    def _time(
        self, space: Space, target: str, choices: Sequence[Choice], journal: Journal
    ) -> dict[str, Choice]:
        """Return the schedules with their times: those of the journal, and the workers'."""
        found = {
            schedule_text(c): journal.rows[schedule_text(c)]
            for c in choices
            if schedule_text(c) in journal.rows
        }
        left = [choice for choice in choices if schedule_text(choice) not in found]
        self.steps.add(space.spec.short(), len(found), len(choices))
        groups = list(_groups(left))
        request = self._told(space.spec, target, space.target)
        texts = [
            json.dumps({**request, "schedules": [schedule_data(c.schedule) for c in group]})
            for group in groups
        ]
        failed: Exception | None = None
        for i, answer in run(self.executor, time_schedules, texts):
            if isinstance(answer, Exception):
                failed = failed or answer  # what the others bring is kept first
                continue
            for choice, times in zip(groups[i], json.loads(answer), strict=True):
                made = dataclasses.replace(choice, **times)
                journal.add(made)
                found[schedule_text(made)] = made
            self.steps.add(space.spec.short(), len(groups[i]))
        if failed is not None:
            raise failed
        return found

    def _guided(self, space: Space, target: str, journal: Journal) -> dict[str, Choice]:
        """Return the schedules that a sampler of Optuna picked, and the first candidates."""
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        found = self._time(space, target, space.candidates[:GUIDED_BATCH], journal)
        distributions = {
            name: optuna.distributions.CategoricalDistribution(range(len(values)))
            for name, values in space.values.items()
        }
        asked = 0
        while len(found) < self.trials and asked < 50 * self.trials and distributions:
            batch = [study.ask(distributions) for _ in range(GUIDED_BATCH)]
            asked += len(batch)
            picked = [
                space.legal({name: space.values[name][i] for name, i in trial.params.items()})
                for trial in batch
            ]
            new = {schedule_text(c): c for c in picked if c is not None}
            room = self.trials - len(found)
            fresh = [c for name, c in new.items() if name not in found][:room]
            found |= self._time(space, target, fresh, journal)
            for trial, choice in zip(batch, picked, strict=True):
                timed = None if choice is None else found.get(schedule_text(choice))
                if timed is None or timed.simulated_us is None:
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(trial, preference(timed, space.budget)[1])
        return found


def _groups(choices: Sequence[Choice]) -> Iterator[list[Choice]]:
    """Yield the schedules in tasks of about equal work."""
    group: list[Choice] = []
    size = 0
    for choice in choices:
        if group and (size + choice.instructions > TASK_INSTRUCTIONS
                      or len(group) >= TASK_SCHEDULES):  # fmt: skip
            yield group
            group, size = [], 0
        group.append(choice)
        size += choice.instructions
    if group:
        yield group


def time_schedules(text: str) -> str:
    """Time the schedules of a task in the simulator; return the times as JSON.

    A schedule that cannot run has no time. Raises WorkerError where this process has other code, or
    knows another machine, than the one that asks.
    """
    told = json.loads(text)
    spec, chip, _ = _asked(told)
    family = FAMILIES[spec.family]
    rows: list[dict[str, Any]] = []
    for one in told["schedules"]:
        try:
            us, count, in_order = simulated(spec, family.schedule_class.from_dict(one), chip)
        except NmmError:
            rows.append({})
        else:
            rows.append({"simulated_us": us, "instructions": count, "in_order_us": in_order})
    return json.dumps(rows)


def find_default(text: str) -> str:
    """Return as JSON what `choose` takes, with its time, from the times of a task where they are.

    It steps on from the best candidates, so it may be none of them; the steps are simulated.
    Raises what `time_schedules` raises.
    """
    told = json.loads(text)
    spec, chip, options = _asked(told)
    known = {row.schedule: row for row in (choice_of(one, spec) for one in told["timed"])}

    def timing(spec: KernelSpec, schedule: Any, target: Target) -> tuple[float, int, float]:
        row = known.get(schedule)
        if row is None or row.simulated_us is None or row.in_order_us is None:
            return simulated(spec, schedule, target)
        return row.simulated_us, row.instructions, row.in_order_us

    first = search(spec, chip, options.instruction_budget, timing)[0]
    us, count, in_order = timing(spec, first.schedule, chip)
    return json.dumps(
        plain_choice(
            dataclasses.replace(first, simulated_us=us, instructions=count, in_order_us=in_order)
        )
    )


def _asked(told: dict[str, Any]) -> tuple[KernelSpec, Target, Options]:
    """Return what a task is about; raises WorkerError where this process is no worker for it."""
    spec, target, options = request_of(told)
    chip = machine_target(target, options)
    if told["code"] != dict(code_digests()) or told["machine"] != json.loads(
        json.dumps(differences(chip, get(chip.name)))
    ):
        raise WorkerError(
            "a worker runs another version of nmm_compiler, or has other verdicts of the device"
        )
    return spec, chip, options


def prove_schedule(text: str) -> str:
    """Run the kernel of a schedule on random arrays; return as JSON whether it is right."""
    told = json.loads(text)
    spec, target, options = request_of(told)
    schedule = FAMILIES[spec.family].schedule_class.from_dict(told["schedule"])
    apart = dataclasses.replace(options, cache="off")
    try:
        kernel = build_kernel(spec, machine_target(target, options), schedule, options=apart)
        return json.dumps(bool(prove(kernel).passed))
    except NmmError:  # the dialect, the lint or the simulator refuses it
        return json.dumps(False)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingPackageError("optuna", "a guided search", "tune") from None
    return optuna
