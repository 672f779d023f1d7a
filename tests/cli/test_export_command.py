"""`nmm export` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nmm_compiler.cli.export import export

pytest.importorskip("torch_mlir")

app = typer.Typer()
app.command()(export)
runner = CliRunner()

MODEL = """
import torch

def model():
    torch.manual_seed(0)
    low = torch.nn.Sequential(torch.nn.Linear(16, 2, bias=False), torch.nn.Linear(2, 8))
    return low, {"input": torch.randn(4, 16)}
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(MODEL)
    return f"{tmp_path / 'my.py'}:model"


def test_export_writes_module_manifest_and_sources(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.mlir"
    result = runner.invoke(app, [model, "--dialect", "linalg", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "lowrank" in result.output
    assert f"wrote {out}" in result.output
    assert "call @nmm_lowrank_matmul_" in out.read_text()
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    for source in manifest["kernels"][0]["launches"][0]["sources"]:
        assert (tmp_path / source["file"]).is_file()


def test_errors_of_the_catalogue_come_through(model: str, tmp_path: Path) -> None:
    for place in (tmp_path / "missing" / "a.mlir", tmp_path):  # refused before any work
        result = runner.invoke(app, [model, "-o", str(place)])
        assert result.exit_code == 2
        assert "cannot write" in result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my.py"]
