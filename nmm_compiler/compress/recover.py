"""`recover`: fine-tune a low-rank model's factors against the original model.

In: the compressed model, the original (the teacher) or its recorded outputs (`teacher.py`), and
batches of text without labels. The loss is the difference of the two models: the Kullback-Leibler
divergence of their logits, or, for models without logits, the relative squared error of their
features. Without a teacher it is the cross entropy of the next token. Either all elements of the
factors are trained, or a small correction to each factor (LoRA style), which is multiplied in at
the end; both factors together, or one after the other (SVD-LLM, arXiv 2403.07378).

Some batches are held out. The final factors are the best on those batches, the initial ones
included, so recovery never makes that loss larger. Weights of half precision are trained as float32
copies, since their own steps would be rounded away.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from nmm_compiler.compress.calibrate import OutputFn, as_batches
from nmm_compiler.compress.modules import LowRankLinear, lowrank_layers
from nmm_compiler.compress.progress import Steps
from nmm_compiler.compress.teacher import Distance, Remembered
from nmm_compiler.errors import (
    NoMatchingModulesError,
    OptionTypeError,
    RecoveryError,
    UnknownNameError,
)
from nmm_compiler.records import Record

TRAINABLE = ("full", "lora")
OBJECTIVES = ("auto", "logits", "features", "labels")
ORDERS = ("together", "u-then-v")
_WARMUP_SHARE = 0.1
_BACKOFF = 0.3


@dataclass(frozen=True, kw_only=True)
class RecoveryReport(Record):
    """The result of `recover`; losses are means over the held-out batches.

    kept_step: the step whose factors were kept, 0 for the initial ones.
    """

    objective: str
    trainable: str
    steps: int
    kept_step: int
    trained_parameters: int
    validation_batches: int
    validation_before: float
    validation_after: float
    history: tuple[tuple[int, float], ...]
    seconds: float = field(default=0.0, compare=False)

    def summary(self) -> str:
        """Return one line for people."""
        return (
            f"recovered {self.objective} over {self.steps} steps ({self.trainable}, "
            f"{self.trained_parameters} parameters): held-out loss {self.validation_before:.4g} -> "
            f"{self.validation_after:.4g} (best at step {self.kept_step}), {self.seconds:.1f} s"
        )


def recover(
    model: nn.Module,
    data: Any,
    *,
    teacher: nn.Module | Remembered | None = None,
    validation: Any = None,
    steps: int = 200,
    lr: float = 1e-4,
    trainable: str = "full",
    lora_rank: int = 16,
    objective: str = "auto",
    order: str = "together",
    output: OutputFn | None = None,
    evaluations: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> RecoveryReport:
    """Train the factors of the low-rank layers of `model`, in place, to follow `teacher`.

    data, validation: batches as for calibration; without validation, a tenth of data (at least one
        batch) is held out. Of an iterator, which may be endless, no more batches are taken than
        there are steps and held-out ones.
    teacher: the original model; or the outputs that `remember(original, batches)` returned before
        it was compressed, so that only one model is in memory; or None with objective="labels".
    steps: optimizer steps, one batch each. lr: peak learning rate of AdamW (10 % warm-up, then
        cosine), cut whenever one of the `evaluations` of the held-out loss finds it no lower.
    trainable: "full" (every factor element) or "lora" (a rank `lora_rank` correction per factor).
    objective: "logits", "features", or "auto": logits where the model has them; "labels": the cross
        entropy of the next token, from each batch's `labels` or `input_ids`.
    order: "together", or "u-then-v": half of the steps train `up`, then the other half `down`.
    output: (result, batch) -> features to compare instead, e.g. sentence embeddings.

    Ctrl-C and errors leave the best factors so far in place. Raises NoMatchingModulesError for a
    model without low-rank layers, RecoveryError when too few batches are left to train on, the two
    models' outputs differ in shape, or the loss is not finite.
    """
    _check_numbers(steps, lr, lora_rank, evaluations)
    _check_choices(model, teacher, trainable, objective, order)
    layers = lowrank_layers(model)
    if not layers:
        raise NoMatchingModulesError(
            f"{type(model).__name__} has no low-rank layer; run compress on it before recover"
        )
    fixed = [n for n, x in layers.items() if not isinstance(x.down, nn.Linear)]
    if fixed:
        raise OptionTypeError(
            "model", f"of eight bits in {fixed[0]}", "one to recover, then quantize"
        )
    train, held_out = _split(data, validation, steps)
    started = time.monotonic()
    distance = Distance(teacher, objective, output)
    generator = torch.Generator().manual_seed(seed)
    models = (model, teacher) if isinstance(teacher, nn.Module) else (model,)
    with _training(models, layers, trainable, lora_rank, generator) as halves:
        parameters = [*halves[0], *halves[1]]
        run = _Run(model, parameters, distance, held_out)
        turns = [parameters] if order == "together" else list(halves)
        with Steps("recovering", steps, progress) as bar:
            for i, turn in enumerate(turns):
                share = steps * (i + 1) // len(turns) - steps * i // len(turns)
                run.train(turn, train, share, lr, evaluations, generator, bar)
    return RecoveryReport(
        objective=distance.resolved,
        trainable=trainable,
        steps=steps,
        kept_step=run.best_step,
        trained_parameters=sum(p.numel() for p in parameters),
        validation_batches=len(held_out),
        validation_before=run.history[0][1],
        validation_after=run.best,
        history=tuple(run.history),
        seconds=time.monotonic() - started,
    )


class _Run:
    """The training loop, and the best factors so far."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        distance: Distance,
        held_out: Sequence[Any],
    ) -> None:
        self.model, self.parameters = model, parameters
        self.distance, self.held_out = distance, held_out
        self.history: list[tuple[int, float]] = []
        self.best, self.best_step = math.inf, 0
        self.steps = 0
        self._best_values: list[torch.Tensor] = []

    def train(
        self,
        turn: Sequence[nn.Parameter],
        batches: Sequence[Any],
        steps: int,
        lr: float,
        evaluations: int,
        generator: torch.Generator,
        bar: Steps,
    ) -> None:
        """Train a turn's parameters, evaluating `evaluations` times; end with the best factors.

        Where an evaluation is no better than the best, training continues from the best factors
        with a fresh optimizer and smaller steps. So a model that is close to its teacher gets a
        small rate without a search.
        """
        optimizer = torch.optim.AdamW(turn, lr=lr, weight_decay=0.0)
        first, checks = (
            self.steps,
            {round(steps * (i + 1) / evaluations) for i in range(evaluations)},
        )
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        for parameter in turn:
            parameter.requires_grad_(True)
        try:
            if not self.history:
                self.evaluate(0)
            for own, batch in enumerate(_shuffled(batches, steps, generator), start=1):
                self.steps = step = first + own
                for group in optimizer.param_groups:
                    group["lr"] = lr * _schedule(own - 1, steps)
                optimizer.zero_grad(set_to_none=True)
                loss = self.distance(self.model, batch)
                if not torch.isfinite(loss):
                    raise RecoveryError(
                        f"the loss is {float(loss.detach())} at step {step}; the factors are those "
                        f"of step {self.best_step}: lower lr from {lr:g}, or check the batch"
                    )
                loss.backward()
                nn.utils.clip_grad_norm_(turn, 1.0)
                optimizer.step()
                if own in checks:
                    if not self.evaluate(step):
                        self._restore()
                        optimizer.state.clear()
                        lr *= _BACKOFF
                    bar.show(f"(held-out loss {self.history[-1][1]:.4g})")
                bar.advance()
        finally:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        """Put the best factors back; before the first evaluation nothing has changed yet."""
        if self._best_values:
            for parameter, value in zip(self.parameters, self._best_values, strict=True):
                parameter.copy_(value)

    @torch.no_grad()
    def evaluate(self, step: int) -> bool:
        """Measure the held-out loss; keep the factors and return True if they are the best yet."""
        losses = [float(self.distance(self.model, batch)) for batch in self.held_out]
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss) and step == 0:
            raise RecoveryError(
                f"the held-out loss is {loss} before training; check the model and the batches"
            )
        self.history.append((step, loss))
        better = loss < self.best
        if better:
            self.best, self.best_step = loss, step
            self._best_values = [parameter.detach().clone() for parameter in self.parameters]
        return better


def _schedule(step: int, steps: int) -> float:
    warmup = max(1, round(_WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _shuffled(batches: Sequence[Any], steps: int, generator: torch.Generator) -> Iterator[Any]:
    """Yield `steps` batches: each epoch all of them, in a new order."""
    left = steps
    while left > 0:
        for index in torch.randperm(len(batches), generator=generator).tolist()[:left]:
            yield batches[index]
        left -= len(batches)


def _split(data: Any, validation: Any, steps: int) -> tuple[list[Any], list[Any]]:
    """Return (batches to train on, held-out ones); of an iterator, no more than are needed."""
    known = validation is not None
    if isinstance(data, Iterator):
        data = list(itertools.islice(data, steps + (0 if known else max(1, steps // 10))))
    batches = as_batches(data)
    if known:
        return batches, as_batches(validation)
    held = max(1, len(batches) // 10)
    if held >= len(batches):
        raise RecoveryError(
            f"{len(batches)} batch of data leaves none to train on beside the held-out one; pass "
            "more batches, or validation="
        )
    return batches[:-held], batches[-held:]


class _Master(nn.Module):
    """A float32 copy that is trained in place of a weight of half precision."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(weight.detach().float())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return self.value.to(weight.dtype)


class _Correction(nn.Module):
    """weight + b @ a, with a random and b zero at first (Hu et al., 2021)."""

    def __init__(self, weight: torch.Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        n, k = weight.shape
        rank = min(rank, n, k)
        start = torch.randn(rank, k, generator=generator) / math.sqrt(k)
        self.a = nn.Parameter(start.to(weight.device))
        self.b = nn.Parameter(torch.zeros(n, rank, device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.float() + self.b @ self.a).to(weight.dtype)


@contextmanager
def _training(
    models: Sequence[nn.Module],
    layers: dict[str, LowRankLinear],
    trainable: str,
    lora_rank: int,
    generator: torch.Generator,
) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """Make only the factors trainable, in eval mode; restore the model after the block.

    Yields the trained parameters of every `up`, and of every `down`.

    Corrections and float32 copies are multiplied or rounded into the factors at the end.
    """
    both = [module for one in models for module in one.modules()]
    modes = {module: module.training for module in both}
    wants = {p: p.requires_grad for one in models for p in one.parameters()}
    ups: list[nn.Parameter] = []
    downs: list[nn.Parameter] = []
    factors = [
        (linear, trained)
        for layer in layers.values()
        for linear, trained in ((layer.down, downs), (layer.up, ups))
    ]
    changed: list[nn.Linear] = []
    try:
        for module in both:
            module.training = False
        for parameter in wants:
            parameter.requires_grad_(False)
        for linear, trained in factors:
            if trainable == "lora":
                extra: nn.Module = _Correction(linear.weight, lora_rank, generator)
            elif linear.weight.dtype.itemsize <= 2:
                extra = _Master(linear.weight)
            else:
                trained.append(cast(nn.Parameter, linear.weight.requires_grad_(True)))
                continue
            trained.extend(extra.parameters())
            parametrize.register_parametrization(linear, "weight", extra)
            changed.append(linear)
        yield ups, downs
    finally:
        for linear in changed:
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)
        for parameter in (*ups, *downs):
            parameter.grad = None
        for parameter, wanted in wants.items():
            parameter.requires_grad_(wanted)
        for module, training in modes.items():
            module.training = training


def _check_numbers(steps: int, lr: float, lora_rank: int, evaluations: int) -> None:
    for name, number in (
        ("steps", steps), ("lora_rank", lora_rank), ("evaluations", evaluations)
    ):  # fmt: skip
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise OptionTypeError(name, number, "a positive whole number")
    if not lr > 0:
        raise OptionTypeError("lr", lr, "a positive number")


def _check_choices(
    model: object, teacher: object, trainable: str, objective: str, order: str
) -> None:
    for kind, value, known in (
        ("trainable", trainable, TRAINABLE),
        ("objective", objective, OBJECTIVES),
        ("order", order, ORDERS),
    ):
        if value not in known:
            raise UnknownNameError(kind, value, known)
    if not isinstance(model, nn.Module):
        raise OptionTypeError("model", type(model).__name__, "a torch.nn.Module")
    if objective == "labels":
        if teacher is not None:
            raise OptionTypeError("teacher", "given", 'it with another objective than "labels"')
        return
    if not isinstance(teacher, (nn.Module, Remembered)):
        raise OptionTypeError(
            "teacher", type(teacher).__name__,
            'the original torch.nn.Module, or remember(original, batches); or objective="labels"',
        )  # fmt: skip
    if model is teacher:
        raise OptionTypeError(
            "teacher", "the model itself", "the original model (copy.deepcopy it before compress)"
        )
