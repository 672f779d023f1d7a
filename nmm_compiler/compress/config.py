"""Everything that decides what `compress` does to a model, as one frozen, checked record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from nmm_compiler.errors import OptionTypeError
from nmm_compiler.options import Values, check_fields, is_positive
from nmm_compiler.records import Record

METHODS = ("auto", "svd", "whitened", "two-sided")
ALLOCATIONS = ("auto", "uniform", "global")
BUDGETS = ("parameters", "latency")
SENSITIVITIES = ("gradient", "output")
DEFAULT_RATIO = 0.2


def _is_share(value: float) -> bool:
    return 0 <= value < 1


def _is_share_or_all(value: float) -> bool:
    return 0 <= value <= 1


def _are_ranks(given: int | dict[str, int]) -> bool:
    return all(rank >= 1 for rank in (given.values() if isinstance(given, dict) else (given,)))


@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Record):
    """How a model is factorized.

    ratio: share of the parameters of the selected matrices to remove, in [0, 1). With
        budget="latency": share of their predicted time.
    rank: instead of a ratio, one rank for all, or {name pattern: rank} for those matched.
    method: "svd" (plain); "whitened" (weighted by the calibration's activations: least error of
        each layer's output); "two-sided" (weighted by activations and by sampled gradients: least
        loss, to second order). "auto" is svd without calibration, else whitened, and two-sided
        where global allocation has sampled the gradients anyway.
    allocation: "uniform" (the same ratio everywhere), "global" (ranks where they matter most), or
        "auto": global when calibration is given.
    budget: what global allocation spends: "parameters", or "latency" as a kernel cost model
        predicts it.
    align: every rank is a multiple of it; None takes 128, or 64 or 32 for models too small for it.
    sensitivity: what global allocation compares matrices by. "gradient": the loss that errors
        cause to second order, from sampled gradients (needs calibration, one backward pass per
        batch); "output": relative error of each matrix's own output. Without calibration,
        relative error of the matrix.
    sequential: layers are fitted in the order of execution, each to the original model's outputs on
        the inputs that the already compressed earlier ones give it (`sequential.py`).
    damping: added to the diagonal of second moments, as a share of its mean.
    shrinkage: how far second moments are pulled to a multiple of the identity, 0 to 1; None
        estimates it (Ledoit and Wolf, 2004).
    """

    ratio: Annotated[
        float | None,
        Values("a number in [0, 1): the share of parameters to remove, e.g. 0.2", _is_share),
    ] = None
    rank: Annotated[
        int | dict[str, int] | None,
        Values("a positive whole number, or {name pattern: rank}", _are_ranks),
    ] = None
    method: Annotated[str, Values(names=METHODS)] = "auto"
    allocation: Annotated[str, Values(names=ALLOCATIONS)] = "auto"
    budget: Annotated[str, Values(names=BUDGETS)] = "parameters"
    align: Annotated[int | None, Values("a positive whole number, or None", is_positive)] = None
    sensitivity: Annotated[str, Values(names=SENSITIVITIES)] = "gradient"
    sequential: bool = False
    damping: Annotated[float, Values("a number in [0, 1), e.g. 1e-6", _is_share)] = 1e-6
    shrinkage: Annotated[float | None, Values("a number in [0, 1], or None", _is_share_or_all)] = (
        None
    )

    def __post_init__(self) -> None:
        if isinstance(self.rank, Mapping):  # a copy: the caller's may change
            object.__setattr__(self, "rank", dict(self.rank))
        check_fields(self)
        if self.ratio is not None and self.rank is not None:
            raise OptionTypeError(
                "rank", self.rank, f"either a rank or a ratio (ratio is {self.ratio!r}), not both"
            )
        if self.rank is not None and self.allocation != "auto":
            raise OptionTypeError(
                "allocation", self.allocation, "it with a ratio: given ranks are not allocated"
            )

    @property
    def effective_ratio(self) -> float | None:
        """The ratio, its default when neither ratio nor rank is given, None with ranks."""
        if self.rank is not None:
            return None
        return DEFAULT_RATIO if self.ratio is None else float(self.ratio)
