"""The targets of recovery: the original model, its recorded outputs, or labels.

`Distance` is the loss of one batch. `remember` records a model's outputs before `compress` changes
it, so that no second copy of the model is needed. Of logits it keeps only the most likely tokens,
and the probability of all others in one number. The divergence over these classes is at most the
one over all tokens, and is zero with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress.calibrate import (
    OutputFn,
    as_batches,
    call,
    frozen,
    main_output,
    padding_mask,
)
from nmm_compiler.compress.fingerprint import digest_of
from nmm_compiler.compress.progress import Steps
from nmm_compiler.errors import OptionTypeError, RecoveryError

_CACHE_BYTES = 1 << 30
_IGNORED = -100  # the label that Hugging Face and PyTorch leave out


@dataclass(frozen=True)
class Target:
    """A model's output for one batch.

    whole: the logits or features; or, of logits [tokens, vocabulary], `classes` [tokens, c] and
    `chances`, the log-probabilities [tokens, c + 1] of these and of all others together.
    """

    whole: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    chances: torch.Tensor | None = None


@dataclass(frozen=True)
class Remembered:
    """The outputs of a model for some batches, by the batches' digests: see `remember`."""

    targets: dict[str, Target]

    def of(self, batch: Any) -> Target:
        """Return the output for a batch; raise RecoveryError for a batch that was not recorded."""
        try:
            return self.targets[digest_of(batch)]
        except KeyError:
            raise RecoveryError(
                "the remembered outputs have none for a batch; pass remember() all batches that "
                "recover() will see, validation included, as lists"
            ) from None


def remember(
    model: nn.Module,
    data: Any,
    *,
    keep: int = 256,
    output: OutputFn | None = None,
    progress: bool = True,
) -> Remembered:
    """Return a model's outputs for batches, to pass to `recover(teacher=...)` instead of the model.

    Call it before `compress`. keep: tokens per position whose log-probabilities are kept, the most
    likely ones; features are kept whole. A batch of 512 tokens takes 3 MiB at 256.
    """
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise OptionTypeError("keep", keep, "a positive whole number of tokens per position")
    batches, targets = as_batches(data), {}
    with frozen(model), torch.no_grad(), Steps("remembering", len(batches), progress) as steps:
        for batch in batches:
            found, is_logits = read_output(call(model, batch), batch, output)
            if is_logits and keep < found.shape[-1] - 1:
                chances = rows_of(found, batch).log_softmax(-1)
                classes = chances.topk(keep).indices
                targets[digest_of(batch)] = Target(
                    classes=classes.to(torch.int32), chances=_grouped(chances, classes)
                )
            else:
                targets[digest_of(batch)] = Target(whole=found.clone())
            steps.advance()
    return Remembered(targets)


class Distance:
    """The loss of one batch: how far the student's output is from the teacher's, or from labels."""

    def __init__(
        self, teacher: nn.Module | Remembered | None, objective: str, output: OutputFn | None
    ) -> None:
        self.teacher, self.output = teacher, output
        self.resolved = objective
        self._cache: dict[int, Target] = {}
        self._cached_bytes = 0

    def __call__(self, student: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of the student's output for a batch, a scalar."""
        found, is_logits = read_output(call(student, batch), batch, self.output)
        if self.resolved == "labels":
            return label_loss(found, batch)
        if self.resolved == "auto":
            self.resolved = "logits" if is_logits else "features"
        target = self._target(batch)
        rows = rows_of(found, batch)
        if target.whole is None:
            assert target.classes is not None
            assert target.chances is not None
            chances = _grouped(rows.log_softmax(-1), target.classes.long())
            return _divergence(chances, target.chances)
        if found.shape != target.whole.shape:
            raise RecoveryError(
                f"the model's output is {list(found.shape)} and the teacher's "
                f"{list(target.whole.shape)}; pass the model that was compressed as teacher"
            )
        wanted = rows_of(target.whole, batch)
        if self.resolved == "logits":
            return _divergence(rows.log_softmax(-1), wanted.log_softmax(-1))
        scale = wanted.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
        return (rows - wanted).square().mean() / scale

    def _target(self, batch: Any) -> Target:
        """Return the teacher's output, computed once per batch while the cache has room."""
        if isinstance(self.teacher, Remembered):
            return self.teacher.of(batch)
        if id(batch) in self._cache:
            return self._cache[id(batch)]
        assert self.teacher is not None
        with torch.no_grad():
            found = read_output(call(self.teacher, batch), batch, self.output)[0].detach()
        size = found.numel() * found.element_size()
        if self._cached_bytes + size <= _CACHE_BYTES:
            self._cache[id(batch)] = Target(found)
            self._cached_bytes += size
        return Target(found)


def read_output(result: Any, batch: Any, output: OutputFn | None) -> tuple[torch.Tensor, bool]:
    """Return (tensor, whether it is logits) of what a model returned."""
    if output is not None:
        return output(result, batch), False
    return main_output(result)


def rows_of(tensor: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return [tokens, size] in float32, without padding."""
    rows = tensor.reshape(-1, tensor.shape[-1]).float()
    mask = padding_mask(batch)
    if mask is not None and mask.numel() == rows.shape[0]:
        rows = rows[mask.flatten().to(rows.device)]
    return rows


def label_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of the next token: `labels` of the batch, else its input_ids.

    logits: [sequences, tokens, vocabulary]. Labels of -100 and padding do not count.
    """
    labels = batch.get("labels", batch.get("input_ids")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or logits.shape[:-1] != labels.shape:
        raise RecoveryError(
            f'objective="labels" needs labels or input_ids of the logits\' shape '
            f"{list(logits.shape[:-1])} in each batch; pass dicts that have them"
        )
    mask = padding_mask(batch)
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(~mask.to(labels.device), _IGNORED)
    return nn.functional.cross_entropy(
        logits[..., :-1, :].flatten(0, -2).float(), labels[..., 1:].flatten(), ignore_index=_IGNORED
    )


def _grouped(chances: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [tokens, c + 1] of c classes and of all others together."""
    kept = chances.gather(-1, classes)
    tiny = torch.finfo(torch.float32).tiny
    rest = torch.log((1 - kept.exp().sum(-1, keepdim=True)).clamp_min(tiny))
    return torch.cat([kept, rest], -1)


def _divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the mean Kullback-Leibler divergence of log-probabilities [tokens, classes]."""
    return nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
