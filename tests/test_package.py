"""The package's metadata: one version, an editable install that type checkers can read."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from processes import ran

from nmm_compiler.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere():
    assert PROJECT["project"]["version"] == VERSION
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_constraints_hold_every_direct_dependency():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]
    names = {re.split(r"[\[<>=]", one)[0].lower().replace("_", "-") for one in wanted}
    assert names - {"nmm-compiler"} <= pinned


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return (source tree, editable wheel, sdist) of a copy of the tree."""
    tmp_path = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "out", "__pycache__", ".*_cache", ".hypothesis"
    )
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=ignored)
    code = (
        "from setuptools import build_meta as b\n"
        f"b.build_editable({str(tmp_path)!r}); b.build_sdist({str(tmp_path)!r})"
    )
    ran("-c", code, cwd=copy)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    return copy, wheel, sdist


@pytest.mark.long
def test_an_editable_install_is_a_path_and_the_sdist_holds_tests_and_docs(built):
    """An import hook instead of a path is what Pylance and pyright cannot follow."""
    copy, wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        paths = [
            archive.read(n).decode() for n in archive.namelist() if n.startswith("__editable__")
        ]
    assert paths == [f"{copy}\n"]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_door.py", "docs/index.md", "examples/quickstart.py", "Makefile"} <= names


@pytest.mark.long
def test_pyright_resolves_an_editable_install(built, tmp_path):
    """basedpyright is pyright in a package of PyPI, with its own Node."""
    checker = pytest.importorskip("basedpyright", reason="extra dev: basedpyright")
    _, wheel, _ = built
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    program = tmp_path / "program.py"
    program.write_text(
        "import nmm_compiler as nmm\nimport no_such_package\n"
        "reveal_type(nmm.build_kernel(nmm.LowRankSpec(m=1, k=2, r=3, n=4)).profile())\n"
        "reveal_type(nmm.compress)\n"
    )
    python = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-m", checker.__name__, "--pythonpath", python, "--outputjson", program],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    said = json.loads(done.stdout)["generalDiagnostics"]
    missing = [one["message"] for one in said if one.get("rule") == "reportMissingImports"]
    assert missing == ['Import "no_such_package" could not be resolved']
    types = [one["message"] for one in said if one["severity"] == "information"]
    assert any(text.endswith('is "Profile"') for text in types)
    assert any(text.endswith('-> CompressionReport"') and "ratio" in text for text in types)
