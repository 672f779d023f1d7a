"""Builds several kernels at once, each in a process of its own, through the kernel cache.

A worker is this file as a program: it reads one JSON line per kernel, builds it into the cache and
answers with a line. Workers are started by command line and not forked, so they share neither
threads nor the main module with the caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build import Kernel, build_kernel, check_foreign, kernel_key
from nmm_compiler.codegen.dialects import dialect_for
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.options import Options

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nmm_compiler.codegen.build_many import serve; serve()"
)
# Starting a worker takes about as long as building a small kernel.
_WORTH_A_WORKER = 2


def build_many(
    specs: Sequence[KernelSpec],
    target: str = "trn2",
    *,
    options: Options | None = None,
    jobs: int | None = None,
) -> list[Kernel]:
    """Return the kernels of `specs`, in order; those that the cache lacks are built in parallel.

    jobs: processes at once; by default one for each core, and none where there are few kernels.
    Without a cache on disk all are built here. Raises what `build_kernel` raises.
    """
    fill_cache(specs, target, options=options, jobs=jobs)
    return [build_kernel(spec, target, options=options) for spec in specs]


def fill_cache(
    specs: Sequence[KernelSpec],
    target: str = "trn2",
    *,
    options: Options | None = None,
    jobs: int | None = None,
) -> int:
    """Build kernels that the cache lacks in parallel; return how many workers built.

    A kernel that cannot be built stays missing, and `build_kernel` then raises the reason.
    """
    made = options or Options()
    store = Store.for_kernels(made, check=check_foreign)
    if store.mode != "rw":
        return 0
    chip = machine_target(target, made)
    told = (made.instruction_budget, dialect_for(chip, made.dialect))
    keys = {spec: kernel_key(spec, chip, None, *told) for spec in specs}
    digests = {key.digest for key in store.missing(list(keys.values()))}
    missing = [spec for spec, key in keys.items() if key.digest in digests]
    count = min(len(missing), jobs or len(os.sched_getaffinity(0)))
    if count < 2 or len(missing) < (_WORTH_A_WORKER if jobs else 2 * _WORTH_A_WORKER):
        return 0
    queue: SimpleQueue[str] = SimpleQueue()
    for spec in missing:
        wanted = {"family": spec.family, "spec": spec.to_dict(), "target": target}
        queue.put(json.dumps({**wanted, "options": made.call_options()}))
    done: list[str] = []
    threads = [threading.Thread(target=_feed, args=(queue, done)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done.count("built")


def _feed(queue: SimpleQueue[str], done: list[str]) -> None:
    """Pass kernels to a worker, one by one, until none is left or the worker has ended."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **quiet) as worker:  # type: ignore[call-overload]
        for line in _rest(queue):
            try:
                worker.stdin.write(line + "\n")
                worker.stdin.flush()
            except BrokenPipeError:  # it ended; what is missing is built by whoever needs it
                return
            answer = worker.stdout.readline().strip()
            done.append(answer)
            if not answer:
                return
        worker.stdin.close()


def _rest(queue: SimpleQueue[str]) -> Iterator[str]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return


def serve() -> None:
    """Build the kernels that standard input names, line by line, and print each result."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # output of libraries is no answer
    for line in sys.stdin:
        print(_built(json.loads(line)), file=answers, flush=True)


def _built(told: dict[str, Any]) -> str:
    spec = FAMILIES[told["family"]].spec_class.from_dict(told["spec"])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in told["options"].items()}
    try:
        build_kernel(spec, told["target"], options=Options.make(options))
    except (NmmError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return type(error).__name__  # the caller builds it again, and gets the error itself
    return "built"
