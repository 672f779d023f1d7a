"""`nmm cache`: lists, verifies and clears the kernel cache. `nmm build` fills it.

list and verify never change an entry, whatever NMM_CACHE says; clear needs mode "rw".
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmm_compiler.cache.key import Key, short
from nmm_compiler.cli import values
from nmm_compiler.cli.show import Answer, show
from nmm_compiler.errors import CacheError, NmmError
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.text import counted

if TYPE_CHECKING:
    from nmm_compiler.cache.entry import Entry
    from nmm_compiler.cache.explain import Info
    from nmm_compiler.cache.store import Store


def list_(
    entry: Annotated[
        str | None,
        typer.Argument(
            help="the first digits of an entry, or a JSON file of a key",
            autocompletion=values.entries,
        ),
    ] = None,
) -> Answer:
    """List the kernels, most recently used first, and count the predicted times.

    Of one entry: its key, what was predicted for it, its files, and how its key differs from the
    nearest other entry, which is why it had to be built.

    Example: nmm cache list

    Example: nmm cache list 3fa9c1
    """
    store = open_store("ro")
    if entry is None:
        infos = list(store.entries())
        each = [
            _plain(info.digest, info.entry)
            | {"state": info.state, "size_bytes": info.size_bytes, "used": info.used}
            for info in infos
        ]
        return Answer(each, [_of_all(store, infos)])
    wanted = _key(Path(entry)) if Path(entry).is_file() else store.show(entry).key
    explained = store.explain(wanted)
    changes = [list(change) for change in explained.changes]
    differs = Grid.of(("differs in", "this key", "nearest entry"), changes)
    if not explained.state:
        said = explained.verdict()
        return Answer({"said": said, "differs": changes}, [[Line(said), differs]])
    kept = store.show(wanted.digest)
    tables = [
        Grid.of((title, ""), [(n, v if isinstance(v, str) else json.dumps(v)) for n, v in held])
        for title, held in (
            ("key", kept.key.to_dict().items()),
            ("meta", kept.meta.items()),
            ("created", kept.created.items()),
        )
    ]
    files = [Line(f"{n}: {counted(len(t.splitlines()), 'line')}") for n, t in kept.files.items()]
    return Answer(
        {**_plain(wanted.digest, kept), "path": str(kept.path), "differs": changes},
        [f"entry  {wanted.digest}\npath   {kept.path}\n", [*tables, *files, differs]],
    )


def _key(path: Path) -> Key:
    """Return the key of a JSON file: named entries, or what --json prints of an entry."""
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
) -> Answer:
    """Build every kernel again and compare the bytes; ends with 1 when something differs.

    Example: nmm cache verify --quick
    """
    rows = list(open_store("ro").verify(None if quick else _rebuild))
    states = [row.state.partition(":")[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    bad = [row for row in rows if not row.state.startswith(("same", "skipped"))]
    said = f"{counted(len(rows), 'entry', 'entries')}: {counts or 'nothing to verify'}"
    return Answer(
        {row.digest: row.state for row in rows},
        [said, *(f"{row.digest[:12]}  {row.state}" for row in bad)],
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
        fixed = isinstance(key["schedule"], dict)
        schedule = family.schedule_class.from_dict(key["schedule"]) if fixed else None
        budget, dialect = int(key["instruction_budget"]), str(key["dialect"])
        asked = (spec, get(key["target"]), schedule)
        now = kernel_key(*asked, budget, dialect)
    except (KeyError, TypeError, NmmError):
        return None  # families, fields and targets that this version does not have
    if now != entry.key:
        return None
    options = Options(cache="off", instruction_budget=budget)
    return {SOURCE_FILE: build_kernel(*asked, dialect=dialect, options=options).source}


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
