"""`nmm lint` as a command: exit codes, the printed line, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nmm_compiler.cli.lint import lint

app = typer.Typer()
app.command()(lint)
runner = CliRunner()

BROKEN = "import nki.isa as nisa\n\n\ndef k(x, y):\n    nisa.tensor_copy(x)\n"
DEPRECATED = "import nki.language as nl\n\n\ndef k():\n    return nl.affine_range(3)\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"broken": BROKEN, "old": DEPRECATED, "clean": "import nki\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {name: str(tmp_path / f"{name}.py") for name in texts}


def test_errors_exit_1_with_file_line_column_and_code(files: dict[str, str]) -> None:
    result = runner.invoke(app, [files["broken"]])
    assert result.exit_code == 1
    assert f"{files['broken']}:5:5 NKI-E112 tensor_copy(dst, src, " in result.output
    assert "1 file, NKI 0.6: 1 error, 0 warnings" in result.output


def test_warnings_exit_0_unless_strict(files: dict[str, str]) -> None:
    assert runner.invoke(app, [files["old"], files["clean"]]).exit_code == 0
    assert runner.invoke(app, [files["old"], "--strict"]).exit_code == 1
    assert runner.invoke(app, [files["old"], "--strict", "--nki", "0.5"]).exit_code == 0


def test_json_lists_the_findings(files: dict[str, str]) -> None:
    result = runner.invoke(app, [files["broken"], files["old"], "--json"])
    found = json.loads(result.output)
    assert [(f["file"], f["line"], f["code"], f["severity"]) for f in found] == [
        (files["broken"], 5, "NKI-E112", "error"),
        (files["old"], 5, "NKI-W104", "warning"),
    ]


def test_unreadable_input_exits_2() -> None:
    result = runner.invoke(app, ["missing.py"])
    assert result.exception.exit_code == 2
    assert "cannot lint" in str(result.exception)
