"""Builds many kernels at once, in processes of their own, through the kernel cache.

    fill(requests)              every kernel into the cache, with counts and progress
    fill_cache(specs)           the same for one target, if it is worth processes
    build_many(specs)           and then the kernels themselves

Each key is built once, whoever asks for it at the same time: the cache has a lock for each.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build import Kernel, asked, build_kernel, built_or_found
from nmm_compiler.codegen.workers import Submits, Task, Workers, cores, run
from nmm_compiler.errors import CacheError, NmmError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec, check_name
from nmm_compiler.options import Options
from nmm_compiler.records import Record
from nmm_compiler.report.text import counted

Request = tuple[KernelSpec, str]
"""A spec, and the target that its kernel is for."""
Progress = Callable[[str, int, int], None]
"""Called with (what was done last, how many are done, how many there are)."""
BUILT, FOUND = "built", "found"  # what `build_one` says of a kernel, unless why there is none
# A worker takes 1.4 CPU s before its first kernel, as long as four small ones.
WORTH_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Failed(Record):
    """A kernel that could not be built, and why."""

    kernel: str
    target: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Filled(Record):
    """What `fill` did. Kernels of equal keys count once.

    present: were in the cache before. built: by the workers. elsewhere: built meanwhile by other
    processes.
    """

    kernels: int
    present: int = 0
    built: int = 0
    elsewhere: int = 0
    failed: tuple[Failed, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = [f"{self.built} built", f"{self.present} were in the cache"]
        counts += [f"{self.elsewhere} built by other processes"] if self.elsewhere else []
        counts += [f"{len(self.failed)} failed"] if self.failed else []
        return f"{counted(self.kernels, 'kernel')}: {', '.join(counts)}; {self.seconds:.1f} s"


def build_many(
    specs: Sequence[KernelSpec],
    target: str = "trn2",
    *,
    options: Options | None = None,
    jobs: int | None = None,
) -> list[Kernel]:
    """Return the kernels of `specs`, in order; those that the cache lacks are built in parallel.

    Args:
        specs: what to compute.
        target: hardware, by name.
        options: which cache; without one on disk all are built here.
        jobs: processes at once; by default one for each core, and none where there are few
            kernels.

    Returns:
        One kernel for each spec.

    Raises:
        SpecError, CapacityError, CodegenError, LintError, CacheTrustError: as `build_kernel`.
    """
    fill_cache(specs, target, options=options, jobs=jobs)
    return [build_kernel(spec, target, options=options) for spec in specs]


def fill_cache(
    specs: Sequence[KernelSpec],
    target: str = "trn2",
    *,
    options: Options | None = None,
    jobs: int | None = None,
) -> set[KernelSpec]:
    """Return the specs whose kernels the cache lacks; build these in parallel.

    None is built where that is slower than building them here, or without a cache on disk. A kernel
    that cannot be built stays missing, and `build_kernel` then raises the reason. Raises
    CacheMissError, naming all that is missing, in cache mode "require".
    """
    made = options or Options()
    store = Store.for_kernels(made)
    wanted = {asked(spec, target, options=made).key: spec for spec in specs}
    keys = store.missing(list(wanted))
    if keys and store.mode == "require":
        raise store.miss(keys)
    missing = [wanted[key] for key in keys]
    count = min(len(missing), jobs or cores())
    if store.mode == "rw" and count > 1 and (jobs or len(missing) >= WORTH_WORKERS):
        fill([(spec, target) for spec in missing], options=made, jobs=count)
    return set(missing)


def fill(
    requests: Sequence[Request],
    *,
    options: Options | None = None,
    jobs: int | None = None,
    executor: Submits | None = None,
    progress: Progress | None = None,
) -> Filled:
    """Build every kernel that the cache lacks, in processes; return the counts.

    Kernels that the cache has are left alone, so a run that was killed goes on where it was. jobs:
    processes at once, by default one for each core. executor: what runs the builds instead, with
    this cache; anything with `submit`. Raises CacheError when the cache is not writable.
    """
    made, start = options or Options(), time.monotonic()
    wanted = {asked(*one, options=made).key: one for one in requests}
    done: dict[Request, str] = {}

    def took(request: Request, answer: str | Exception) -> str:
        done[request] = str(answer)
        said = BUILT if done[request] in (BUILT, FOUND) else "failed"
        return f"{said} {request[0].short()} for {request[1]}"

    missing = each(
        build_one, wanted, lambda spec, target: request_text(spec, target, made), took,
        store=Store.open(made), executor=executor, jobs=jobs,
        progress=progress,
    )  # fmt: skip
    answers = list(done.values())
    return Filled(
        kernels=len(wanted),
        present=len(wanted) - len(missing),
        built=answers.count(BUILT),
        elsewhere=answers.count(FOUND),
        failed=tuple(
            Failed(kernel=one[0].short(), target=one[1], reason=done[one])
            for one in missing
            if done[one] not in (BUILT, FOUND)
        ),
        seconds=time.monotonic() - start,
    )


def each(
    task: Task,
    wanted: Mapping[Key, Request],
    text: Callable[[KernelSpec, str], str],
    took: Callable[[Request, str | Exception], str],
    *,
    store: Store,
    executor: Submits | None,
    jobs: int | None,
    progress: Progress | None = None,
) -> list[Request]:
    """Run a task on the text of each request whose key a cache lacks; return these requests.

    Those with the most work come first. took: called with each request and its answer; returns what
    progress shows. Raises CacheError when the cache is not writable.
    """
    if store.mode != "rw":
        raise CacheError(f"{store} cannot be filled; set NMM_CACHE=rw and a directory of your own")
    missing = (wanted[key] for key in store.missing(list(wanted)))
    order = sorted(missing, key=lambda one: -one[0].flops())
    whole, done = len(wanted), len(wanted) - len(order)
    report = progress or (lambda *_: None)
    report("in the cache", done, whole)
    with contextlib.ExitStack() as started:
        count = min(len(order), jobs or cores())
        where = executor or started.enter_context(Workers(count))
        try:
            for place, answer in run(where, task, [text(*one) for one in order]):
                said = took(order[place], answer)
                done += 1
                report(said, done, whole)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(
                f"{done} of {counted(whole, 'kernel')} done; the same call goes on there"
            )
            raise
    return order


def request_text(spec: KernelSpec, target: str, options: Options) -> str:
    """Return a request as one line, for `build_one` in another process."""
    return json.dumps({
        "family": spec.family, "target": target, "spec": spec.to_dict(),
        "options": options.call_options(),
    })  # fmt: skip


def request_of(told: dict[str, Any]) -> tuple[KernelSpec, str, Options]:
    """Return spec, target and options of the data of `request_text`.

    Raises SpecError, or what a spec raises for bad fields, for anything else.
    """
    if not isinstance(told, dict) or not isinstance(told.get("spec"), dict):
        raise SpecError(
            f"{told!r:.80} names no kernel; write "
            '{"family": "lowrank", "spec": {"m": 1, "k": 512, "r": 64, "n": 512}}'
        )
    family = str(told.get("family"))
    check_name("kernel family", family, tuple(FAMILIES))
    try:
        spec = FAMILIES[family].spec_class.from_dict(told["spec"])
    except TypeError as error:  # a field that is missing, or that nobody knows
        raise SpecError(f"{family}: {error}") from error
    options = Options.make(told.get("options") or {})
    return spec, str(told.get("target", options.target)), options


def build_one(text: str) -> str:
    """Build the kernel of `request_text` into the cache; return what became of it."""
    spec, target, options = request_of(json.loads(text))
    try:
        return BUILT if built_or_found(spec, target, options=options)[1] else FOUND
    except (NmmError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
