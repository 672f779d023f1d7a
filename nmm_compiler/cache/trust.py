"""Which directories and files the cache trusts. Entries are Python source that will be executed.

A directory that is written must belong to the user and be closed to everybody else (0700). One
that is only read may also belong to root, as in a container image, when nobody else can write it.
No symlink is followed at or below the cache directory, and every directory above it must belong to
us or root and let nobody else rename things. Each refusal says how to mend it.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from nmm_compiler.cache.entry import MAX_ENTRY_BYTES
from nmm_compiler.errors import CacheTrustError, DamagedEntryError

ROOT_UID = 0
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang


def _owners(writing: bool) -> set[int]:
    """Return the user ids whose files are trusted: ours, and root's where we only read."""
    return {os.geteuid()} if writing else {os.geteuid(), ROOT_UID}


def check_directory(path: Path, writing: bool) -> bool:
    """Check the cache directory, or one inside it; return whether it exists.

    Raises CacheTrustError when others could write there, or (writing) even read there.
    """
    try:
        seen = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    quoted, mode, me = shlex.quote(str(path)), stat.S_IMODE(seen.st_mode), os.geteuid()
    if stat.S_ISLNK(seen.st_mode):
        raise CacheTrustError(
            f"cache directory {path} is a symlink and could be pointed elsewhere; "
            f"name the real one: export NMM_CACHE_DIR={shlex.quote(os.path.realpath(path))}"
        )
    if not stat.S_ISDIR(seen.st_mode):
        raise CacheTrustError(
            f"cache directory {path} is not a directory; remove it (rm {quoted}) or set "
            "NMM_CACHE_DIR to another path"
        )
    if seen.st_uid not in _owners(writing):
        mend = f"chown -R {me} {quoted} (as root, if you trust what is in it)"
        if seen.st_uid == ROOT_UID:
            mend = "export NMM_CACHE=ro, which reads a directory of root that nobody else can write"
        raise CacheTrustError(
            f"cache directory {path} belongs to user id {seen.st_uid}, you are {me}, and its "
            f"entries are code that would run as you; mend it: {mend}, or set NMM_CACHE_DIR to a "
            "directory of your own"
        )
    if mode & (0o077 if writing else 0o022):
        raise CacheTrustError(
            f"cache directory {path} has mode {mode:04o}, so other users can "
            f"{'write' if mode & 0o022 else 'read'} it, and its entries are code that would run "
            f"as you; mend it: chmod 700 {quoted}"
        )
    return True


def check_parents(path: Path) -> None:
    """Refuse a parent, named or real, where other users could rename the cache directory.

    The rule of OpenSSH's StrictModes: each parent belongs to us or to root and nobody else can
    write it; a sticky one like /tmp will do, since only owners rename things there.
    """
    for parent in dict.fromkeys((*Path(os.path.realpath(path)).parents, *path.parents)):
        try:
            seen = os.stat(parent)
        except OSError:
            continue  # not there yet, or not ours to look at: opening it will say so
        mode, me, quoted = stat.S_IMODE(seen.st_mode), os.geteuid(), shlex.quote(str(parent))
        why = ""
        if seen.st_uid not in (me, ROOT_UID):
            why = f"belongs to user id {seen.st_uid}, who can replace the cache there"
            mend = f"chown {me} {quoted} (as root)"
        elif mode & 0o022 and not mode & stat.S_ISVTX:
            who = "any user" if mode & stat.S_IWOTH else f"group {seen.st_gid}"
            why = f"has mode {mode:04o}: {who} can replace the cache there"
            mend = f"chmod go-w {quoted}"
        if why:
            raise CacheTrustError(
                f"{parent}, above the cache directory {path}, {why}; mend it: {mend}, or set "
                "NMM_CACHE_DIR to another path"
            )


def open_checked(path: str | Path, writing: bool, folder: int | None = None) -> int:
    """Open an entry's directory, or a file of the opened `folder`; return the descriptor.

    Raises FileNotFoundError when there is none, DamagedEntryError for symlinks, devices, and what
    others own or can write.
    """
    try:
        handle = os.open(path, _FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedEntryError(f"{path} is a symlink or a socket") from None
        raise
    seen = os.fstat(handle)
    mode, fault = stat.S_IMODE(seen.st_mode), ""
    if folder is None and not stat.S_ISDIR(seen.st_mode):
        fault = "is not a directory"
    elif folder is not None and not stat.S_ISREG(seen.st_mode):
        fault = "is not a regular file"
    elif seen.st_uid not in _owners(writing) or mode & 0o022:
        fault = f"belongs to user id {seen.st_uid} with mode {mode:04o}"
    if fault:
        os.close(handle)
        raise DamagedEntryError(f"{path} {fault}")
    return handle


def read_file(name: str, folder: int, writing: bool) -> bytes:
    """Return the bytes of a regular file of an opened entry; raises as `open_checked` does."""
    with os.fdopen(open_checked(name, writing, folder), "rb") as file:
        data = file.read(MAX_ENTRY_BYTES + 1)
    if len(data) > MAX_ENTRY_BYTES:
        raise DamagedEntryError(f"{name} has over {MAX_ENTRY_BYTES} bytes")
    return data
