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

from nmm_compiler.errors import CacheTrustError, DamagedEntryError

ROOT_UID = 0
MAX_FILE_BYTES = 64 << 20


def owners(writing: bool) -> frozenset[int]:
    """Return the user ids whose files are trusted: ours, and root's where we only read."""
    return frozenset({os.geteuid()} if writing else {os.geteuid(), ROOT_UID})


def check_directory(path: Path, writing: bool) -> bool:
    """Check the cache directory and what is above it; return whether it exists.

    Raises CacheTrustError when others could write there, or (writing) even read there.
    """
    _check_parents(path)
    return check_itself(path, writing)


def check_itself(path: Path, writing: bool) -> bool:
    """`check_directory` without what is above: for directories inside one that was checked."""
    try:
        seen = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    quoted = shlex.quote(str(path))
    if stat.S_ISLNK(seen.st_mode):
        real = shlex.quote(os.path.realpath(path))
        raise CacheTrustError(
            f"cache directory {path} is a symlink and could be pointed elsewhere; "
            f"name the real one: export NMM_CACHE_DIR={real}"
        )
    if not stat.S_ISDIR(seen.st_mode):
        raise CacheTrustError(
            f"cache directory {path} is not a directory; remove it (rm {quoted}) or set "
            "NMM_CACHE_DIR to another path"
        )
    mode = stat.S_IMODE(seen.st_mode)
    me = os.geteuid()
    if seen.st_uid not in owners(writing):
        mend = (
            f"chown -R {me} {quoted} (as root, if you trust what is in it)"
            if seen.st_uid != ROOT_UID
            else "export NMM_CACHE=ro, which reads a directory of root that nobody else can write"
        )
        raise CacheTrustError(
            f"cache directory {path} belongs to user id {seen.st_uid}, you are {me}, and its "
            f"entries are code that would run as you; mend it: {mend}, or set NMM_CACHE_DIR to a "
            "directory of your own"
        )
    forbidden = 0o077 if writing else 0o022
    if mode & forbidden:
        raise CacheTrustError(
            f"cache directory {path} has mode {mode:04o}, so other users can "
            f"{'write' if mode & 0o022 else 'read'} it, and its entries are code that would run "
            f"as you; mend it: chmod 700 {quoted}"
        )
    return True


def _check_parents(path: Path) -> None:
    """Refuse a parent, named or real, where other users could rename the cache directory.

    The rule of OpenSSH's StrictModes: each parent belongs to us or to root and nobody else can
    write it; a sticky one like /tmp will do, since only owners rename things there.
    """
    absolute = Path(os.path.abspath(path))
    seen: set[Path] = set()
    for parent in (*Path(os.path.realpath(absolute)).parents, *absolute.parents):
        if parent in seen:
            continue
        seen.add(parent)
        try:
            status = os.stat(parent)
        except OSError:
            continue  # not there yet, or not ours to look at: opening it will say so
        mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(str(parent))
        me = os.geteuid()
        if status.st_uid not in (me, ROOT_UID):
            raise CacheTrustError(
                f"{parent}, above the cache directory {path}, belongs to user id {status.st_uid}, "
                f"who can replace the cache there, and you are {me}; mend it: chown {me} {quoted} "
                "(as root), or set NMM_CACHE_DIR to another path"
            )
        if mode & 0o022 and not mode & stat.S_ISVTX:
            who = "any user" if mode & stat.S_IWOTH else f"group {status.st_gid}"
            raise CacheTrustError(
                f"{parent}, above the cache directory {path}, has mode {mode:04o}: "
                f"{who} can replace the cache there; mend it: "
                f"chmod go-w {quoted}, or set NMM_CACHE_DIR to another path"
            )


def create_directory(path: Path) -> None:
    """Make the cache directory (and parents) with mode 0700; raise OSError where that fails."""
    for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
        try:
            os.mkdir(missing, 0o700)
            os.chmod(missing, 0o700)  # a umask such as 0777 takes rights from the owner too
        except FileExistsError:
            continue  # another process was quicker


def open_entry(path: Path, believed: frozenset[int]) -> int:
    """Open an entry's directory without following a symlink; return the descriptor.

    Raises FileNotFoundError when there is none, DamagedEntryError when it is not to be trusted.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise DamagedEntryError(f"{path} is a symlink or a file, not a directory") from None
        raise
    seen = os.fstat(handle)
    if seen.st_uid not in believed or seen.st_mode & 0o022:
        os.close(handle)
        raise DamagedEntryError(
            f"{path} belongs to user id {seen.st_uid} with mode {stat.S_IMODE(seen.st_mode):04o}"
        )
    return handle


def read_file(name: str, folder: int, believed: frozenset[int]) -> tuple[bytes, os.stat_result]:
    """Read a regular file of an opened entry; return its bytes and what stat said.

    Raises FileNotFoundError, or DamagedEntryError for symlinks, devices, foreign or open files.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        handle = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedEntryError(f"{name} is a symlink or a socket, not a file") from None
        raise
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            raise DamagedEntryError(f"{name} is not a regular file")
        if seen.st_uid not in believed or seen.st_mode & 0o022:
            raise DamagedEntryError(
                f"{name} belongs to user id {seen.st_uid} with mode "
                f"{stat.S_IMODE(seen.st_mode):04o}"
            )
        if seen.st_size > MAX_FILE_BYTES:
            raise DamagedEntryError(f"{name} has {seen.st_size} bytes, over {MAX_FILE_BYTES}")
        chunks = []
        while chunk := os.read(handle, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks), seen
    finally:
        os.close(handle)
