"""`nmm cache`: shows, explains, verifies and cleans the kernel cache.

list, show, explain and verify never change an entry, whatever NMM_CACHE says; prune, clear and
import need mode "rw".
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
from nmm_compiler.cli.show import show as say
from nmm_compiler.cli.show import show_json
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.text import counted

if TYPE_CHECKING:
    from nmm_compiler.cache.entry import Entry
    from nmm_compiler.cache.explain import Info
    from nmm_compiler.cache.store import Store

app = typer.Typer(
    cls=WrappedHelp,
    help="The kernel cache: list, show, explain, verify, prune, clear, export, import.",
    epilog="Where: NMM_CACHE_DIR. How: NMM_CACHE=off|ro|rw|require. See docs/cache.md.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path | None, typer.Option("--dir", help="the cache directory, instead of NMM_CACHE_DIR")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


@app.command("list", cls=PlainCommand, epilog="Example: nmm cache list --json | jq '.[].digest'")
def list_(
    directory: Directory = None,
    prices: Annotated[bool, typer.Option("--prices", help="also list predicted times")] = False,
    as_json: AsJson = False,
) -> None:
    """List the kernels, most recently used first, and count the predicted times; damaged entries
    are marked. --json has all entries."""
    store = _store(directory, "ro")
    infos = list(store.entries())
    if as_json:
        show_json([_plain(info) for info in infos])
        return
    priced = [i for i in infos if i.entry is not None and "price" in i.entry.key.to_dict()]
    kept = infos if prices else [info for info in infos if info not in priced]
    fields = [info.entry.key.fields() for info in kept if info.entry is not None]
    shared = _shared(fields) if len(fields) > 1 else {}
    rows = []
    for info in kept:
        label = info.state
        if info.entry is not None:
            own = info.entry.key.fields().items()
            label = " ".join(f"{n}={short(v)}" for n, v in own if n not in shared)
        age = _age(time.time() - info.used)
        rows.append((info.digest[:12], _size(info.size_bytes), age, label))
    total = sum(info.size_bytes for info in infos)
    parts: list[Part] = [Line(str(store.directory))]
    if rows:
        parts.append(Grid.of(("entry", "size", "used", "key"), rows, right=("size", "used")))
    if shared:
        alike = " ".join(f"{name}={short(value)}" for name, value in shared.items())
        parts.append(Line(f"in all: {alike}"))
    many = counted(len(infos), "entry", "entries")
    if len(kept) < len(infos):
        size = _size(sum(info.size_bytes for info in priced))
        parts.append(Line(f"{counted(len(priced), 'predicted time')}, {size}: --prices lists them"))
    say([*parts, Line(f"{many}, {_size(total)} of {_size(store.max_bytes)}")])


@app.command(cls=PlainCommand, epilog="Example: nmm cache show 3fa9c1 --source > kernel.py")
def show(
    entry: Annotated[
        str,
        typer.Argument(help="the first digits of an entry's name", autocompletion=values.entries),
    ],
    directory: Directory = None,
    source: Annotated[bool, typer.Option("--source", help="print the files, nothing else")] = False,
    as_json: AsJson = False,
) -> None:
    """Print one entry: its key by name, what was predicted for it, its files."""
    store = _store(directory, "ro")
    found = store.show(entry)
    if source:
        for text in found.files.values():
            sys.stdout.write(text)
        return
    if as_json:
        show_json(
            {
                "digest": found.key.digest,
                "path": str(found.path),
                "key": found.key.to_dict(),
                "meta": found.meta,
                "created": found.created,
                "files": list(found.files),
            }
        )
        return
    say(f"entry  {found.key.digest}\npath   {found.path}")
    for title, data in (
        ("key", found.key.to_dict()),
        ("meta", found.meta),
        ("created", found.created),
    ):
        rows = [
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in data.items()
        ]
        say("")
        say([Grid.of((title, ""), rows)])
    for name, text in found.files.items():
        say(f"\n{name}: {counted(len(text.splitlines()), 'line')}")


@app.command(
    cls=PlainCommand,
    epilog="Example: nmm cache explain 3fa9c1\n\nExample: nmm cache explain --key wanted.json",
)
def explain(
    entry: Annotated[
        str | None,
        typer.Argument(
            help="first digits of an entry; default: the newest entry",
            autocompletion=values.entries,
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="a JSON file with the named entries of a key; - is standard input"),
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Say why a kernel missed the cache: how its key differs from the nearest entry's.

    For an entry in the cache, this is why it had to be built beside the others. With --key, it is
    why that kernel would be built; `nmm cache show ENTRY --json` prints a key to start from.
    """
    from nmm_compiler.cache.key import Key
    from nmm_compiler.errors import CacheError, CacheKeyError

    store = _store(directory, "ro")
    if key is not None:
        try:
            text = sys.stdin.read() if str(key) == "-" else key.read_text()
            data = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise CacheKeyError(f"{key} is not a JSON file of named entries: {error}") from None
        if isinstance(data, dict) and isinstance(data.get("key"), dict):
            data = data["key"]  # the output of `show --json`
        wanted = Key.make(data)
    elif entry is not None:
        wanted = store.show(entry).key
    else:
        whole = [info.entry for info in store.entries() if info.entry is not None]
        if not whole:
            raise CacheError(f"{store.directory} has no entries to explain; name a key with --key")
        wanted = max(whole, key=lambda entry: str(entry.created.get("time", ""))).key
    found = store.explain(wanted)
    if as_json:
        nearest = found.nearest
        changes = [dict(zip(("name", "ours", "theirs"), row, strict=True)) for row in found.changes]
        show_json({"said": f"{wanted}: {found.verdict()}", "changes": changes,
                   "nearest": None if nearest is None else nearest.digest})  # fmt: skip
        return
    say([Line(f"entry {wanted.digest[:12]}: {found.verdict()}")])
    if found.nearest is not None:
        say([
            Line(f"nearest entry {found.nearest.digest[:12]} differs in:"),
            Grid.of(("name", "this key", "nearest entry"), found.changes),
        ])  # fmt: skip


@app.command(
    cls=PlainCommand, epilog="Example: nmm cache verify\n\nExample: nmm cache verify --quick"
)
def verify(
    directory: Directory = None,
    quick: Annotated[bool, typer.Option("--quick", help="sha256 only, build nothing")] = False,
) -> None:
    """Build every kernel again and compare the bytes; ends with 1 when something differs."""
    store = _store(directory, "ro")
    rows = list(store.verify(None if quick else _rebuild))
    states = [row.state.partition(":")[0] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    bad = [row for row in rows if not row.state.startswith(("same", "skipped"))]
    say(f"{counted(len(rows), 'entry', 'entries')}: {counts or 'nothing to verify'}")
    for row in bad:
        say(f"{row.digest[:12]}  {row.state}")
    if bad:
        raise typer.Exit(1)


@app.command(
    cls=PlainCommand,
    epilog="Example: nmm cache prune\n\nExample: nmm cache prune --max-bytes 100000000",
)
def prune(
    directory: Directory = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="bytes to keep; default NMM_CACHE_MAX_BYTES")
    ] = None,
) -> None:
    """Delete damaged entries, what killed processes left, and the least recently used entries."""
    store = _store(directory)
    gone = store.prune(max_bytes)
    freed = sum(seen.size_bytes for seen in gone)
    many = counted(len(gone), "entry", "entries")
    say(f"{many} deleted ({_size(freed)}), {len(list(store.entries()))} left")


@app.command(cls=PlainCommand, epilog="Example: nmm cache clear --yes")
def clear(
    directory: Directory = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Delete every entry. Kernels are built again when they are needed next."""
    store = _store(directory)
    if not yes:
        typer.confirm(f"delete every entry of {store.directory}?", abort=True)
    say(f"{counted(len(store.prune(0)), 'entry', 'entries')} deleted")


@app.command(
    cls=PlainCommand,
    epilog="Example: nmm cache export kernels.tar\n\nExample: nmm cache export --push",
)
def export(
    path: Annotated[Path | None, values.output_argument("the tar archive to write")] = None,
    prefix: Annotated[str, typer.Option("--entry", help="only entries that start so")] = "",
    push: Annotated[
        bool, typer.Option("--push", help="send to the remote cache, NMM_REMOTE_CACHE")
    ] = False,
    directory: Directory = None,
) -> None:
    """Write entries to an archive, or send them to the declared remote cache."""
    from nmm_compiler.errors import CacheError

    if (path is None) != push:
        raise CacheError("name an archive to write, or pass --push; one of the two")
    store = _store(directory, "ro")
    try:
        if path is None:
            said = f"{counted(store.push(prefix), 'entry', 'entries')} sent"
        else:
            written = store.export(path, prefix)
            said = f"{counted(written, 'entry', 'entries')} written to {path}"
    except (OSError, ImportError, ValueError) as error:  # what filesystems and fsspec raise
        raise CacheError(f"cannot write to {path or store.remote}: {error}") from error
    say(said)


@app.command("import", cls=PlainCommand, epilog="Example: nmm cache import kernels.tar")
def import_(
    path: Annotated[Path, typer.Argument(help="an archive that `nmm cache export` wrote")],
    directory: Directory = None,
) -> None:
    """Take the entries of an archive, after sha256 and lint of each; all of it or nothing.

    The entries are code that will run as you: import archives of people you trust.
    """
    from nmm_compiler.errors import CacheError

    try:
        taken = _store(directory).import_(path)
    except OSError as error:
        raise CacheError(f"{path} cannot be imported: {error}") from error
    say(f"{counted(taken, 'entry', 'entries')} taken")


def _shared(fields: list[dict[str, str]]) -> dict[str, str]:
    """Return the fields that have the same value in all keys."""
    first, *rest = fields
    return {n: v for n, v in first.items() if all(other.get(n) == v for other in rest)}


def _store(directory: Path | None, mode: str | None = None) -> Store:
    """Return the store of the options and the environment, with lint as its check."""
    from nmm_compiler import options
    from nmm_compiler.cache.store import Store

    given = options.Options(cache_dir=None if directory is None else str(directory), cache=mode)
    return Store.open(given, check=_lint)


def _lint(name: str, text: str) -> None:
    """Refuse a kernel from elsewhere that is not clean NKI."""
    from nmm_compiler.nki_api.lint import check_source

    check_source(text, filename=name)


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
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
