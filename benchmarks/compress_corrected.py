"""Few-bit weights with low-rank branches: perplexity over that of the same model in 16 bits.

Two models: SmolLM2-135M as `compress_lm.py` has it, from a 4-bit file, which flatters forms of four
bits; and a byte-level decoder of 10 million parameters that is trained here, for a bounded CPU
time, and so is born in 32 bits. Each form is judged in the calibration's domain (Python's manual)
and in another (plays), on the same windows as the dense model; the interval is of the mean of the
differences over windows. ", mxfp8 x" rounds the inputs of linears as trn3's products do. A row that
is known is not measured again, but with --fresh; rows are kept in prediction/form_quality.json,
which `nmm plan` reads.
"""

from __future__ import annotations

import copy
import json
import math
import time
from functools import cache
from typing import Any

import torch
from compress_lm import LENGTH, smollm, windows
from compress_text import plays
from nmm_compiler.cli.demo import manual_split
from rich.console import Console
from rich.table import Table
from torch import nn

from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.quantize import QuantizedLinear
from nmm_compiler.outputs import write_text
from nmm_compiler.prediction.forms import QUALITY, read_form

FORMS = ("bf16", "fp8", "mxfp4", "mxfp4+16", "mxfp4+32", "mxfp4+64", "int4", "int4+32")
ROUNDED = ", mxfp8 x"
JUDGED, CALIBRATED = 8, 16
"""Windows of a domain that are judged, and of the manual that calibrate."""
TRAINED_SECONDS = 240.0
_BYTES = 256


def round_to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Return x as quantize_mx rounds it: blocks of 32, a scale of 2^(floor(log2 largest) - 7)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.frexp(largest).exponent - 8.0)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def rounding_inputs(model: nn.Module) -> nn.Module:
    """Round the inputs of a model's MX linears, in place."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(lambda _, args: (round_to_mxfp8(args[0]),))
    return model


@torch.no_grad()
def losses(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of each window."""
    found = []
    for ids in rows:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found.append(nn.functional.cross_entropy(logits, ids[0, 1:]))
    return torch.stack(found)


def _byte_rows(text: str, count: int) -> list[torch.Tensor]:
    ids = torch.tensor(list(text.encode()), dtype=torch.long)
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return list(rows[:: max(1, len(rows) // count)][:count].split(1))


@cache
def trained() -> tuple[nn.Module, dict[str, list[torch.Tensor]]]:
    """Return a decoder of bytes, trained here, and its windows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    learned, held_out = manual_split()
    other = plays()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_BYTES, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    text = torch.tensor(list((learned + other[: len(other) // 2]).encode()), dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started, step = time.process_time(), 0
    while time.process_time() - started < TRAINED_SECONDS:
        at = torch.randint(0, len(text) - 256, (8,))
        ids = torch.stack([text[i : i + 256] for i in at])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    parameters = sum(p.numel() for p in model.parameters())
    print(f"decoder of {parameters:,} parameters: {step} steps, loss {loss.item():.2f}")
    rows = {
        "calibration": _byte_rows(learned, CALIBRATED),
        "manual": _byte_rows(held_out, JUDGED),
        "plays": _byte_rows(other[len(other) // 2 :], JUDGED),
    }
    return model.bfloat16().eval(), rows


def _smollm() -> tuple[nn.Module, dict[str, list[torch.Tensor]]]:
    counts = {"calibration": CALIBRATED, "manual": JUDGED, "plays": JUDGED}
    rows = {name: windows()[name][:: len(windows()[name]) // n][:n] for name, n in counts.items()}
    return copy.deepcopy(smollm()[0]).bfloat16().eval(), rows


MODELS = {"smollm2-135m": _smollm, "decoder-10m": trained}


def measured(name: str, form: str, dense: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the row of a form: the share of bytes, and the perplexity over the dense one's."""
    model, rows = MODELS[name]()
    started = time.process_time()
    plain, _, rounded = form.partition(",")
    kept = copy.deepcopy(model)
    keywords = read_form(plain).keywords()
    stored = 1.0
    if keywords:
        data = [{"input_ids": ids} for ids in rows["calibration"]]
        report = compress(kept, **keywords, calibration=data if keywords["rank"] else None)
        stored = 1.0 - report.achieved_ratio
    if rounded:
        rounding_inputs(kept)
    row: dict[str, Any] = {"bytes": round(stored, 4), "tokens": JUDGED * (LENGTH - 1)}
    for key, domain in (("in", "manual"), ("out", "plays")):
        own = losses(kept, rows[domain])
        of = own if form == "bf16" else own - dense[domain]
        error = 1.96 * float(of.std()) / math.sqrt(len(of))
        mean = float(of.mean())
        row[key] = [round(math.exp(mean + e), 4) for e in (0.0, -error, error)]
    return row | {"cpu_seconds": round(time.process_time() - started)}


def run(names: list[str], forms: list[str], fresh: bool) -> bool:
    """Measure forms of models, and print all that are known."""
    console = Console(width=110)
    for name in names or list(MODELS):
        known = json.loads(QUALITY.read_text(encoding="utf-8"))
        wanted = [
            form + rounded
            for form in forms or FORMS
            for rounded in ("", ROUNDED)
            if not rounded or form.startswith("mx")
        ]
        missing = [form for form in wanted if fresh or form not in known.get(name, {})]
        dense = {}
        if missing:
            model, rows = MODELS[name]()
            dense = {domain: losses(model, rows[domain]) for domain in ("manual", "plays")}
        for form in missing:
            row = measured(name, form, dense)
            known = json.loads(QUALITY.read_text(encoding="utf-8"))
            known.setdefault(name, {})[form] = row
            write_text(QUALITY, json.dumps(known, indent=1) + "\n")
            console.print(f"{name} {form}: {row['in'][0]}, {row['out'][0]}")
        shown = Table(title=f"{name}; {JUDGED * (LENGTH - 1)} tokens judged per domain")
        for column in ("weights", "bytes", "in domain, over bf16", "other domain"):
            shown.add_column(column)
        for form, row in known.get(name, {}).items():
            figures = ["{:.3f} [{:.3f}, {:.3f}]".format(*row[key]) for key in ("in", "out")]
            shown.add_row(form, f"{row['bytes']:.3f}", *figures)
        console.print(shown)
    return True
