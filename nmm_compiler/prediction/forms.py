"""The forms that a model's weights can take, by name, and the quality that was measured of each.

bf16             the weights in the model's own dtype
fp8              eight bits with a scale a row
mxfp4, mxfp8     MX blocks of trn3, whose products round x to mxfp8, too
mxfp4+64         the same with a low-rank branch of rank 64 that mends what rounding lost
mxfp4+64fp8      the same, the branch in fp8 numbers
mxfp4:0.67       the same with branches of the ranks that remove 0.67 of the bytes
lowrank:0.2      factors in place of the weights, with that share of the parameters removed
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmm_compiler.errors import OptionTypeError
from nmm_compiler.kernels.linear.corrected import reads_as_stored
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.kernels.packed_formats import FORMATS, MX, check_blocks
from nmm_compiler.options import DTYPES
from nmm_compiler.outputs import read_json
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

QUALITY = Path(__file__).with_name("form_quality.json")
MEASURED = read_json(QUALITY)
"""What `make bench-compress` measured: {model: {form: figures}}, perplexities over that of bf16;
of a form with ", mxfp8 x" x was rounded, too."""
_DTYPES = {FP8: "fp8", **dict.fromkeys(DTYPES, "bf16")}
_NAME = re.compile(r"(\w+?)(?:\+([1-9]\d*)(fp8)?|:(0?\.\d*[1-9]\d*))?")
"""The format of the weights, and the rank and format of a branch, or a ratio below 1."""
_NAMES = ("fp8", "mxfp8", "mxfp4+32fp8")
DEFAULT = ("bf16", "fp8", "lowrank:0.2", "mxfp4+32fp8")
KEEPS = (1.1, 1.18)
"""Perplexity over that of bf16, in and out of the calibration's domain, of a form to recommend."""


@dataclass(frozen=True, kw_only=True)
class Form(Record):
    """One form. base: the format of the weights, "" for their own dtype. rank: of the branch, and
    branch the format of its numbers, "" for the model's dtype.

    ratio: the share of parameters that factors remove, of bytes with a base; None with neither.
    """

    name: str
    base: str = ""
    rank: int = 0
    branch: str = ""
    ratio: float | None = None

    def keywords(self) -> dict[str, Any]:
        """Return what makes the form of a model: keywords of `compress`, none for bf16."""
        size = {"rank": self.rank} if self.ratio is None else {"ratio": self.ratio}
        if not self.base:
            return {} if self.ratio is None else size
        return {"base": self.base, **size, **({"factors": self.branch} if self.branch else {})}

    def check(self, target: Target) -> None:
        """Raise OptionTypeError for weights that a target does not multiply."""
        if self.base and not reads_as_stored(target, self.base):
            read = [one for one in _NAMES if reads_as_stored(target, one.partition("+")[0])]
            wanted = f"a form that {target.name} multiplies: {', '.join(['bf16', *read])}"
            raise OptionTypeError("weights", self.name, wanted)
        if self.ratio is not None:
            wanted = 'ranks that are known without the weights, e.g. "mxfp4+64"'
            raise OptionTypeError("weights", self.name, wanted)

    def stored_bytes(self, k: int, n: int) -> int:
        """Return the bytes of a weight [n, k] in this form, scales and branch included."""
        made = check_blocks(k, self.base, f"a weight [{n}, {k}]").stored_bytes(n, k, 2)
        each = FORMATS[self.branch].bits // 8 if self.branch else 2
        return made + each * self.rank * (k + n) + 4 * self.rank * bool(self.branch)


BF16 = Form(name="bf16")


@functools.cache
def read_form(name: str) -> Form:
    """Return the form of a name, also of a dtype; raise OptionTypeError for any other."""
    name = _DTYPES.get(name, name)
    match = _NAME.fullmatch(name)
    base, rank, branch, ratio = match.groups() if match else ("", None, None, None)
    stored = FORMATS.get(base)
    if not (
        name == "bf16"
        or (base == "lowrank" and ratio)
        or (stored is not None and (not branch or base in MX))
    ):
        wanted = f'bf16, {", ".join(FORMATS)}, one of these with a branch ("mxfp4+64"), or '
        raise OptionTypeError("form", name, f'{wanted}"lowrank:0.2"')
    size = int(rank or 0)
    if stored is not None and stored.power_scales and size % 32:
        near = max(32, size // 32 * 32)
        raise OptionTypeError("form", name, f"a rank of whole MX blocks of 32, e.g. {base}+{near}")
    return Form(
        name=name, base="" if stored is None else base, rank=size, branch=branch or "",
        ratio=float(ratio) if ratio else None,
    )  # fmt: skip


def quality_of(name: str) -> tuple[str, tuple[float, float]] | None:
    """Return (model, perplexity over bf16 in and out of domain) as measured of a form, or None."""
    said = f"{name}, mxfp8 x" if name.startswith("mx") else name
    for model, rows in MEASURED.items():
        if "in" in rows.get(said, {}):
            row = rows[said]
            return model, (1.0, 1.0) if name == "bf16" else (row["in"][0], row["out"][0])
    return None


def keeps_quality(name: str) -> bool:
    """Return whether a form keeps the quality: bf16, or what was measured to."""
    found = quality_of(name)
    return found is not None and all(
        ratio <= most for ratio, most in zip(found[1], KEEPS, strict=True)
    )


def notes_on(names: Sequence[str]) -> list[str]:
    """Return what a table of these forms has to say of its quality and of its prices."""
    models = {found[0] for name in names if (found := quality_of(name))}
    notes = []
    if models:
        notes.append(
            f"quality: perplexity over that of bf16, in and out of the calibration's domain, "
            f"measured on {', '.join(models)}; to keep is at most {KEEPS[0]} and {KEEPS[1]}"
        )
    if any(name.startswith("mx") for name in names):
        notes.append(
            "mx forms: kernels of MX weights with their branch, of the model's dtype where inputs "
            "are no whole 128s; the head is fp8"
        )
    return notes
