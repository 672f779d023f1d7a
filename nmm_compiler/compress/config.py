"""Everything that decides what `compress` does to a model, as one frozen, checked record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nmm_compiler.errors import OptionTypeError, UnknownNameError
from nmm_compiler.records import Record

METHODS = ("auto", "svd", "whitened", "two-sided")
ALLOCATIONS = ("auto", "uniform", "global")
BUDGETS = ("parameters", "latency")
SENSITIVITIES = ("gradient", "output")
DEFAULT_RATIO = 0.2


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

    ratio: float | None = None
    rank: int | dict[str, int] | None = None
    method: str = "auto"
    allocation: str = "auto"
    budget: str = "parameters"
    align: int | None = None
    sensitivity: str = "gradient"
    sequential: bool = False
    damping: float = 1e-6
    shrinkage: float | None = None

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("method", self.method, METHODS),
            ("allocation", self.allocation, ALLOCATIONS),
            ("budget", self.budget, BUDGETS),
            ("sensitivity", self.sensitivity, SENSITIVITIES),
        ):
            if value not in known:
                raise UnknownNameError(kind, value, known)
        self._check_ratio_and_rank()
        if isinstance(self.rank, Mapping):  # a copy: the caller's may change
            object.__setattr__(self, "rank", dict(self.rank))
        if self.rank is not None and self.allocation != "auto":
            raise OptionTypeError(
                "allocation", self.allocation, "it with a ratio: given ranks are not allocated"
            )
        if self.align is not None and (not _whole(self.align) or self.align < 1):
            raise OptionTypeError("align", self.align, "a positive whole number, or None")
        if not _number(self.damping) or not 0 <= self.damping < 1:
            raise OptionTypeError("damping", self.damping, "a number in [0, 1), e.g. 1e-6")
        if self.shrinkage is not None and not (
            _number(self.shrinkage) and 0 <= self.shrinkage <= 1
        ):
            raise OptionTypeError("shrinkage", self.shrinkage, "a number in [0, 1], or None")

    def _check_ratio_and_rank(self) -> None:
        if self.ratio is not None and self.rank is not None:
            raise OptionTypeError(
                "rank", self.rank, f"either a rank or a ratio (ratio is {self.ratio!r}), not both"
            )
        if self.ratio is not None and not (_number(self.ratio) and 0 <= self.ratio < 1):
            raise OptionTypeError(
                "ratio",
                self.ratio,
                "a number in [0, 1): the share of parameters to remove, e.g. 0.2",
            )
        if self.rank is None:
            return
        ranks = list(self.rank.values()) if isinstance(self.rank, Mapping) else [self.rank]
        if not all(_whole(rank) and rank >= 1 for rank in ranks):
            raise OptionTypeError(
                "rank", self.rank, "a positive whole number, or {name pattern: rank}"
            )

    @property
    def effective_ratio(self) -> float | None:
        """The ratio, its default when neither ratio nor rank is given, None with ranks."""
        if self.rank is not None:
            return None
        return DEFAULT_RATIO if self.ratio is None else float(self.ratio)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
