"""Files of entries that are only in memory: a private directory of this process, gone at exit."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from nmm_compiler.errors import CacheError

_lock = threading.Lock()
_root: tuple[int, Path] | None = None  # (process id, directory): a forked child makes its own


def write(digest: str, files: Mapping[str, str]) -> Path:
    """Return a private directory with these files; the same one for the same digest and text.

    Raises CacheError when there is no place for temporary files.
    """
    with _lock:
        try:
            directory = _directory() / digest
            directory.mkdir(mode=0o700, exist_ok=True)
            for name, text in files.items():
                _write_once(directory / name, text.encode())
        except OSError as error:
            raise CacheError(
                f"the source of kernel {digest[:12]} has to be written to a file and neither the "
                f"cache directory nor the temporary directory takes it: {error}; set TMPDIR or "
                "NMM_CACHE_DIR to a directory that can be written"
            ) from error
    return directory


def _directory() -> Path:
    global _root
    if _root is None or _root[0] != os.getpid() or not _root[1].is_dir():
        made = Path(tempfile.mkdtemp(prefix="nmm-kernels-"))
        _root = (os.getpid(), made)
        atexit.register(_remove, os.getpid(), made)
    return _root[1]


def _write_once(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _remove(process: int, directory: Path) -> None:
    if process == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)
