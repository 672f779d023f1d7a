"""Damaged archives: cut, flipped, spliced, doubled, with hostile headers; plain and gzip.

Right is an error of ours on one line, with nothing taken, or all entries exactly as exported (bits
of gzip's header that mean nothing). Memory is bounded while it happens.
"""

from __future__ import annotations

import gzip
import random
import shutil
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from benchmarks.stress.tally import Tally

ENTRIES = 5
MAX_PEAK_BYTES = 16 << 20
_KINDS = (b"L", b"K", b"x", b"g", b"S", b"V", b"1", b"2", b"3", b"5", b"6", b"7")


def _text(number: int) -> str:
    return f"y = {number}\n" + "# a line of a kernel\n" * (number * 40)


def attempt(count: int, seed: int) -> Tally:
    """Import `count` damaged archives, each into a store of its own."""
    from nmm_compiler.cache.key import Key
    from nmm_compiler.cache.store import Store
    from nmm_compiler.errors import CacheError

    drawn, tally = random.Random(seed), Tally()
    folder = Path(tempfile.mkdtemp(prefix="nmm-stress-archives-"))
    source = Store(folder / "source")
    for number in range(ENTRIES):
        build = {"kernel.py": _text(number), "notes.txt": "n" * number}
        source.get_or_build(Key.make({"number": number}), lambda b=build: b, {"n": number})
    wanted = {info.digest: source.show(info.digest).files for info in source.list()}
    whole = {}
    for name in ("a.tar", "a.tar.gz"):
        source.export(folder / name)
        whole[name] = (folder / name).read_bytes()
    for index in range(count):
        kind, damage = drawn.choice(DAMAGES)
        name = drawn.choice(sorted(whole))
        path = folder / f"damaged-{name}"
        path.write_bytes(damage(whole[name], drawn))
        into = Store(folder / "into", check=lambda name, text: None)
        tally.attempts += 1
        tracemalloc.start()
        said = ""
        try:
            into.import_(path)
        except CacheError as error:
            said = str(error)
        except Exception as error:
            tally.tracebacks += 1
            tally.examples.append(f"{index} {kind} {name}: {type(error).__name__}: {error!s:.200}")
            continue
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        taken = {info.digest: into.show(info.digest).files for info in into.list()}
        shutil.rmtree(folder / "into", ignore_errors=True)
        exact = not said and taken == wanted and path.read_bytes()[:2] == b"\x1f\x8b"
        unchanged = path.read_bytes() == whole[name]
        refused = bool(said) and not taken and "\n" not in said and len(said) < 1000
        if peak <= MAX_PEAK_BYTES and (refused or ((exact or unchanged) and taken == wanted)):
            tally.right += 1
        else:
            tally.wrong += 1
            found = f"{len(taken)} entries taken, {peak >> 20} MiB, said {said[:120]!r}"
            tally.examples.append(f"{index} {kind} {name}: {found}")
    shutil.rmtree(folder)
    return tally


def _inside(change: Callable[[bytearray, random.Random], bytes]) -> Callable:
    """Apply a change to the tar inside of a gzip file, whose CRC is right again afterwards."""

    def changed(data: bytes, drawn: random.Random) -> bytes:
        packed = data[:2] == b"\x1f\x8b"
        inner = change(bytearray(gzip.decompress(data) if packed else data), drawn)
        return gzip.compress(inner, 1) if packed else bytes(inner)

    return changed


def _cut(data: bytes, drawn: random.Random) -> bytes:
    return data[: drawn.randrange(len(data))]


def _flip(data: bytes, drawn: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(drawn.choice((1, 1, 2, 9))):
        changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
    return bytes(changed)


def _zeros(data: bytes, drawn: random.Random) -> bytes:
    start = drawn.randrange(len(data))
    end = min(len(data), start + drawn.choice((1, 512, 5000, len(data))))
    return data[:start] + bytes(end - start) + data[end:]


def _without_a_block(data: bytearray, drawn: random.Random) -> bytes:
    start = 512 * drawn.randrange(len(data) // 512)
    return bytes(data[:start] + data[start + 512 * drawn.randrange(1, 9) :])


def _block_twice(data: bytearray, drawn: random.Random) -> bytes:
    start = 512 * drawn.randrange(len(data) // 512)
    end = start + 512 * drawn.randrange(1, 9)
    return bytes(data[:end] + data[start:])


def _hostile_header(data: bytearray, drawn: random.Random) -> bytes:
    info = tarfile.TarInfo(drawn.choice(("../../evil", "/tmp/evil", "a" * 90, "0" * 64 + "/x")))
    info.type = drawn.choice(_KINDS)
    info.size = drawn.choice((0, 1, 512, 1 << 20, (1 << 33) - 1))
    start = 512 * drawn.randrange(len(data) // 512)
    return bytes(data[:start]) + info.tobuf(tarfile.GNU_FORMAT) * drawn.randrange(1, 40)


def _bomb(data: bytearray, drawn: random.Random) -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = b"L", 50_000_000
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(50_000_000)


def _noise(data: bytes, drawn: random.Random) -> bytes:
    return data[: drawn.choice((0, 2, 512))] + drawn.randbytes(drawn.randrange(4000))


def _grown(data: bytes, drawn: random.Random) -> bytes:
    return data + drawn.choice((b"x", data, bytes(512), data[-1024:]))


DAMAGES = (
    ("cut", _cut), ("cut inside", _inside(_cut)), ("flip", _flip), ("flip inside", _inside(_flip)),
    ("zeros", _zeros), ("zeros inside", _inside(_zeros)),
    ("without a block", _inside(_without_a_block)), ("block twice", _inside(_block_twice)),
    ("hostile header", _inside(_hostile_header)), ("bomb", _inside(_bomb)), ("noise", _noise),
    ("grown", _grown), ("grown inside", _inside(_grown)),
)  # fmt: skip
