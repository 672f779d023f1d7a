"""Finished layers on disk, so that an interrupted compression continues where it stopped.

A journal is a directory: `plan.json` (the config, the matrices, the ranks, and which weights, data
and settings they were made of), then one safetensors file per finished layer with `up` and `down`,
its `LayerReport` in the file's metadata. Each file is written under another name and moved into
place, so every file is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.fingerprint import Identity
from nmm_compiler.compress.modules import LowRankLinear
from nmm_compiler.compress.plan import Plan
from nmm_compiler.compress.report import LayerReport
from nmm_compiler.compress.save import replace_file
from nmm_compiler.compress.select import Site
from nmm_compiler.errors import FactorsFileError, OutputError

_VERSION = 2


class Journal:
    """The journal in `directory`; `plan` is None before `start`."""

    def __init__(self, directory: str | Path, config: CompressionConfig) -> None:
        self.directory = Path(directory)
        self.config = config
        self.identity: Identity | None = None
        self.plan = self._read_plan()

    @property
    def _plan_path(self) -> Path:
        return self.directory / "plan.json"

    def _read_plan(self) -> Plan | None:
        if not self._plan_path.exists():
            return None
        try:
            data = json.loads(self._plan_path.read_text())
            version, config = data["version"], data["config"]
            if version == _VERSION:
                self.identity = Identity.from_dict(data["made_of"])
            plan = Plan.from_dict(data["plan"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FactorsFileError(
                f"{self._plan_path} is not a plan of this package ({error}); "
                "remove the directory to start again"
            ) from error
        asked = json.loads(self.config.to_json())
        if version != _VERSION or config != asked:
            differ = [key for key in asked if config.get(key) != asked[key]] or ["version"]
            shown = ", ".join(f"{key} {config.get(key)!r} -> {asked.get(key)!r}" for key in differ)
            raise FactorsFileError(
                f"{self.directory} holds a compression with other settings ({shown}); pass the "
                "same ones, or another directory"
            )
        return plan

    def check(self, identity: Identity, done: Mapping[str, LowRankLinear]) -> None:
        """Raise FactorsFileError unless the journal is of these weights, data and settings.

        done: the model's layers that are low-rank already; they must hold the journal's factors.
        """
        if self.plan is None or self.identity is None:
            return
        differs = self.identity.difference(identity)
        if differs is not None:
            raise FactorsFileError(
                f"{self.directory} holds a compression of something else ({differs}); pass the "
                "same model, data and arguments, or another directory"
            )
        for index, decision in enumerate(self.plan.decisions):
            layer = done.get(decision.name)
            if layer is not None and not self._holds(index, layer):
                raise FactorsFileError(
                    f"{decision.name} is low-rank already, with other factors than those in "
                    f"{self.directory}; pass the model that was compressed there, or another "
                    "directory"
                )

    def _holds(self, index: int, layer: LowRankLinear) -> bool:
        finished = self.load(index)
        if finished is None:
            return False
        pairs = zip(finished[:2], (layer.up.weight, layer.down.weight), strict=True)
        return all(
            kept.shape == here.shape and torch.equal(kept, here.detach().cpu().to(kept.dtype))
            for kept, here in pairs
        )

    def start(self, plan: Plan, identity: Identity) -> None:
        """Write the plan of a new run; raises OutputError when the directory cannot be used."""
        data = {
            "version": _VERSION,
            "made_of": identity.to_dict(),
            "config": self.config.to_dict(),
            "plan": plan.to_dict(),
        }
        temporary = self._plan_path.with_suffix(".tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(data, indent=1, sort_keys=True))
            os.replace(temporary, self._plan_path)
        except OSError as error:
            raise OutputError(
                f"{self.directory} cannot be written to ({error}); pass resume= another directory"
            ) from error
        self.plan, self.identity = plan, identity

    def save(self, index: int, up: torch.Tensor, down: torch.Tensor, report: LayerReport) -> None:
        """Write the finished layer number `index` of the plan; OutputError when it cannot be."""
        path = self._layer_path(index)
        tensors = {"up": up.detach().contiguous(), "down": down.detach().contiguous()}
        replace_file(path, tensors, {"report": report.to_json()})

    def load(self, index: int) -> tuple[torch.Tensor, torch.Tensor, LayerReport] | None:
        """Return (up, down, report) of layer `index`, or None when it is not finished."""
        path = self._layer_path(index)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                report = LayerReport.from_json(file.metadata()["report"])
                return file.get_tensor("up"), file.get_tensor("down"), report
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FactorsFileError(
                f"{path} cannot be read ({error}); remove it to factorize that layer again"
            ) from error

    def unfinished(self, sites: Sequence[Site]) -> tuple[Site, ...]:
        """Return the sites that still have to be factorized: all of them before `start`."""
        if self.plan is None:
            return tuple(sites)
        left = {
            decision.name
            for index, decision in enumerate(self.plan.decisions)
            if decision.rank is not None and not self._layer_path(index).exists()
        }
        return tuple(site for site in sites if site.name in left)

    def _layer_path(self, index: int) -> Path:
        return self.directory / f"{index:05d}.safetensors"
