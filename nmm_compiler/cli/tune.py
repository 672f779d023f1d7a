"""`nmm tune`: times many schedules of each kernel, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from nmm_compiler.cli import values
from nmm_compiler.cli.wanted_kernels import (
    Cores,
    Jobs,
    Ratios,
    Targets,
    Tokens,
    Wanted,
    wanted_kernels,
)
from nmm_compiler.errors import UnknownNameError

_ON = "local, ray (a cluster started here), auto (Ray's own on this machine) or ray://HOST:PORT"


def _searches() -> Sequence[str]:
    from nmm_compiler.codegen.tune import SEARCHES

    return SEARCHES


def _place(value: str) -> str:
    if value not in ("local", "ray", "auto") and not value.startswith("ray://"):
        raise UnknownNameError("place", value, ["local", "ray", "auto", "ray://HOST:PORT"])
    return value


def tune(
    wanted: Wanted,
    target: Targets = "trn2",
    ratio: Ratios = None,
    tokens: Tokens = None,
    tp: Cores = "1",
    on: Annotated[
        str, typer.Option(help=_ON, parser=values.refusing(_place), metavar="WHERE")
    ] = "local",
    search: Annotated[
        str,
        values.choice_option(
            "search", _searches, "candidates, grid (all legal), or guided (needs optuna)"
        ),
    ] = "candidates",
    trials: Annotated[int, values.size_option(help_="schedules of a guided search")] = 64,
    jobs: Jobs = None,
    as_json: values.AsJson = False,
) -> None:
    """Time the schedules of each kernel, keep the best ones, and build these kernels.

    Kernels that are in the cache as tuned are not timed again; a run that was ended goes on.

    Example: nmm build llama-3.2-1b --ratio 0.2 --list specs.jsonl && nmm tune specs.jsonl --jobs 8

    Example: nmm tune specs.jsonl --on ray://head:10001 --search guided --trials 200
    """
    from nmm_compiler.cache.store import Store
    from nmm_compiler.cli.progress import steps
    from nmm_compiler.cli.show import show, show_json
    from nmm_compiler.codegen.build_many import fill
    from nmm_compiler.codegen.tune import tune as run
    from nmm_compiler.report.parts import Grid

    Store.open()  # refuses a directory that others can write, before any work
    with steps(f"reading {wanted}") as step, _executor(on, jobs) as executor:
        found = wanted_kernels(wanted, target, ratio=ratio, tokens=tokens, tp=tp, progress=step)
        made = run(found, search=search, trials=trials, executor=executor, jobs=jobs, progress=step)
        filled = fill(found, jobs=jobs, progress=step)
    if as_json:
        show_json({"tuned": [one.to_dict() for one in made], "kernels": filled.to_dict()})
        return
    rows = [
        (one.kernel, one.target, f"{one.candidates:,}", f"{one.simulated:,}",
         f"{one.default_us:.1f}", f"{one.best_us:.1f}", f"{one.gain:.3f}x")
        for one in made
    ]  # fmt: skip
    head = ("kernel", "on", "schedules", "timed now", "default us", "tuned us", "gain")
    show([Grid.of(head, rows, right=head[2:])])
    show(f"predicted, not measured; {filled}")


def _executor(on: str, jobs: int | None) -> AbstractContextManager[Any]:
    if on == "local":
        return nullcontext()
    from nmm_compiler.codegen.on_ray import RayExecutor

    return RayExecutor(None if on == "ray" else on, jobs)
