"""`nmm cache`: lists, verifies and clears the kernel cache. `nmm build` fills it.

list and verify never change an entry, whatever NMM_CACHE says; clear needs mode "rw".
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cache.key import short
from nmm_compiler.cli import values
from nmm_compiler.cli.help_text import PlainCommand, WrappedHelp
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.text import counted

if TYPE_CHECKING:
    from nmm_compiler.cache.entry import Entry
    from nmm_compiler.cache.explain import Info
    from nmm_compiler.cache.key import Key
    from nmm_compiler.cache.store import Store

app = typer.Typer(
    cls=WrappedHelp,
    help="The kernel cache: list, verify, clear; nmm build fills it.",
    epilog="Where: NMM_CACHE_DIR. How: NMM_CACHE=off|ro|rw|require. See docs/cache.md.",
    no_args_is_help=True,
)


@app.command("list", cls=PlainCommand)
def list_(
    entry: Annotated[
        str | None,
        typer.Argument(
            help="the first digits of an entry, or a JSON file of a key",
            autocompletion=values.entries,
        ),
    ] = None,
    source: Annotated[bool, typer.Option("--source", help="print the entry's files only")] = False,
    as_json: values.AsJson = False,
) -> None:
    """List the kernels, most recently used first, and count the predicted times.

    Of one entry: its key, what was predicted for it, its files, and how its key differs from the
    nearest other entry, which is why it had to be built.

    Example: nmm cache list

    Example: nmm cache list 3fa9c1 --source > kernel.py
    """
    store = open_store("ro")
    if entry is None:
        _list_all(store, as_json)
        return
    wanted = _key(Path(entry)) if Path(entry).is_file() else store.show(entry).key
    explained = store.explain(wanted)
    changes = list(explained.changes)
    if not explained.state:
        said = {"said": explained.verdict(), "differs": [list(change) for change in changes]}
        show_json(said) if as_json else show([Line(explained.verdict()), _changes(changes)])
        return
    found = store.show(wanted.digest)
    if source:
        sys.stdout.write("".join(found.files.values()))
    elif as_json:
        show_json(
            {
                "digest": found.key.digest, "path": str(found.path), "key": found.key.to_dict(),
                "meta": found.meta, "created": found.created, "files": list(found.files),
                "differs": [list(change) for change in changes],
            }
        )  # fmt: skip
    else:
        tables = {"key": found.key.to_dict(), "meta": found.meta, "created": found.created}
        show(f"entry  {found.key.digest}\npath   {found.path}\n")
        show([
            *(_table(title, data) for title, data in tables.items()),
            *(Line(f"{n}: {counted(len(t.splitlines()), 'line')}") for n, t in found.files.items()),
            _changes(changes),
        ])  # fmt: skip


def _changes(changes: list[tuple[str, str, str]]) -> Grid:
    return Grid.of(("differs in", "this key", "nearest entry"), changes)


def _key(path: Path) -> Key:
    """Return the key of a JSON file: named entries, or what --json prints of an entry."""
    from nmm_compiler.cache.key import Key
    from nmm_compiler.errors import CacheError

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"{path} is not a JSON file of named entries: {error}") from None
    return Key.make(data["key"] if isinstance(data, dict) and "key" in data else data)


def _table(title: str, data: dict[str, Any]) -> Grid:
    plain = ((n, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False))
             for n, v in data.items())  # fmt: skip
    return Grid.of((title, ""), list(plain))


def _list_all(store: Store, as_json: bool) -> None:
    infos = list(store.entries())
    if as_json:
        show_json([_plain(info) for info in infos])
        return
    kept = [i for i in infos if i.entry is None or "price" not in i.entry.key.to_dict()]
    fields = [info.entry.key.fields().items() for info in kept if info.entry is not None]
    same = set.intersection(*map(set, fields)) if len(fields) > 1 else set()
    rows = []
    for info in kept:
        own = set() if info.entry is None else info.entry.key.fields().items() - same
        label = " ".join(f"{n}={short(v)}" for n, v in sorted(own)) or info.state
        hours = f"{(time.time() - info.used) / 3600:,.1f} h ago"
        rows.append((info.digest[:12], _size(info.size_bytes), hours, label))
    parts: list[Part] = [Line(str(store.directory))]
    if rows:
        parts.append(Grid.of(("entry", "size", "used", "key"), rows, right=("size", "used")))
    if same:
        parts.append(Line("in all: " + " ".join(f"{n}={short(v)}" for n, v in sorted(same))))
    if len(kept) < len(infos):
        priced = len(infos) - len(kept)
        parts.append(Line(f"{counted(priced, 'predicted time')}: --json lists them"))
    total = _size(sum(info.size_bytes for info in infos))
    many = counted(len(infos), "entry", "entries")
    show([*parts, Line(f"{many}, {total} of {_size(store.max_bytes)}")])


@app.command(cls=PlainCommand)
def verify(
    quick: Annotated[bool, typer.Option("--quick", help="sha256 only, build nothing")] = False,
) -> None:
    """Build every kernel again and compare the bytes; ends with 1 when something differs.

    Example: nmm cache verify --quick
    """
    rows = list(open_store("ro").verify(None if quick else _rebuild))
    states = [row.state.partition(":")[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    show(f"{counted(len(rows), 'entry', 'entries')}: {counts or 'nothing to verify'}")
    bad = [row for row in rows if not row.state.startswith(("same", "skipped"))]
    for row in bad:
        show(f"{row.digest[:12]}  {row.state}")
    if bad:
        raise typer.Exit(1)


@app.command(cls=PlainCommand)
def clear(
    keep: Annotated[
        int | None,
        typer.Option(
            min=0, help="bytes of whole entries to keep, the least recently used go first"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Delete every entry, or with --keep the damaged and the least recently used ones.

    Example: nmm cache clear --keep 100000000
    """
    store = open_store()
    if keep is None and not yes:
        typer.confirm(f"delete every entry of {store.directory}?", abort=True)
    gone = len(store.prune(keep or 0))
    show(f"{counted(gone, 'entry', 'entries')} deleted, {len(list(store.entries()))} left")


def open_store(mode: str | None = None) -> Store:
    """Return the store of the environment, with lint as its check.

    Raises CacheTrustError for a directory that others can write.
    """
    from nmm_compiler.cache.store import Store
    from nmm_compiler.codegen.build import check_foreign
    from nmm_compiler.options import Options

    return Store.open(Options(cache=mode), check=check_foreign)


def _rebuild(entry: Entry) -> dict[str, str] | None:
    """Build the kernel of an entry again, without a cache; None when another version made it."""
    from nmm_compiler.codegen.build import SOURCE_FILE, build_kernel, kernel_key
    from nmm_compiler.errors import NmmError
    from nmm_compiler.kernels import FAMILIES
    from nmm_compiler.options import Options
    from nmm_compiler.targets import get

    key = entry.key.to_dict()
    try:
        family = FAMILIES[key["family"]]
        spec = family.spec_class.from_dict(key["spec"])
        target = get(key["target"])
        fixed = isinstance(key["schedule"], dict)
        schedule = family.schedule_class.from_dict(key["schedule"]) if fixed else None
        budget = int(key["instruction_budget"])
        dialect = str(key["dialect"])
        now = kernel_key(spec, target, schedule, budget, dialect)
    except (KeyError, TypeError, NmmError):
        return None  # families, fields and targets that this version does not have
    if now != entry.key:
        return None
    options = Options(cache="off", instruction_budget=budget)
    built = build_kernel(spec, target, schedule, dialect=dialect, options=options)
    return {SOURCE_FILE: built.source}


def _plain(info: Info) -> dict[str, Any]:
    entry = info.entry
    return {
        "digest": info.digest,
        "state": info.state,
        "size_bytes": info.size_bytes,
        "used": info.used,
        "key": entry.key.to_dict() if entry else None,
        "meta": entry.meta if entry else None,
        "created": entry.created if entry else None,
        "files": list(entry.files) if entry else [],
    }


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
