"""Odd users and odd places: no home, no passwd entry, read-only roots, paths that cannot be.

Each environment is one child process that builds a kernel and simulates it. Right: exit code 0, the
same bytes as in a plain environment, no traceback, and one warning of the cache at most.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stress.children import Ended, environment, python
from benchmarks.stress.tally import Tally
from nmm_compiler.cache.disk import FOLDER

UNKNOWN, NOBODY = 61234, 65534
SECONDS = 90.0  # for one child

# The child becomes the odd user after all modules are loaded, since the interpreter itself may lie
# in a directory that other users cannot enter.
CHILD = """
import hashlib, os, pwd, resource, sys, tempfile, tokenize, traceback, warnings
user, limit, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
directory = directory.encode().decode("unicode_escape") or None
warnings.simplefilter("always")
import numpy as np
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.options import Options
def run(m, options):
    spec = MatmulSpec(m=m, k=16, n=8, dtype="float32")
    kernel = build_kernel(spec, options=options)
    drawn = np.random.default_rng(0)
    arrays = [drawn.standard_normal(t.shape).astype(np.float32) for t in spec.inputs()]
    output = kernel.simulate(*arrays, mode="functional").output
    assert build_kernel(spec, options=options).source == kernel.source
    return kernel.source.encode() + np.ascontiguousarray(output).tobytes()
if user:
    run(2, Options(cache="off"))
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    tempfile.tempdir = None
if limit:
    resource.setrlimit(getattr(resource, limit.split("=")[0]), (int(limit.split("=")[1]),) * 2)
total = hashlib.sha256()
for m in (4, 8):
    total.update(run(m, Options(cache_dir=directory)))
print("result", total.hexdigest())
"""


@dataclass
class Odd:
    """One environment: variables, who runs, which limit, which directory is passed as an option."""

    name: str
    env: dict[str, str] = field(default_factory=dict)
    user: int | None = None
    limit: str = ""
    directory: str = ""
    umask: int = 0o022
    mounts: str = ""  # shell commands in a mount namespace of its own


def _places(base: Path) -> dict[str, Path]:
    """Make the odd files and directories; return them by name."""
    made = {}

    def directory(name: str, mode: int = 0o700, owner: int | None = None) -> Path:
        path = base / name
        path.mkdir()
        if owner is not None and os.geteuid() == 0:
            os.chown(path, owner, owner)
        path.chmod(mode)
        made[name] = path
        return path

    directory("mine", 0o700, UNKNOWN)
    for name, mode in (("shared", 0o777), ("listed", 0o755), ("group", 0o770), ("none", 0)):
        directory(name, mode)
    directory("readonly", 0o555, UNKNOWN)
    directory("theirs", 0o755, NOBODY)
    (directory("occupied") / FOLDER).write_text("not a directory")
    (directory("locked") / FOLDER).mkdir(mode=0)
    made["file"] = base / "file"
    made["file"].write_text("x")
    made["link"] = base / "link"
    made["link"].symlink_to(made["mine"])
    made["fifo"] = base / "fifo"
    os.mkfifo(made["fifo"])
    return made


def _list(base: Path) -> list[Odd]:
    place = _places(base)

    def at(path: object) -> dict[str, str]:
        return {"NMM_CACHE_DIR": str(path)}

    found = [
        Odd("no HOME, no passwd entry", user=UNKNOWN),
        Odd("no HOME, nobody", user=NOBODY),
        Odd("HOME empty", {"HOME": ""}, UNKNOWN),
        Odd("HOME missing", {"HOME": "/nonexistent/home"}, UNKNOWN),
        Odd("HOME relative", {"HOME": "home"}, UNKNOWN),
        Odd("HOME unreadable", {"HOME": str(place["none"])}, UNKNOWN),
        Odd("HOME read-only", {"HOME": str(place["readonly"])}, UNKNOWN),
        Odd("HOME of another", {"HOME": str(place["theirs"])}, UNKNOWN),
        Odd("HOME a file", {"HOME": str(place["file"])}),
        Odd("XDG relative", {"XDG_CACHE_HOME": "x/y"}),
        Odd("XDG a device", {"XDG_CACHE_HOME": "/dev/null"}),
        Odd("no such user", at("~nobody-of-this-name/x")),
        Odd("path too long", at(base / ("a/" * 3000))),
        Odd("name too long", at(base / ("a" * 300))),
        Odd("NUL in the path", directory=f"{base}/a\\0b"),
        Odd("surrogate in the path", directory=f"{base}/a\\udc80b"),
        Odd("a file", at(place["file"])),
        Odd("below a file", at(place["file"] / "cache")),
        Odd("a FIFO", at(place["fifo"])),
        Odd("a device", at("/dev/null")),
        Odd("below /proc", at("/proc/self/cache")),
        Odd("a symlink", at(place["link"])),
        Odd("open to all", at(place["shared"])),
        Odd("readable by all", at(place["listed"])),
        Odd("below an open one", at(place["shared"] / "cache")),
        Odd("below a group's", at(place["group"] / "cache")),
        Odd("below another's", at(place["theirs"] / "cache")),
        Odd("v1 is a file", at(place["occupied"])),
        Odd("v1 is closed", at(place["locked"])),
        Odd("relative path", at("some where/else")),
        Odd("no file may grow", at(base / "limited"), limit="RLIMIT_FSIZE=0"),
        Odd("umask 0777", {"HOME": str(place["mine"])}, UNKNOWN, umask=0o777),
        Odd("ro and absent", {**at(base / "absent"), "NMM_CACHE": "ro"}),
        Odd("off without a home", {"NMM_CACHE": "off"}, UNKNOWN),
        Odd("no TMPDIR and no cache", {**at(place["file"]), "TMPDIR": "/nonexistent"}, UNKNOWN),
        Odd("read-only root", at("/root-cache"), mounts="mount -o remount,bind,ro /"),
        Odd("full disk", at("/mnt/cache"), mounts="mount -t tmpfs -o size=8k,mode=700 none /mnt"),
    ]  # fmt: skip
    if os.geteuid() != 0:  # only root can become another user or mount
        found = [odd for odd in found if odd.user is None and not odd.mounts]
    return found


def attempt(count: int, seed: int) -> Tally:
    """Run at least `count` children: each odd environment equally often."""
    tally = Tally()
    base = Path(tempfile.mkdtemp(prefix="nmm-stress-environments-"))
    base.chmod(0o755)
    try:
        plain = _run(Odd("plain", {"NMM_CACHE_DIR": str(base / "plain")}), base)
        wanted = plain.out.split()[-1] if plain.code == 0 else ""
        if not wanted:
            tally.attempts, tally.lost = 1, 1
            tally.examples.append(f"plain: {plain.code} {plain.err[-300:]}")
            return tally
        odds = _list(base)
        drawn = random.Random(seed)
        order = odds * -(-count // len(odds))  # every environment, however small the count
        drawn.shuffle(order)
        with ThreadPoolExecutor(max_workers=2) as pool:
            for odd, ended in zip(order, pool.map(lambda o: _run(o, base), order), strict=True):
                _judge(odd, ended, wanted, tally)
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", str(base)], check=False)
        subprocess.run(["rm", "-rf", str(base)], check=False)
    return tally


def _run(odd: Odd, base: Path) -> Ended:
    variables = environment(odd.env)
    more: dict[str, Any] = {"umask": odd.umask, "cwd": "/"}
    run: Callable[..., Ended] = python
    if odd.mounts:
        run = _in_mounts(odd.mounts)
    return run(
        CHILD, str(odd.user or 0), odd.limit, odd.directory, env=variables, seconds=SECONDS, **more
    )


def _in_mounts(commands: str) -> Callable[..., Ended]:
    """Run the child in a mount namespace, where `commands` have run first."""

    def run(code: str, *arguments: str, env: dict[str, str], seconds: float, **more: Any) -> Ended:
        shell = f'{commands} && exec "$@"'
        launch = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
        inner = ["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, "-c", code, *arguments]
        return python(launch, *inner, env=env, seconds=seconds, **more)

    return run


def _judge(odd: Odd, ended: Ended, wanted: str, tally: Tally) -> None:
    tally.attempts += 1
    warned = sum("CacheWarning" in line for line in ended.err.splitlines())
    result = ended.out.split()[-1] if ended.code == 0 and ended.out else ""
    if ended.traceback:
        tally.tracebacks += 1
    elif ended.code != 0:
        tally.lost += 1
    elif result != wanted:
        tally.wrong += 1
    elif warned <= 1:
        tally.right += 1
        return
    last = ended.err.strip().splitlines()[-1:]
    tally.examples.append(f"{odd.name}: exit {ended.code}, {warned} warnings: {last}"[:400])
