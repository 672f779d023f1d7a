"""`nmm cache`: lists, verifies and clears the kernel cache. `nmm build` fills it.

list and verify never change an entry, whatever NMM_CACHE says; clear needs mode "rw".
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cache.key import short
from nmm_compiler.cli import values
from nmm_compiler.cli.show import show, show_json
from nmm_compiler.errors import CacheError, NmmError
from nmm_compiler.report.parts import Grid, Line
from nmm_compiler.report.text import counted

if TYPE_CHECKING:
    from nmm_compiler.cache.entry import Entry
    from nmm_compiler.cache.explain import Info
    from nmm_compiler.cache.key import Key
    from nmm_compiler.cache.store import Store


def list_(
    entry: Annotated[
        str | None,
        typer.Argument(
            help="the first digits of an entry, or a JSON file of a key",
            autocompletion=values.entries,
        ),
    ] = None,
    as_json: values.AsJson = False,
) -> None:
    """List the kernels, most recently used first, and count the predicted times.

    Of one entry: its key, what was predicted for it, its files, and how its key differs from the
    nearest other entry, which is why it had to be built.

    Example: nmm cache list

    Example: nmm cache list 3fa9c1
    """
    store = open_store("ro")
    if entry is None:
        infos = list(store.entries())
        if as_json:
            show_json([_plain(info.digest, info.entry) | _of_file(info) for info in infos])
        else:
            _show_all(store, infos)
        return
    wanted = _key(Path(entry)) if Path(entry).is_file() else store.show(entry).key
    explained = store.explain(wanted)
    changes = [list(change) for change in explained.changes]
    differs = Grid.of(("differs in", "this key", "nearest entry"), changes)
    if not explained.state:
        said = {"said": explained.verdict(), "differs": changes}
        show_json(said) if as_json else show([Line(explained.verdict()), differs])
        return
    kept = store.show(wanted.digest)
    if as_json:
        plain = _plain(wanted.digest, kept)
        show_json({**plain, "path": str(kept.path), "differs": changes})
        return
    tables = {"key": kept.key.to_dict(), "meta": kept.meta, "created": kept.created}
    show(f"entry  {wanted.digest}\npath   {kept.path}\n")
    show([
        *(_table(title, data) for title, data in tables.items()),
        *(Line(f"{n}: {counted(len(t.splitlines()), 'line')}") for n, t in kept.files.items()),
        differs,
    ])  # fmt: skip


def _key(path: Path) -> Key:
    """Return the key of a JSON file: named entries, or what --json prints of an entry."""
    from nmm_compiler.cache.key import Key

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"{path} is not a JSON file of named entries: {error}") from None
    return Key.make(data["key"] if isinstance(data, dict) and "key" in data else data)


def _plain(digest: str, entry: Entry | None) -> dict[str, Any]:
    return {
        "digest": digest,
        "key": entry.key.to_dict() if entry else None,
        "meta": entry.meta if entry else None,
        "created": entry.created if entry else None,
        "files": list(entry.files) if entry else [],
    }


def _of_file(info: Info) -> dict[str, Any]:
    return {"state": info.state, "size_bytes": info.size_bytes, "used": info.used}


def _table(title: str, data: Mapping[str, Any]) -> Grid:
    plain = ((n, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False))
             for n, v in data.items())  # fmt: skip
    return Grid.of((title, ""), list(plain))


def _show_all(store: Store, infos: Sequence[Info]) -> None:
    """Show the kernels, one a row: the fields of the keys that are not the same in all of them."""
    kept = [i for i in infos if i.entry is None or "price" not in i.entry.key.to_dict()]
    fields = [info.entry.key.fields().items() for info in kept if info.entry is not None]
    same = set.intersection(*map(set, fields)) if len(fields) > 1 else set()

    def label(pairs: set[Any]) -> str:
        return " ".join(f"{name}={short(value)}" for name, value in sorted(pairs))

    rows = [
        (
            info.digest[:12], _size(info.size_bytes),
            f"{(time.time() - info.used) / 3600:,.1f} h ago",
            (label(info.entry.key.fields().items() - same) if info.entry else "") or info.state,
        )
        for info in kept
    ]  # fmt: skip
    priced = len(infos) - len(kept)
    total = f"{counted(len(infos), 'entry', 'entries')}, {_size(sum(i.size_bytes for i in infos))}"
    table = Grid.of(("entry", "size", "used", "key"), rows, right=("size", "used"))
    show([
        Line(str(store.directory)),
        *([table] if rows else []),
        *([Line(f"in all: {label(same)}")] if same else []),
        *([Line(f"{counted(priced, 'predicted time')}: --json lists them")] if priced else []),
        Line(f"{total} of {_size(store.max_bytes)}"),
    ])  # fmt: skip


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="sha256 only, build nothing")] = False,
) -> None:
    """Build every kernel again and compare the bytes; ends with 1 when something differs.

    Example: nmm cache verify --quick
    """
    rows = list(open_store("ro").verify(None if quick else _rebuild))
    states = [row.state.partition(":")[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    bad = [row for row in rows if not row.state.startswith(("same", "skipped"))]
    show(f"{counted(len(rows), 'entry', 'entries')}: {counts or 'nothing to verify'}")
    for row in bad:
        show(f"{row.digest[:12]}  {row.state}")
    if bad:
        raise typer.Exit(1)


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


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
