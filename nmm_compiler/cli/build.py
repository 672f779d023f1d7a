"""`nmm build`: fills the kernel cache before a model is deployed; --search tunes each kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cache.store import Store
from nmm_compiler.cli import models, values
from nmm_compiler.cli.cache import open_store
from nmm_compiler.cli.show import Answer
from nmm_compiler.errors import CacheError, NmmError, UnknownNameError, user_file_error
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.outputs import write_text
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.text import counted

if TYPE_CHECKING:
    from nmm_compiler.kernels.base import KernelSpec

_SPECS, _ARCHIVE = ".jsonl", ".tar"
_ON = "local, ray (a cluster started here), auto (Ray's own on this machine) or ray://HOST:PORT"


def _place(value: str) -> str:
    if value not in ("local", "ray", "auto") and not value.startswith("ray://"):
        raise UnknownNameError("place", value, ["local", "ray", "auto", "ray://HOST:PORT"])
    return value


def build(
    wanted: Annotated[
        str,
        values.model_argument(
            ", SPECS.jsonl, or KERNELS.tar that --archive wrote", also=(_SPECS, _ARCHIVE)
        ),
    ],
    target: values.Targets = ("trn2",),
    ratio: Annotated[
        Sequence[float] | None,
        values.listed(values.share, "SHARES", "of the parameters; none: the model as it is"),
    ] = None,
    tokens: Annotated[
        Sequence[int] | None,
        values.listed(values.size, "SIZES", "tokens of a call; the buckets 1, 2, 4 ... 4096"),
    ] = None,
    tp: values.Cores = (1,),
    search: Annotated[
        str | None,
        values.choice_option(
            "search",
            "nmm_compiler.codegen.tune:SEARCHES",
            "time all candidates of each kernel, keep the best",
        ),
    ] = None,
    on: Annotated[str, values.option(_place, "WHERE", _ON)] = "local",
    jobs: Annotated[
        int | None, values.option(values.size, "SIZE", "processes; one for each core")
    ] = None,
    to_list: Annotated[
        Path | None, values.output_option("--list", help_="write the kernels here, build none")
    ] = None,
    archive: Annotated[
        Path | None, values.output_option(help_="then write all entries of the cache here, .tar")
    ] = None,
    push: Annotated[
        bool, typer.Option("--push", help="then send all entries to NMM_REMOTE_CACHE")
    ] = False,
) -> Answer:
    """Build every kernel that a model launches into the cache; what is there is left alone.

    After a kill or Ctrl-C the same command goes on where it was. Entries of an archive are code
    that will run as you: take archives of people you trust.

    Example: nmm build llama-3.2-1b --ratio 0.2 --target trn2,trn3 --tp 1,4 --jobs 8

    Example: nmm build specs.jsonl --search candidates --on ray://head:10001 --archive kernels.tar
    """  # fmt: skip
    if wanted.endswith(_ARCHIVE):  # taken after sha256 and lint of each; all of it or nothing
        return _moved(lambda store: store.import_(Path(wanted)), "taken", wanted)
    from nmm_compiler.codegen.build_many import fill
    from nmm_compiler.options import cache_dir

    if to_list is None:
        open_store()  # refuses a directory that others can write, before any work
    with steps(f"reading {wanted}") as step, _executor(on, jobs) as executor:
        kernels = _kernels(wanted, target, ratio, tokens, tp, step)
        if to_list is not None:
            rows = [{"family": s.family, "spec": s.to_dict(), "target": t} for s, t in kernels]
            write_text(to_list, "".join(f"{json.dumps(row)}\n" for row in rows))
            return Answer(rows, [f"{counted(len(kernels), 'kernel')}: {to_list}"])
        tuned: list[Any] = []
        if search is not None:
            from nmm_compiler.codegen.tune import tune

            tuned = tune(kernels, executor=executor, jobs=jobs, progress=step)
        filled = fill(kernels, jobs=jobs, progress=step)
    sent = [_moved(Store.push, "sent", "the shared cache", "ro")] if push else []
    if archive is not None:
        out = archive
        sent += [_moved(lambda store: store.export(out), f"written to {out}", out, "ro")]
    head = ("kernel", "on", "schedules", "timed now", "default us", "tuned us", "gain")
    shown = [
        (one.kernel, one.target, f"{one.candidates:,}", f"{one.simulated:,}",
         f"{one.default_us:.1f}", f"{one.best_us:.1f}", f"{one.gain:.3f}x")
        for one in tuned
    ]  # fmt: skip
    table: list[Part] = [Grid.of(head, shown, right=head[2:]), Line("predicted, not measured")]
    return Answer(
        {**filled.to_dict(), "cache": str(cache_dir()), "tuned": [one.to_dict() for one in tuned]},
        [
            *([table] if tuned else []),
            *(text for one in sent for text in one.shown),
            f"{filled}; cache: {cache_dir()}",
            *(f"failed: {one.kernel} for {one.target}: {one.reason}" for one in filled.failed),
        ],
        passed=not filled.failed,
    )


def _moved(
    move: Callable[[Store], int], said: str, place: str | Path, mode: str | None = None
) -> Answer:
    """Take entries into the cache or send them; say how many and what was done with them."""
    store = open_store(mode)
    try:
        count = move(store)
    except (OSError, ImportError, ValueError) as error:  # what filesystems and fsspec raise
        raise CacheError(f"entries cannot be {said.split()[0]}: {place}: {error}") from error
    return Answer({"entries": count}, [f"{counted(count, 'entry', 'entries')} {said}"])


def _executor(on: str, jobs: int | None) -> AbstractContextManager[Any]:
    if on == "local":
        return nullcontext()
    from nmm_compiler.codegen.on_ray import RayExecutor

    return RayExecutor(None if on == "ray" else on, jobs)


def _kernels(
    given: str, target: Sequence[str], ratio: Sequence[float] | None,
    tokens: Sequence[int] | None, tp: Sequence[int], step: Callable[..., None],
) -> list[tuple[KernelSpec, str]]:  # fmt: skip
    """Return (spec, target) of each kernel of a model or of a file of specs."""
    if given.endswith(_SPECS):
        return _of_file(Path(given), target)
    models.require_transformers("a model without its weights")
    from nmm_compiler.options import LADDER
    from nmm_compiler.prediction.model_kernels import model_kernels

    return model_kernels(
        models.described(given), target, ratios=ratio or [None], tokens=tokens or LADDER, tps=tp,
        progress=step,
    )  # fmt: skip


def _of_file(path: Path, targets: Sequence[str]) -> list[tuple[KernelSpec, str]]:
    """Return the kernels of a file that `--list` wrote; FileError for a line that is none."""
    from nmm_compiler.codegen.build_many import request_of

    kernels: dict[tuple[KernelSpec, str], None] = {}
    line = 0
    try:
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):  # noqa: B007
            if text.strip():
                row = json.loads(text)
                spec, named, _ = request_of(row)
                kernels |= {(spec, one): None for one in ([named] if "target" in row else targets)}
    except (ValueError, RecursionError, NmmError) as error:
        raise user_file_error(str(path), "each line is one kernel", error, line) from error
    if not kernels:
        raise user_file_error(str(path), "each line is one kernel", ValueError("it is empty"))
    return list(kernels)
