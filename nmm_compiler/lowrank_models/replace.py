"""Replaces a directory of files as a whole: a temporary directory beside it, then renames.

A full disk, or a kill while files are written, leaves the old directory. Between the two renames
the old one is `PARENT/.NAME.XXXX/old`; there it stays when a kill comes just then.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path


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
    root = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    new, old = root / "new", root / "old"
    try:
        new.mkdir()
        write(new)
        if target.is_dir():
            new.chmod(stat.S_IMODE(target.stat().st_mode))
            _carry_over(target, new, stale)
            os.rename(target, old)
        os.rename(new, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _carry_over(old: Path, new: Path, stale: Sequence[str]) -> None:
    """Copy into `new` what only `old` has; files are hard links where they can be."""
    for entry in os.scandir(old):
        place = new / entry.name
        if place.exists() or any(fnmatch(entry.name, pattern) for pattern in stale):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, place, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, str(place), follow_symlinks=False)


def _link(source: str, place: str, *, follow_symlinks: bool = True) -> str:
    try:
        os.link(source, place, follow_symlinks=follow_symlinks)
    except OSError:
        shutil.copy2(source, place, follow_symlinks=follow_symlinks)
    return place
