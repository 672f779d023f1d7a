"""The key covers every file that can change an emitted source, and no file can be forgotten."""

import shutil
from pathlib import Path

import pytest
from processes import ran

import nmm_compiler
from nmm_compiler.codegen import code_digests

PACKAGE = Path(nmm_compiler.__file__).resolve().parent

EMIT = """
import sys
import nmm_compiler
door = set(sys.modules)
from nmm_compiler import targets
from nmm_compiler.codegen.build import kernel_key
from nmm_compiler.codegen.choose import choose
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.kernels.linear.specs import LowRankSpec
spec, target = LowRankSpec(m=32, k=64, r=16, n=64), targets.get("trn2")
name, source = kernel_source(spec, choose(spec, target)[0].schedule, target)
ours = [n for n in sys.modules if n.split(".")[0] == "nmm_compiler" and n not in door]
loaded = [sys.modules[n].__file__ for n in ours]
print("\\n".join([kernel_key(spec, target, None).digest, str(len(source.splitlines())), *loaded]))
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package's files, with compiled ones, but for those that are being written."""
    ignored = shutil.ignore_patterns("*.pyc.*")
    return Path(shutil.copytree(PACKAGE, tmp_path / "nmm_compiler", ignore=ignored))


def digests(package):
    code_digests.code_digests.cache_clear()
    return dict(code_digests.code_digests(package))


def emit(folder):
    alone = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return ran("-c", EMIT, cwd=folder, **alone).stdout.splitlines()


def test_an_edit_of_any_covered_file_changes_its_rooms_digest_and_no_other(copy):
    before = digests(copy)
    assert before == digests(PACKAGE)  # by content, wherever the package lies
    names = [name for name, _ in code_digests.covered_files(copy)]
    assert {"codegen/tidy.py", "codegen/fold_constants.py", "records.py"} <= set(names)
    rooms = {}
    for name in names:
        rooms.setdefault(name.partition("/")[0] if "/" in name else ".", []).append(copy / name)
    for number in range(max(map(len, rooms.values()))):  # one file of each room at a time
        edited = {room: files[number] for room, files in rooms.items() if number < len(files)}
        texts = {path: path.read_bytes() for path in edited.values()}
        for path, text in texts.items():
            path.write_bytes(text + b"#")
        after = digests(copy)
        assert {r for r in before if before[r] != after[r]} == set(edited), edited
        for path, text in texts.items():
            path.write_bytes(text)
    assert digests(copy) == before


@pytest.mark.parametrize("name", ["codegen/new.py", "codegen/deep/er/table.json", "room/new.py"])
def test_a_new_file_or_room_is_covered_without_being_listed(copy, name):
    before = digests(copy)
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("x = 1\n")
    after = digests(copy)
    assert before != after
    (copy / name).rename(copy / name.replace("new", "old").replace("table", "other"))
    assert digests(copy) != after  # names count too


def test_what_is_left_out_changes_nothing_and_says_why(copy):
    before = digests(copy)
    (copy / "cli" / "main.py").write_text("broken (")
    (copy / "codegen" / "__pycache__").mkdir(exist_ok=True)
    (copy / "codegen" / "__pycache__" / "tidy.cpython-312.pyc").write_bytes(b"x")
    (copy / "codegen" / ".tidy.py.swp").write_bytes(b"x")
    assert digests(copy) == before
    assert all(len(reason) > 10 for reason in code_digests.LEFT_OUT.values())


def test_every_file_that_emitting_a_kernel_loads_is_covered(copy):
    """In a fresh process; the one room loaded and not covered is the cache, which holds results."""
    key, lines, *loaded = emit(copy.parent)
    covered = {str(path) for _, path in code_digests.covered_files(copy)}
    missed = {Path(f).relative_to(copy).as_posix() for f in loaded} - {
        Path(f).relative_to(copy).as_posix() for f in covered
    }
    assert {name for name in missed if not name.startswith("cache/")} == set()
    assert len(loaded) > 40

    path = copy / "codegen" / "printed.py"
    text = path.read_text()
    assert "WIDTH = " in text
    path.write_text(text.replace("WIDTH = ", "WIDTH = 40 or "))
    edited_key, edited_lines, *_ = emit(copy.parent)
    assert edited_lines != lines  # the source is another one, and so is the key
    assert edited_key != key
