"""`recover`: fine-tune a low-rank model's factors against the original model.

In: the compressed model, the original (the teacher), and batches of text without labels. The loss
is the difference of the two models: the Kullback-Leibler divergence of their logits, or, for models
without logits, the relative squared error of their features. Without a teacher it is the cross
entropy of the next token.

Some batches are held out. The final factors are the best on those batches, the initial ones
included, so recovery never makes that loss larger. Weights of half precision are trained as float32
copies, since their own steps would be rounded away.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.lowrank_models.calibrate import (
    as_batches,
    call,
    frozen,
    main_output,
    padding_mask,
    rows_of,
)
from nmm_compiler.lowrank_models.modules import lowrank_layers
from nmm_compiler.lowrank_models.progress import Step, steps as progress
from nmm_compiler.records import Record

_EVALUATIONS = 10
_WARMUP_SHARE = 0.1
_BACKOFF = 0.3
_CACHE_BYTES = 1 << 30
_IGNORED = -100  # the label that Hugging Face and PyTorch leave out


@dataclass(frozen=True, kw_only=True)
class RecoveryReport(Record):
    """The result of `recover`; losses are means over the held-out batches.

    kept_step: the step whose factors were kept, 0 for the initial ones.
    """

    objective: str
    steps: int
    kept_step: int
    trained_parameters: int
    validation_before: float
    validation_after: float
    history: tuple[tuple[int, float], ...]
    seconds: float = field(default=0.0, compare=False)

    def summary(self) -> str:
        """Return one line for people."""
        return (
            f"recovered {self.objective} over {self.steps} steps: held-out loss "
            f"{self.validation_before:.4g} -> {self.validation_after:.4g} (best at step "
            f"{self.kept_step})"
        )


def recover(
    model: nn.Module,
    data: Any,
    *,
    teacher: nn.Module | None = None,
    steps: int = 200,
    lr: float = 1e-4,
    seed: int = 0,
) -> RecoveryReport:
    """Train the factors of the low-rank layers of `model`, in place, to follow `teacher`.

    Args:
        model: what `compress` has made low-rank.
        data: batches as for calibration. Of an iterator, which may be endless, no more batches are
            taken than there are steps and held-out ones. The last tenth of the batches, at least
            one, is held out to judge by.
        teacher: the original model; or None, for the cross entropy of the next token, from each
            batch's `labels` or `input_ids`.
        steps: optimizer steps, one batch each.
        lr: peak learning rate of AdamW (10 % warm-up, then cosine), cut whenever the held-out loss
            is found no lower, which is looked at ten times.
        seed: of the order of the batches.

    Ctrl-C and errors leave the best factors so far in place.

    Raises:
        ModelError: the model has no low-rank layers.
        ModelError: too few batches are left to train on, the two models' outputs differ in
            shape, or the loss is not finite.
    """
    if not isinstance(teacher, (nn.Module, type(None))) or teacher is model:
        kind = type(teacher).__name__
        wanted = "the original model (copy.deepcopy it beforehand), or None for the next token"
        raise OptionTypeError("teacher", kind, wanted)
    for name, number in (("steps", steps), ("lr", lr)):
        if not number > 0:
            raise OptionTypeError(name, number, "a positive number")
    layers = lowrank_layers(model)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no low-rank layer; run compress on it before recover"
        )
    fixed = [n for n, x in layers.items() if not isinstance(x.down, nn.Linear)]
    if fixed:
        raise OptionTypeError(
            "model", f"of eight bits in {fixed[0]}", "one to recover, then quantize"
        )
    train, held_out = _split(data, steps)
    started = time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    parameters = [part.weight for layer in layers.values() for part in (layer.down, layer.up)]
    of = model if teacher is None else teacher
    with frozen(model), frozen(of), progress("recovering") as step:
        for parameter in parameters:
            parameter.requires_grad_(True)
        run = _Run(model, teacher, parameters, held_out)
        run.train(_shuffled(train, steps, generator), steps, lr, step)
    kept_step, after = min(run.history, key=lambda entry: entry[1])
    return RecoveryReport(
        objective=run.objective,
        steps=steps,
        kept_step=kept_step,
        trained_parameters=sum(p.numel() for p in parameters),
        validation_before=run.history[0][1],
        validation_after=after,
        history=tuple(run.history),
        seconds=time.monotonic() - started,
    )


@dataclass
class _Run:
    """The training loop, and the best factors so far.

    objective: what a loss is: "labels", "logits" or "features" of the teacher. trained: copies of
    the factors in at least float32, which the optimizer changes. best: those with the least
    held-out loss.
    """

    model: nn.Module
    teacher: nn.Module | None
    parameters: Sequence[nn.Parameter]
    held_out: Sequence[Any]
    objective: str = "labels"
    history: list[tuple[int, float]] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    _targets: dict[int, Tensor] = field(default_factory=dict)

    def train(self, batches: Iterator[Any], steps: int, lr: float, show: Step) -> None:
        """Train, evaluating now and then; end with the best factors.

        Where an evaluation is no better than the best, training continues from the best factors
        with a fresh optimizer and smaller steps. So a model that is close to its teacher gets a
        small rate without a search.
        """
        for parameter in self.parameters:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self.trained.append(parameter.detach().to(dtype, copy=True))
        self.evaluate(0)
        optimizer = torch.optim.AdamW(self.trained, lr=lr, weight_decay=0.0)
        warmup = max(1, round(_WARMUP_SHARE * steps))
        checks = {round(steps * (i + 1) / _EVALUATIONS) for i in range(_EVALUATIONS)}
        try:
            for step, batch in enumerate(batches, start=1):
                share = step / warmup
                if step > warmup:
                    angle = math.pi * (step - 1 - warmup) / max(1, steps - warmup)
                    share = 0.5 * (1 + math.cos(angle))
                optimizer.param_groups[0]["lr"] = lr * share
                loss = self.loss(batch)
                if not torch.isfinite(loss):
                    raise ModelError(
                        f"the loss is {float(loss.detach())} at step {step}; the best factors so "
                        f"far are kept: lower lr from {lr:g}, or check the batch"
                    )
                loss.backward()
                for wide, parameter in zip(self.trained, self.parameters, strict=True):
                    wide.grad = None if parameter.grad is None else parameter.grad.to(wide.dtype)
                    parameter.grad = None
                nn.utils.clip_grad_norm_(self.trained, 1.0)
                optimizer.step()
                self._store(self.trained)
                if step in checks and not self.evaluate(step):
                    self._store(self.best)
                    optimizer.state.clear()
                    lr *= _BACKOFF
                show(f"recovering (held-out loss {self.history[-1][1]:.4g})", step, steps)
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            self._store(self.best)

    @torch.no_grad()
    def _store(self, values: Sequence[Tensor]) -> None:
        """Give the factors, and what is trained, these values."""
        for value, wide, parameter in zip(values, self.trained, self.parameters, strict=True):
            wide.copy_(value)
            parameter.copy_(value)

    @torch.no_grad()
    def evaluate(self, step: int) -> bool:
        """Measure the held-out loss; keep the factors and return True if they are the best yet."""
        loss = sum(float(self.loss(batch)) for batch in self.held_out) / len(self.held_out)
        if not math.isfinite(loss) and step == 0:
            raise ModelError(
                f"the held-out loss is {loss} before training; check the model and the batches"
            )
        better = all(loss < other for _, other in self.history)
        self.history.append((step, loss))
        if better:
            self.best = [wide.clone() for wide in self.trained]
        return better

    def loss(self, batch: Any) -> Tensor:
        """Return how far the output for a batch is from the teacher's, or from labels, a scalar."""
        output, is_logits = main_output(call(self.model, batch))
        mask = padding_mask(batch)
        if self.teacher is None:
            return _label_loss(output, batch, mask)
        self.objective = "logits" if is_logits else "features"
        target = self._targets.get(id(batch))
        if target is None:  # computed once per batch while there is room
            with torch.no_grad():
                target = main_output(call(self.teacher, batch))[0].detach()
            if sum(t.nbytes for t in (target, *self._targets.values())) <= _CACHE_BYTES:
                self._targets[id(batch)] = target
        if output.shape != target.shape:
            raise ModelError(
                f"the model's output is {list(output.shape)} and the teacher's "
                f"{list(target.shape)}; pass the model that was compressed as teacher"
            )
        rows, wanted = (rows_of(one, mask).float() for one in (output, target))
        if is_logits:
            chances = rows.log_softmax(-1)
            return nn.functional.kl_div(
                chances, wanted.log_softmax(-1), reduction="batchmean", log_target=True
            )
        scale = wanted.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
        return (rows - wanted).square().mean() / scale


def _shuffled(batches: Sequence[Any], steps: int, generator: torch.Generator) -> Iterator[Any]:
    """Yield `steps` batches: each epoch all of them, in a new order."""
    left = steps
    while left > 0:
        for index in torch.randperm(len(batches), generator=generator).tolist()[:left]:
            yield batches[index]
        left -= len(batches)


def _split(data: Any, steps: int) -> tuple[list[Any], list[Any]]:
    """Return (batches to train on, held-out ones); of an iterator, no more than are needed."""
    if isinstance(data, Iterator):
        data = list(itertools.islice(data, steps + max(1, steps // 10)))
    batches = as_batches(data)
    held = max(1, len(batches) // 10)
    if held >= len(batches):
        raise ModelError(
            f"{len(batches)} batch of data leaves none to train on beside the held-out one; pass "
            "more batches"
        )
    return batches[:-held], batches[-held:]


def _label_loss(logits: Tensor, batch: Any, mask: Tensor | None) -> Tensor:
    """Return the mean cross entropy of the next token: `labels` of the batch, else its input_ids.

    logits: [sequences, tokens, vocabulary]. Labels of -100 and padding do not count.
    """
    labels = batch.get("labels", batch.get("input_ids")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or logits.shape[:-1] != labels.shape:
        raise ModelError(
            f"recovery without a teacher needs labels or input_ids of the logits' shape "
            f"{list(logits.shape[:-1])} in each batch; pass dicts that have them"
        )
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(~mask.to(labels.device), _IGNORED)
    return nn.functional.cross_entropy(
        logits[..., :-1, :].flatten(0, -2).float(), labels[..., 1:].flatten(), ignore_index=_IGNORED
    )
