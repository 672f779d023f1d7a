"""Replaces a directory of files in one step, so that a kill leaves the old one or the new one.

The new files are written into a staging directory beside the old one. When all are on disk, the two
directories are exchanged by one system call (renameat2 on Linux, renamex_np on macOS), and the old
one is removed. Tools that read the directory need to know nothing of it. Old files that are not
replaced are hard-linked into the new directory before the exchange.

    PARENT/.NAME.nmm-save-XXXX/lock     held by the process that saves, for as long as it lives
    PARENT/.NAME.nmm-save-XXXX/files/   the new files; after the exchange, the old ones

A staging directory whose lock nobody holds was abandoned by a killed process. The next save into
the same directory removes it. Where the file system cannot exchange directories (NFS), the old one
is renamed to `files.old` first: between the two renames there is no directory, both are complete
inside the staging directory, and the next save or `put_back`, which loading calls, puts the old one
back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from nmm_compiler.errors import OutputError

_MARK = ".nmm-save-"
_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2), and RENAME_SWAP of renamex_np(2)
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV)


def replace_directory(
    directory: Path, write: Callable[[Path], None], stale: Sequence[str] = ()
) -> None:
    """Call write(empty directory), then make what it wrote the files of `directory`.

    stale: patterns of file names that an older version left and that must not stay; all other files
    and folders in `directory` are kept.

    Raises OSError when something cannot be written, OutputError where the directory cannot be
    replaced as a whole; `directory` is then as it was.
    """
    target = Path(os.path.realpath(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in _abandoned(target):
        _restore(abandoned, target)
        _remove(abandoned)
    root, lock = _staging(target)
    try:
        new = root / "files"
        new.mkdir()
        write(new)
        _match_mode(new, target)
        if target.is_dir():
            _carry_over(target, new, stale)
        _flush(new)
        _put(new, target)
    finally:
        _restore(root, target)
        _remove(root)
        os.close(lock)


def put_back(directory: Path) -> None:
    """Put the old directory back if a save was killed between its two renames.

    Where that save still runs, wait for its second rename, for a second at most. Does nothing where
    the directory is there, was never saved, or may not be written.
    """
    with contextlib.suppress(OSError, ValueError):  # not to be looked at, or no path at all
        target = Path(os.path.realpath(directory))
        aside = f"{glob.escape(f'.{target.name}{_MARK}')}*/files.old"
        for _ in range(50):
            if target.exists() or not any(target.parent.glob(aside)):
                return
            for abandoned in _abandoned(target):
                _restore(abandoned, target)
            time.sleep(0.02)


def _put(new: Path, target: Path) -> None:
    """Make `new` the directory `target`, in one step; the old one ends where `new` was."""
    try:
        os.rename(new, target)  # absent, or an empty directory
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EXDEV):
            raise OutputError(
                f"{target} cannot be replaced as a whole ({error.strerror}): it is a mount point "
                "or in use; pass a directory inside of it"
            ) from error
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(new, target):
            old = new.with_name("files.old")
            os.rename(target, old)
            os.rename(new, target)
    _flush_entries(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories in one step; return False where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        failed = library.renamex_np(*names, ctypes.c_uint(_EXCHANGE))
    elif hasattr(library, "renameat2"):
        at = ctypes.c_int(_AT_FDCWD)
        failed = library.renameat2(at, names[0], at, names[1], ctypes.c_uint(_EXCHANGE))
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _restore(root: Path, target: Path) -> None:
    """Put the old directory back if a save stopped between its two renames."""
    old = root / "files.old"
    if old.is_dir() and not target.exists():
        os.rename(old, target)


def _remove(root: Path) -> None:
    """Remove a staging directory, its lock last, since the lock shows that it is abandoned."""
    for part in ("files", "files.old"):
        shutil.rmtree(root / part, ignore_errors=True)
    with contextlib.suppress(OSError):  # a file cannot be removed; a later save tries again
        if not any((root / part).exists() for part in ("files", "files.old")):
            (root / "lock").unlink(missing_ok=True)
            root.rmdir()


def _match_mode(new: Path, target: Path) -> None:
    """Give the new directory the permissions of the old one, or those of any new directory."""
    if target.is_dir():
        new.chmod(stat.S_IMODE(target.stat().st_mode))


def _carry_over(old: Path, new: Path, stale: Sequence[str]) -> None:
    """Link into `new` the files that only `old` has; copy those that cannot be linked."""
    device = old.stat().st_dev
    for entry in os.scandir(old):
        place = new / entry.name
        if any(fnmatch(entry.name, pattern) for pattern in stale) or (
            place.exists() and not entry.is_dir(follow_symlinks=False)
        ):
            continue
        if not entry.is_dir(follow_symlinks=False):
            _link(entry, place)
            continue
        if entry.stat(follow_symlinks=False).st_dev != device:
            raise OutputError(
                f"{entry.path} is a mount point, so {old} cannot be replaced as a whole; pass "
                "another directory"
            )
        place.mkdir(exist_ok=True)
        _carry_over(Path(entry.path), place, ())
        shutil.copystat(entry.path, place)


def _link(entry: os.DirEntry[str], place: Path) -> None:
    try:
        os.link(entry.path, place, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        shutil.copy2(entry.path, place, follow_symlinks=False)


def _flush(directory: Path) -> None:
    """Wait until the new files are on the disk, so that a power cut leaves them whole, too."""
    for path in (*directory.iterdir(), directory):
        if path.is_file() or path == directory:
            _flush_entries(path)


def _flush_entries(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(handle)


def _staging(target: Path) -> tuple[Path, int]:
    """Return a new staging directory and the descriptor that holds its lock."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent))
        root.chmod(0o755 & ~_umask())
        try:
            lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another save took it for abandoned before it was locked
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (root / "lock").exists():
            return root, lock
        os.close(lock)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _abandoned(target: Path) -> Iterator[Path]:
    """Yield the staging directories of `target` whose process is gone."""
    prefix = f".{target.name}{_MARK}"
    for entry in list(os.scandir(target.parent)):
        if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
            continue
        root = Path(entry.path)
        try:
            lock = os.open(root / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                root.rmdir()  # killed before the lock; or about to lock, and will make another
            continue
        except OSError:
            continue  # somebody else's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield root
        except OSError:
            continue
        finally:
            os.close(lock)
