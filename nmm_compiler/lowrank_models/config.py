"""Everything that decides what `compress` does to a model: one frozen, checked record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from nmm_compiler.errors import OptionTypeError
from nmm_compiler.lowrank_models.modules import FORMAT_NAMES, read_format
from nmm_compiler.lowrank_models.select import Patterns
from nmm_compiler.options import TargetName, Values, check_fields

METHODS = ("auto", "svd", "whitened", "two-sided")
Workload = tuple[tuple[str, int, float], ...]


def _are_ranks(given: int | dict[str, int]) -> bool:
    return all(rank >= 0 for rank in (given.values() if isinstance(given, dict) else (given,)))


def _is_workload(given: int | Mapping[str, Any]) -> bool:
    if isinstance(given, int):
        return given > 0
    pairs = [pair for pair in given.values() if isinstance(pair, (tuple, list)) and len(pair) == 2]
    return 0 < len(pairs) == len(given) and all(
        type(tokens) is int
        and type(weight) in (int, float)
        and tokens > 0
        and 0 < weight < math.inf
        for tokens, weight in pairs
    )


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How a model is made low-rank: the keywords of `compress`. A config has defaults resolved: a
    ratio or a rank, and a method that is not "auto".

    ratio: share of the parameters of the selected matrices to remove, in [0, 1); 0.2 where no rank
        is given either. With base: share of the bytes that they take in 16 bits; what the base
        leaves of it is spent on branches.
    rank: instead of a ratio, one rank for all, or {name pattern: rank} for those matched. With base
        the rank of the branch: 0 for none, and 32 where no ratio is given either.
    base: "mxfp4", "mxfp8", "int4", "fp8", "int8" or another of `kernels/packed_formats.py`: the
        weights are rounded to this format, and the factors approximate what that loses.
    calibration: batches to run through the model (dicts of arguments, tuples, or tensors), or what
        `calibrate` returned for this model.
    include, exclude: name patterns ("mlp", "layers.0.*", "re:..."); each must match something.
    method: "svd" (no data, the same ratio everywhere); "whitened" (least error of each layer's
        output, ranks by these errors); "two-sided" (least loss of the model to second order, by
        gradients, ranks by that loss). "auto" is two-sided with calibration (whitened where ranks
        are given), else svd.
    align: every rank is a multiple of it; None takes 128, or 64 or 32 for models too small for it.
    target: hardware that times are predicted for.
    workload: tokens a call, or a mix like {"prefill": (512, 0.2), "decode": (1, 0.8)}, tokens and
        weight of each.
    allow_slower: also make layers low-rank whose calls are then predicted to be slower than dense.
    factors: "float8_e4m3" or "int8": round the factors to a byte an element with a scale for each
        output; or a format with blocks, such as "mxfp8", for ranks that are multiples of 32.
    """

    ratio: Annotated[
        float | None,
        Values(
            "a number in [0, 1): the share of parameters to remove, e.g. 0.2",
            lambda value: 0 <= value < 1,
        ),
    ] = None
    rank: Annotated[
        int | dict[str, int] | None,
        Values("a positive whole number, or {name pattern: rank}", _are_ranks),
    ] = None
    base: Annotated[str | None, Values(names=FORMAT_NAMES)] = None
    calibration: Any = None
    include: Patterns = None
    exclude: Patterns = None
    method: Annotated[str, Values(names=METHODS)] = "auto"
    align: Annotated[int | None, Values("a positive whole number, or None", (0).__lt__)] = None
    target: TargetName = "trn2"
    workload: Annotated[
        int | Mapping[str, Any],
        Values(
            "tokens a call, or a dict of name: (tokens, weight), like "
            '{"prefill": (512, 0.2), "decode": (1, 0.8)}',
            _is_workload,
        ),
    ] = 512
    allow_slower: bool = False
    factors: Annotated[str | None, Values(names=FORMAT_NAMES)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, format in (("base", self.base), ("factors", self.factors)):
            if format is not None:
                object.__setattr__(self, name, read_format(format))
        if self.ratio is not None and self.rank is not None:
            raise OptionTypeError("rank", self.rank, "either a rank or a ratio, not both")
        calibrated = self.calibration is not None
        if calibrated == (self.method == "svd") and self.method != "auto":
            raise OptionTypeError(
                "method", self.method, "calibration= with it, or method='svd' without"
            )
        if self.base is None and 0 in (
            self.rank.values() if isinstance(self.rank, dict) else (self.rank,)
        ):
            raise OptionTypeError("rank", 0, "at least 1, or base= with it: nothing would be left")
        if self.ratio is None and self.rank is None:
            name, default = ("ratio", 0.2) if self.base is None else ("rank", 32)
            object.__setattr__(self, name, default)
        if self.method == "auto":
            by_loss = "two-sided" if self.rank is None else "whitened"
            object.__setattr__(self, "method", by_loss if calibrated else "svd")

    @property
    def allocation(self) -> str:
        """How ranks are chosen: "explicit", "uniform" or "global"."""
        if self.rank is not None:
            return "explicit"
        return "uniform" if self.calibration is None and self.base is None else "global"

    @property
    def passes(self) -> Workload:
        """((name, tokens, weight), ...) of the workload, the weights summing to 1."""
        given = self.workload
        mix = {"pass": (given, 1.0)} if isinstance(given, int) else given
        total = sum(weight for _, weight in mix.values())
        return tuple((str(name), count, weight / total) for name, (count, weight) in mix.items())
