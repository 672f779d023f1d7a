"""The kernel cache: `nmm build` fills it, `nmm cache` lists, verifies and clears it.

build fills it before a model is deployed; with --search it tunes each kernel. list and verify never
change an entry, whatever NMM_CACHE says; clear needs mode "rw".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.explain import Info, explain
from nmm_compiler.cache.key import Key, short
from nmm_compiler.cache.store import Store
from nmm_compiler.cli import models, values
from nmm_compiler.codegen.build import SOURCE_FILE, asked, build_kernel
from nmm_compiler.codegen.build_many import Request, fill, request_of
from nmm_compiler.errors import CacheError, NmmError, UnknownNameError, user_file_error
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.options import LADDER, Options, cache_dir
from nmm_compiler.outputs import read_json, write_text
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.text import counted

_SPECS, _ARCHIVE = ".jsonl", ".tar"
_ON = "local, ray (a cluster started here), auto (Ray's own on this machine) or ray://HOST:PORT"


def list_(
    entry: Annotated[
        str | None,
        typer.Argument(
            help="the first digits of an entry, or a JSON file of a key",
            autocompletion=values.entries,
        ),
    ] = None,
    as_json: values.Json = False,
) -> values.Answer:
    """List the kernels, most recently used first, and count the predicted times.

    Of one entry: its key, what was predicted for it, its files, and how its key differs from the
    nearest other entry, which is why it had to be built.

    Example: nmm cache list

    Example: nmm cache list 3fa9c1
    """
    store = open_store("ro")
    infos = list(store.entries())
    if entry is None:
        each = [
            _plain(info.digest, info.entry)
            | {"state": info.state, "size_bytes": info.size_bytes, "used": info.used}
            for info in infos
        ]
        return values.Answer(each, _of_all(store, infos))
    if Path(entry).is_file():  # named entries, or what --json prints of an entry
        named = read_json(Path(entry))
        wanted = Key.make(named.get("key", named))
    else:
        wanted = store.show(entry).key
    said, nearest = explain(wanted, infos)
    changes = [list(change) for change in wanted.changes(nearest)]
    data: dict[str, Any] = {"said": said, "differs": changes}
    table = Grid.of(("differs in", "this key", "nearest entry"), changes)
    parts: list[Part] = [Line(said), table]
    if wanted.digest in [info.digest for info in infos]:
        kept = store.show(wanted.digest)
        data |= _plain(wanted.digest, kept) | {"path": str(kept.path)}
        rows = [*kept.key.fields().items(), *kept.created.items()]
        rows += [(f"meta.{name}", json.dumps(value)) for name, value in kept.meta.items()]
        rows += [(n, counted(len(t.splitlines()), "line")) for n, t in kept.files.items()]
        parts += [Line(f"path: {kept.path}"), Grid.of(("of this entry", ""), rows)]
    return values.Answer(data, parts)


def _plain(digest: str, entry: Entry | None) -> dict[str, Any]:
    return {
        "digest": digest,
        "key": entry.key.to_dict() if entry else None,
        "meta": entry.meta if entry else None,
        "created": entry.created if entry else None,
        "files": list(entry.files) if entry else [],
    }


def _of_all(store: Store, infos: Sequence[Info]) -> list[Part]:
    """Return the kernels, one a row: the fields of the keys that are not the same in all."""
    kept = [i for i in infos if i.entry is None or "price" not in i.entry.key.to_dict()]
    fields = {info.digest: set(info.entry.key.fields().items()) for info in kept if info.entry}
    same = set.intersection(*fields.values()) if len(fields) > 1 else set()

    def label(pairs: set[Any]) -> str:
        return " ".join(f"{name}={short(value)}" for name, value in sorted(pairs))

    rows = [
        (info.digest[:12], _size(info.size_bytes),
         f"{(time.time() - info.used) / 3600:,.1f} h ago",
         label(fields.get(info.digest, set()) - same) or info.state)
        for info in kept
    ]  # fmt: skip
    priced = len(infos) - len(kept)
    total = f"{counted(len(infos), 'entry', 'entries')}, {_size(sum(i.size_bytes for i in infos))}"
    table = Grid.of(("entry", "size", "used", "key"), rows, right=("size", "used"))
    return [
        Line(str(store.directory)),
        *([table] if rows else []),
        *([Line(f"in all: {label(same)}")] if same else []),
        *([Line(f"{counted(priced, 'predicted time')}: --json lists them")] if priced else []),
        Line(f"{total} of {_size(store.max_bytes)}"),
    ]


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="sha256 only, build nothing")] = False,
    as_json: values.Json = False,
) -> values.Answer:
    """Build every kernel again and compare the bytes; ends with 1 when something differs.

    Example: nmm cache verify --quick
    """
    rows = list(open_store("ro").verify(None if quick else _rebuild))
    states = [row.state.partition(":")[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    bad = [row for row in rows if not row.state.startswith(("same", "skipped"))]
    said = f"{counted(len(rows), 'entry', 'entries')}: {counts or 'nothing to verify'}"
    return values.Answer(
        {row.digest: row.state for row in rows},
        [Line(said), *(Line(f"{row.digest[:12]}  {row.state}") for row in bad)],
        passed=not bad,
    )


def clear(
    keep: Annotated[
        int | None,
        typer.Option(
            min=0, help="bytes of whole entries to keep, the least recently used go first"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: values.Json = False,
) -> values.Answer:
    """Delete every entry, or with --keep the damaged and the least recently used ones.

    Example: nmm cache clear --keep 100000000
    """
    store = open_store()
    if keep is None and not yes:
        typer.confirm(f"delete every entry of {store.directory}?", abort=True)
    gone, left = len(store.prune(keep or 0)), len(list(store.entries()))
    said = f"{counted(gone, 'entry', 'entries')} deleted, {left} left"
    return values.Answer({"deleted": gone, "left": left}, [Line(said)])


def open_store(mode: str | None = None) -> Store:
    """Return the store of the environment.

    Raises CacheTrustError for a directory that others can write.
    """
    return Store.open(Options(cache=mode))


def _rebuild(entry: Entry) -> dict[str, str] | None:
    """Build the kernel of an entry again, without a cache; None when another version made it."""
    key = entry.key.to_dict()
    try:
        spec, target, _ = request_of(key)
        kind = FAMILIES[spec.family].schedule_class
        schedule = None if key["schedule"] == "chosen" else kind.from_dict(key["schedule"])
        named = {name: key[name] for name in ("instruction_budget", "dialect")}
        options = Options(cache="off", **named)
        now = asked(spec, target, schedule, options=options).key
    except (KeyError, TypeError, NmmError):
        return None  # families, fields and targets that this version does not have
    if now != entry.key:
        return None
    return {SOURCE_FILE: build_kernel(spec, target, schedule, options=options).source}


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


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
        Path | None,
        values.option(values.output_file, "FILE", "write the kernels here, build none", "--list"),
    ] = None,
    archive: Annotated[
        Path | None,
        values.option(values.output_file, "FILE", "then write all entries of the cache here, .tar"),
    ] = None,
    push: Annotated[
        bool, typer.Option("--push", help="then send all entries to NMM_REMOTE_CACHE")
    ] = False,
    as_json: values.Json = False,
) -> values.Answer:
    """Build every kernel that a model launches into the cache; what is there is left alone.

    After a kill or Ctrl-C the same command goes on where it was. Entries of an archive are code
    that will run as you: take archives of people you trust.

    Example: nmm build llama-3.2-1b --ratio 0.2 --target trn2,trn3 --tp 1,4 --jobs 8

    Example: nmm build specs.jsonl --search candidates --on ray://head:10001 --archive kernels.tar
    """  # fmt: skip
    if wanted.endswith(_ARCHIVE):  # taken after sha256 and lint of each; all of it or nothing
        return _moved(lambda store: store.import_(Path(wanted)), "taken", wanted)
    if to_list is None:
        open_store()  # refuses a directory that others can write, before any work
    executor: AbstractContextManager[Any] = nullcontext()
    if on != "local":
        from nmm_compiler.codegen.on_ray import RayExecutor

        executor = RayExecutor(None if on == "ray" else on, jobs)
    with steps(f"reading {wanted}") as step, executor as workers:
        if wanted.endswith(_SPECS):
            kernels = _of_file(Path(wanted), target)
        else:
            from nmm_compiler.prediction.model_kernels import model_kernels

            kernels = model_kernels(
                models.described(wanted), target, ratios=ratio or [None], tokens=tokens or LADDER,
                tps=tp, progress=step,
            )  # fmt: skip
        if to_list is not None:
            rows = [{"family": s.family, "spec": s.to_dict(), "target": t} for s, t in kernels]
            write_text(to_list, "".join(f"{json.dumps(row)}\n" for row in rows))
            return values.Answer(rows, [Line(f"{counted(len(kernels), 'kernel')}: {to_list}")])
        tuned: list[Any] = []
        if search is not None:
            from nmm_compiler.codegen.tune import tune

            tuned = tune(kernels, executor=workers, jobs=jobs, progress=step)
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
    return values.Answer(
        {**filled.to_dict(), "cache": str(cache_dir()), "tuned": [one.to_dict() for one in tuned]},
        [
            *(table if tuned else []),
            *(part for one in sent for part in one.shown),
            Line(f"{filled}; cache: {cache_dir()}"),
            *(
                Line(f"failed: {one.kernel} for {one.target}: {one.reason}")
                for one in filled.failed
            ),
        ],
        passed=not filled.failed,
    )


def _moved(
    move: Callable[[Store], int], said: str, place: str | Path, mode: str | None = None
) -> values.Answer:
    """Take entries into the cache or send them; say how many and what was done with them."""
    store = open_store(mode)
    try:
        count = move(store)
    except (OSError, ImportError, ValueError) as error:  # what filesystems and fsspec raise
        raise CacheError(f"entries cannot be {said.split()[0]}: {place}: {error}") from error
    return values.Answer({"entries": count}, [Line(f"{counted(count, 'entry', 'entries')} {said}")])


def _of_file(path: Path, targets: Sequence[str]) -> list[Request]:
    """Return the kernels of a file that `--list` wrote; FileError for a line that is none."""
    kernels: list[Request] = []
    line = 0
    try:
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):  # noqa: B007
            row = json.loads(text)
            spec, named, _ = request_of(row)
            kernels += [(spec, one) for one in ([named] if "target" in row else targets)]
    except (ValueError, RecursionError, NmmError) as error:
        raise user_file_error(str(path), "each line is one kernel", error, line) from error
    return list(dict.fromkeys(kernels))
