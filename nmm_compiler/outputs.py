"""Writes output files, and directories of files, whole or not at all; reads users' JSON files.

A file is written beside its place and moved there, so that a full disk, a kill or Ctrl-C leaves the
file that was there before. A device or a pipe (/dev/stdout, /dev/null, a FIFO) is written in place:
moving a file there would replace the device.

A directory is replaced by two renames. A full disk, or a kill while files are written, leaves the
old one. Between the two renames it is `PARENT/.NAME.XXXX/old`; there it stays when a kill comes
just then.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nmm_compiler.errors import FileError, OutputError

Fill = Callable[[IO[bytes]], Any]
LARGEST_JSON_BYTES = 64 << 20
"""The largest configs and indices of models have some megabytes."""


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the object in a JSON file, or what else `kind` is; raise FileError, naming the file,
    without one."""
    if os.path.exists(path) and not (
        os.path.isfile(path) and os.path.getsize(path) <= LARGEST_JSON_BYTES
    ):  # a device may have no end
        raise FileError(f"{path} is no regular file of at most {LARGEST_JSON_BYTES:,} bytes")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # brackets may nest without end
        raise FileError(f"{path} is not JSON ({error}); restore it, or write it anew") from None
    if not isinstance(told, kind):
        raise FileError(
            f"{path} holds a {type(told).__name__}, not a {kind.__name__}; write it anew"
        )
    return told


def check_writable(path: str | Path) -> None:
    """Raise OutputError when no file can be written at `path`; before work that takes a while."""
    path = Path(path)
    try:
        if not _in_place(path):
            _folder_beside(path).cleanup()
        elif not os.access(path, os.W_OK):
            raise PermissionError(0, "no permission to write there")
    except OSError as error:
        raise cannot_write(path, error) from error


def write_text(path: str | Path, text: str | Iterable[str]) -> Path:
    """Write UTF-8 text, whole or in pieces, to `path`; return the path. Raises as `write` does."""
    return write(path, utf8(text))


def utf8(text: str | Iterable[str]) -> Fill:
    """Return what writes a text, whole or in pieces; half characters are escaped."""
    pieces = (text,) if isinstance(text, str) else text
    encoded = (piece.encode("utf-8", "backslashreplace") for piece in pieces)
    return lambda file: file.writelines(encoded)


def write(path: str | Path, fill: Fill) -> Path:
    """Let `fill` write the bytes of a file, which gets the name `path` when it is complete.

    Raises OutputError when it cannot be written; a file that was there before is then unchanged.
    """
    write_all({Path(path): fill})
    return Path(path)


def write_all(files: Mapping[Path, Fill]) -> None:
    """Write several files as `write` does: those that were there stay until all are complete."""
    staged: dict[Path, Path] = {}
    with contextlib.ExitStack() as folders:
        try:
            for path, fill in files.items():
                if _in_place(path):
                    with path.open("wb") as file:
                        fill(file)
                else:
                    staged[path] = Path(folders.enter_context(_folder_beside(path)), "file")
                    _fill(staged[path], path, fill)
            for path, complete in staged.items():
                os.replace(complete, os.path.realpath(path))
        except OSError as error:
            raise cannot_write(path, error) from error


def _folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder beside a file, or beside what a link points to; it is deleted with its file."""
    place = os.path.dirname(os.path.realpath(path))
    return tempfile.TemporaryDirectory(prefix=".nmm-", dir=place, ignore_cleanup_errors=True)


def _fill(staged: Path, path: Path, fill: Fill) -> None:
    """Let `fill` write a new file, flushed to the disk, with the mode of the one at `path`."""
    with staged.open("xb") as file:
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, staged)
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def cannot_write(path: str | Path, error: OSError) -> OutputError:
    """Return the error of the catalogue for a file that cannot be written."""
    reason = error.strerror or str(error)
    return OutputError(
        f"cannot write {path}: {reason}; pass a file in a directory that can be written"
    )


def _in_place(path: Path) -> bool:
    """Return whether `path` is a device, a pipe, or a name that another process's file may have.

    Raises IsADirectoryError for a directory.
    """
    if path.is_dir():
        raise IsADirectoryError(0, "it is a directory")
    shared = os.path.abspath(path).startswith(("/dev/", "/proc/"))
    return path.exists() and (shared or not path.is_file())


def replace_directory(
    directory: Path, write: Callable[[Path], None], stale: Sequence[str] = ()
) -> None:
    """Call write(empty directory), then make what it wrote the files of `directory`.

    stale: patterns of file names that an older version left and that must not stay; all other files
    and folders in `directory` are kept. Raises OSError when something cannot be written or the
    directory cannot be renamed (a mount point); `directory` is then as it was.
    """
    target = Path(os.path.realpath(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as root:
        new, old = Path(root, "new"), Path(root, "old")
        try:
            new.mkdir()
            write(new)
            if target.is_dir():
                kept = functools.partial(_left_out, target, new, stale)
                shutil.copytree(
                    target, new, symlinks=True, ignore=kept, copy_function=_link, dirs_exist_ok=True
                )
                os.rename(target, old)
            os.rename(new, target)
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            raise


def _left_out(
    old: Path, new: Path, stale: Sequence[str], folder: str, names: list[str]
) -> set[str]:
    """Return the names in `old` that do not stay: stale ones, and those that `new` has too."""
    if Path(folder) != old:
        return set()
    gone = {name for pattern in stale for name in fnmatch.filter(names, pattern)}
    return gone | {name for name in names if (new / name).exists()}


def _link(source: str, place: str) -> None:
    """Make a hard link where that can be, else a copy."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
