"""Digests of the weights, data and settings that a compression was made of.

A resumed run installs factors that were computed before. They are right only for the same weights,
the same calibration data and the same settings, so `journal.py` keeps an `Identity` beside the plan
and compares it before anything is changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress.calibrate import Statistics
from nmm_compiler.compress.select import Site
from nmm_compiler.records import Record


class _Hash:
    """A running sha256 over tensors and names, one tensor in memory at a time."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def text(self, *parts: object) -> None:
        """Add texts, each with its length, so that no two lists run together."""
        for part in map(str, parts):
            self._hash.update(f"{len(part)}:{part}".encode())

    def tensor(self, tensor: torch.Tensor) -> None:
        """Add a tensor's dtype, shape and bytes; of one without plain memory, its description."""
        self.text(tensor.dtype, tuple(tensor.shape))
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
        if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
            self.text(type(tensor).__name__)
            return
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._hash.update(flat.view(torch.uint8).numpy().data)

    def data(self, value: Any) -> None:
        """Add a batch: tensors, mappings, sequences and plain values, however they are nested."""
        if isinstance(value, torch.Tensor):
            self.tensor(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self.text("key", key)
                self.data(value[key])
        elif isinstance(value, (list, tuple)):
            self.text(len(value))
            for item in value:
                self.data(item)
        elif value is None or isinstance(value, (str, bytes, int, float)):
            self.text(type(value).__name__, value)
        else:  # an object's text may hold its address, which is new in every process
            self.text(type(value).__name__)

    def digest(self) -> str:
        """Return the first 32 hex digits."""
        return self._hash.hexdigest()[:32]


def digest_of(batch: Any) -> str:
    """Return the digest of one batch."""
    digest = _Hash()
    digest.data(batch)
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class Identity(Record):
    """What a run was made of.

    layers: per matrix, the digest of its dense weight and bias. rest: of all other parameters and
    buffers. data: of the calibration. settings: the arguments of the call that no config holds.
    """

    layers: dict[str, str]
    rest: str
    data: str
    settings: dict[str, str]

    def difference(self, other: Identity) -> str | None:
        """Return what differs from another run, or None; layers that only one has do not count."""
        for key in sorted({*self.settings, *other.settings}):
            mine, its = self.settings.get(key), other.settings.get(key)
            if mine != its:
                return f"{key} {mine} -> {its}"
        both = self.layers.keys() & other.layers.keys()
        changed = sorted(name for name in both if self.layers[name] != other.layers[name])
        if changed:
            return f"other weights in {', '.join(changed[:4])}"
        if self.rest != other.rest:
            return "other weights beside the selected layers"
        return None if self.data == other.data else "other calibration data"


def identify(
    model: nn.Module,
    sites: Sequence[Site],
    planned: Iterable[str],
    calibration: list[Any] | Statistics | None,
    settings: Mapping[str, object],
) -> Identity:
    """Return the identity of a run over `sites`; planned: names that may be low-rank already."""
    selected = (*(name for site in sites for name in site.names), *planned)
    return Identity(
        layers={site.name: _layer(site) for site in sites},
        rest=_rest(model, tuple(f"{name}." for name in selected)),
        data=_data(calibration),
        settings={key: str(value) for key, value in settings.items()},
    )


def _layer(site: Site) -> str:
    digest = _Hash()
    digest.tensor(site.weight)
    if isinstance(site.module.bias, torch.Tensor):
        digest.tensor(site.module.bias)
    return digest.digest()


def _rest(model: nn.Module, selected: tuple[str, ...]) -> str:
    digest = _Hash()
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and not name.startswith(selected):
            digest.text(name)
            digest.tensor(value)
    return digest.digest()


def _data(calibration: list[Any] | Statistics | None) -> str:
    if calibration is None:
        return "none"
    digest = _Hash()
    if not isinstance(calibration, Statistics):
        digest.data(calibration)
        return digest.digest()
    digest.text(calibration.batches, calibration.tokens)
    for kind in (calibration.inputs, calibration.gradients):
        for name, moment in sorted(kind.items()):
            # Rounded: the order of a sum may differ between two processes.
            digest.text(name, moment.tokens, f"{moment.trace:.6e}", f"{moment.fourth:.6e}")
    return digest.digest()
