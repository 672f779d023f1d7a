"""Saving: module, manifest and sources together; nothing half-written when it cannot be."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from mlir_models import one
from torch import nn

from nmm_compiler.errors import OutputError
from nmm_compiler.mlir.export import export_mlir
from nmm_compiler.mlir.module import MLIRModule

pytest.importorskip("torch_mlir")


@pytest.fixture(scope="module")
def module() -> MLIRModule:
    model, inputs = one()
    return export_mlir(model, inputs, dialect="stablehlo")


def test_the_manifest_ties_names_to_files(module: MLIRModule, tmp_path: Path) -> None:
    written = module.save(tmp_path / "model.mlir")
    assert written[-1] == tmp_path / "model.mlir"
    assert (tmp_path / "model.mlir").read_text() == module.text
    manifest = json.loads((tmp_path / "model.manifest.json").read_text())
    assert manifest["dialect"] == "stablehlo"
    assert [a["kind"] for a in manifest["arguments"]] == ["weight", "weight", "input"]
    (kernel,) = manifest["kernels"]
    (launch,) = kernel["launches"]
    (source,) = launch["sources"]
    text = (tmp_path / source["file"]).read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == source["sha256"]
    assert f'nmm.source_sha256 = "{source["sha256"]}"' in module.text
    assert f"@{kernel['name']}(" in module.text
    assert "@nki.jit" in text
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == set(written)


def test_a_disk_that_fills_up_leaves_the_old_module(
    module: MLIRModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.mlir"
    path.write_text("old")
    synced = os.fsync

    def full(handle: int) -> None:
        if os.fstat(handle).st_size == len(module.text):
            raise OSError(28, "No space left on device")
        synced(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        module.save(path)
    assert path.read_text() == "old"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_stablehlo_can_be_read_by_older_versions(module: MLIRModule) -> None:
    stablehlo = pytest.importorskip("torch_mlir._mlir_libs._stablehlo")
    artifact = stablehlo.serialize_portable_artifact_str(module.text, "1.3.0")
    text = str(stablehlo.deserialize_portable_artifact_str(artifact))
    assert module.kernels[0].name in text


def test_a_module_without_kernels_has_no_source_directory(tmp_path: Path) -> None:
    plain = export_mlir(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    plain.save(tmp_path / "plain.mlir")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain.manifest.json", "plain.mlir"]
