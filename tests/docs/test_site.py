"""The site: every page is in its navigation, and it builds with warnings as errors."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import nmm_compiler

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shown = set(re.findall(r"[\w/.-]+\.md$", text, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert shown == pages


def test_the_reference_names_what_is_there_and_every_name_of_the_door():
    shown = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, last = name.rpartition(".")
            assert hasattr(importlib.import_module(module), last), name
            shown.add(last)
    assert set(nmm_compiler.__all__) - {"__version__", "NmmError"} <= shown


def test_args_of_a_public_function_are_its_parameters():
    documented = 0
    for name in nmm_compiler.__all__:
        value = getattr(nmm_compiler, name)
        rest = (inspect.getdoc(value) or "").partition("\nArgs:\n")[2]
        if inspect.isfunction(value) and rest:
            listed = re.findall(r"^    (\w+): ", rest.split("\n\n")[0], re.MULTILINE)
            code = value.__code__  # the signature of compress is that of its config, too
            count = code.co_argcount + code.co_kwonlyargcount
            count += bool(code.co_flags & inspect.CO_VARARGS)
            count += bool(code.co_flags & inspect.CO_VARKEYWORDS)
            assert set(listed) == set(code.co_varnames[:count]), name
            documented += 1
    assert documented >= 10


def unknown_names(text, public):
    """Return the `nmm.<name>` of a page that the package's door does not have."""
    return {name for name in re.findall(r"(?<![\w./-])nmm\.(\w+)", text) if name not in public}


def test_pages_call_what_the_door_has():
    assert unknown_names("nmm.predict(x), torch.ops.nmm.f, nmm.lost(x)", {"predict"}) == {"lost"}
    attributes = "mlir.md"  # `nmm.spec` and the like are attributes of an operation there
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.name != attributes]
    for page in (ROOT / "README.md", *pages):
        text = page.read_text(encoding="utf-8")
        assert not unknown_names(text, nmm_compiler.__all__), page


def test_the_table_of_options_has_every_option():
    page = (ROOT / "docs" / "backend.md").read_text(encoding="utf-8")
    rows = page.split("## Options")[1].split("\n## ")[0]
    heads = [line.split("|")[1] for line in rows.splitlines() if line.startswith("| `")]
    assert {name for head in heads for name in re.findall(r"`(\w+)`", head)} == {
        field.name for field in dataclasses.fields(nmm_compiler.Options)
    }


def test_each_figure_is_whole_and_is_shown_by_a_page():
    """What draws them is docs/figures.py; a figure carries its colours and loads nothing."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    figures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert len(figures) >= 5
    script = (ROOT / "docs" / "figures.py").read_text(encoding="utf-8")
    for figure in figures:
        text = figure.read_text(encoding="utf-8")
        tree = ElementTree.fromstring(text)
        assert any(e.tag.endswith(("rect", "path", "circle")) for e in tree.iter())
        assert f'"{figure.stem}"' in script
        assert not re.search(r"href|url\(|@import", text)
        used = set(re.findall(r"var\((--\w+)\)", text))
        assert used <= set(re.findall(r"(--\w+): #", text)), "a colour that the file lacks"
        assert any(f"pictures/{figure.name})" in page for page in pages), figure.name


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]' builds the site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = (tmp_path / "reference" / "errors" / "index.html").read_text(encoding="utf-8")
    assert "SimulationError" in errors
    assert "ratio" in (tmp_path / "reference" / "api" / "index.html").read_text(encoding="utf-8")
