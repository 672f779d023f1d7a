"""Every Python and shell block of the README and the docs runs, in one process.

The blocks of a page run in order and share their names, in an empty directory. Comments of the
page, which readers do not see, say what the runner needs:

    <!-- setup: code -->       runs before the next block: a small model, say
    <!-- long -->              the next block takes more than seconds: `make test-long` runs it
    <!-- shown: the reason --> the next block is not run

A block whose first line is `# name.py` is the file of that name, and is written instead of run.
"""

import io
import os
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from nmm_compiler.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PART = re.compile(
    r"<!-- (?P<mark>setup:|long|shown:)(?P<body>.*?)-->"
    r"|^```(?P<language>[a-z]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
RUN = ("python", "sh")
# What sets up or starts other programs; the Makefile and pyproject are tested elsewhere.
NOT_OURS = ("make ", "pip ", "git ", "apt-get ", "cd ", "export ", "python ", "TORCH_", "source ")


def parts_of(page):
    """Yield (line, kind, code): kind is "setup", a language, or "long python", "shown python"."""
    text = page.read_text(encoding="utf-8")
    mark = ""
    for found in PART.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["mark"] == "setup:":
            yield line, "setup", found["body"].strip()
        elif found["mark"]:
            mark = found["mark"].rstrip(":")
        elif found["language"] in RUN:
            yield line, f"{mark} {found['language']}".strip(), found["code"]
            mark = ""


def shell_lines(code):
    """Return the commands of a shell block; a backslash continues a line."""
    lines = code.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.split("#")[0].strip()]


def run_block(page, line, kind, code, names):
    place = f"{page.name}:{line}"
    file = re.match(r"# (\w+\.py)\n", code)
    if file and kind == "python":
        Path(file[1]).write_text(code, encoding="utf-8")
        return
    if kind in ("setup", "python"):
        exec(compile(("\n" * line) + code, str(page), "exec"), names)
        return
    for words in shell_lines(code):
        text = " ".join(words)
        if text.startswith(NOT_OURS):
            continue
        assert words[0] == "nmm", f"{place}: {text!r} is neither nmm nor one of {NOT_OURS}"
        given = words[1 : words.index(">") if ">" in words else None]
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 0, f"{place}: {text} ended with {ended.value.code}"


def run_page(page, tmp_path, monkeypatch, *, long):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    with redirect_stdout(io.StringIO()):
        for line, kind, code in parts_of(page):
            if kind.startswith("shown") or (kind.startswith("long") and not long):
                continue
            run_block(page, line, kind.removeprefix("long "), code, names)


def with_blocks(long):
    return [
        pytest.param(page, id=page.stem)
        for page in PAGES
        if any(kind.startswith("long") if long else kind in RUN for _, kind, _ in parts_of(page))
    ]


@pytest.mark.usefixtures("closed_form_only")
@pytest.mark.parametrize("page", with_blocks(long=False))
def test_the_blocks_run(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, long=False)


@pytest.mark.long
@pytest.mark.parametrize("page", with_blocks(long=True))
def test_the_long_blocks_run(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, long=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_nothing_hides_from_the_runner_and_links_lead_somewhere(page):
    """An indented block has no language, `bash` would be printed as `sh` is: neither would run."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^ {4}(nmm|python) ", text, re.MULTILINE)
    assert set(re.findall(r"^```(\S+)$", text, re.MULTILINE)) <= {*RUN, "text", "mlir"}
    text = re.sub(r"`[^`\n]*`", "", text)  # code has no links
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert re.match(r"[a-z]+:", link) or os.path.exists(page.parent / link), link


def test_the_runner_runs_what_it_finds_and_fails_where_code_fails(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- setup: a = 1 -->\n```python\nb = a + 1\n```\n<!-- shown: why -->\n```python\n1 / 0\n"
        "```\n```sh\nnmm --version\npip install x\n```\n```text\n(not code\n```\n"
    )
    kinds = [kind for _, kind, _ in parts_of(page)]
    assert kinds == ["setup", "python", "shown python", "sh"]
    run_page(page, tmp_path, monkeypatch, long=False)
    page.write_text(page.read_text() + "```python\nassert b == 3\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path, monkeypatch, long=False)
    page.write_text("```sh\nnmm kernel lowrnk --m 8 --k 8 --n 8\n```\n")
    with pytest.raises(AssertionError, match="ended with 2"):
        run_page(page, tmp_path, monkeypatch, long=False)
