"""Collects second moments of each layer's inputs and gradients over the calibration data.

In: the model, the layers, and batches to run through it. Out, per layer and in float64: A = E[x
x^T] over the tokens x that reach it, and on request G = E[g g^T] over sampled gradients g at its
output. The moment of the longer side is kept multiplied onto the shorter side (`moments.py`): E[(W
x)(W x)^T] where W [n, k] has n < k, E[(W^T g)(W^T g)^T] where n > k. For a base of few bits both
are kept whole, since what the base leaves of W is not known yet.
Padding, as the batch's `attention_mask` declares it, is not counted.

The gradients estimate the sensitivity of the loss. For logits, labels are drawn from the model's
own distribution, so that E[g g^T] is the Fisher information; for features (no logits) the loss is
half their squared distance to the original, and random signs over the features give the
Gauss-Newton matrix (Hutchinson's estimator). Either way half of g^T (dW x) squared, summed over
tokens, is the loss that an error dW causes, to second order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmm_compiler.errors import CapacityError, ModelError, nearest
from nmm_compiler.lowrank_models.moments import SecondMoment, is_finite
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.lowrank_models.select import Site


@dataclass
class Statistics:
    """The moments of one pass over the calibration data, by layer name."""

    inputs: dict[str, SecondMoment]
    gradients: dict[str, SecondMoment]
    tokens: int = 0

    def check(self, sites: Sequence[Site], *, gradients: bool, base: str | None = None) -> None:
        """Raise ModelError, naming the layers, where the moments of these sites are lacking.

        One of many experts may lack those of its inputs, and all but one layer their gradients.
        """
        every = (*self.inputs.values(), *self.gradients.values())
        if base is not None and any(moment.carried for moment in every):
            raise ModelError(
                f"the statistics are for factors of the weights, and compress has base={base!r}: "
                f"pass calibrate(..., base={base!r})"
            )
        kinds = {"inputs": (self.inputs, {s.name: s.k for s in sites if s.group == s.name})}
        if gradients:
            reached = {s.name: s.n for s in sites if s.name in self.gradients}
            kinds["gradients"] = (self.gradients, reached or {s.name: s.n for s in sites})
        for kind, (given, sizes) in kinds.items():
            right = {n for n, one in given.items() if one.tokens and one.size == sizes.get(n)}
            lacking = [name for name in sizes if name not in right]
            if lacking:
                raise ModelError(
                    f"calibration has no {kind} of {len(lacking)} of {len(sites)} layers: "
                    f"{nearest('', lacking)}; name them in exclude=, or calibrate this "
                    "model, with inputs that use them and the same include, exclude and gradients"
                )


def as_batches(calibration: Any) -> list[Any]:
    """Return calibration data as a list of batches.

    Accepts an iterable of batches (a DataLoader, a list, a generator), or one batch: a dict of
    tensors or a tensor. Raises ModelError when there are none, and for text.
    """
    if isinstance(calibration, (Mapping, Tensor)):
        return [calibration]
    batches = list(calibration) if isinstance(calibration, Iterable) else []
    if not batches or any(isinstance(batch, str) for batch in batches):
        raise ModelError(
            f"calibration, a {type(calibration).__name__}, has no batches of numbers; pass an "
            "iterable of dicts of model arguments, tuples of them, or tensors (of a text, what its "
            "tokenizer returns), or leave it out for plain SVD"
        )
    return batches


def call(model: nn.Module, batch: Any) -> Any:
    """Run one batch: a mapping as keywords, a tuple or list as arguments, else as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def collect(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Any],
    *,
    gradients: bool = False,
    whole: bool = False,
) -> Statistics:
    """Run the batches through the model in eval mode and return the layers' statistics.

    whole: keep no moment multiplied onto the shorter side, as weights with a base need.

    Raises ModelError, naming the layer, for activations or gradients that are not finite, for a
    model that cannot be differentiated, and, listing them, for layers that no token reached;
    CapacityError, after the first batch, where the moments and the largest factorization do not fit
    into the memory that there was before; the model and the batches are not counted.
    """
    free, kept = available_bytes(), Statistics({}, {})
    generator = torch.Generator().manual_seed(0)

    def add(
        moments: dict[str, SecondMoment], name: str, matrix: Tensor,
        vectors: Tensor, what: str,
    ) -> None:  # fmt: skip
        """Add vectors [.., size] to the moment of a layer, whose matrix is [results, size]."""
        rows = rows_of(vectors.detach(), mask)
        if not is_finite(rows):
            raise ModelError(
                f"{what} has NaN or infinite elements in calibration batch {i}; "
                "check that batch, or run calibration in a wider dtype"
            )
        results, size = matrix.shape
        carried = results < size and not whole
        if name not in moments:
            moments[name] = SecondMoment(size, results if carried else None, rows.device)
        moments[name].add(rows, matrix if carried else None)

    def take(site: Site, module: nn.Module, arguments: Any, result: Tensor) -> Tensor | None:
        """Take the input of a layer that has run, and its gradient once that comes; its hook."""
        name = site.name
        add(kept.inputs, name, site.weight, arguments[0], f"the input of {name}")
        if not gradients:
            return None
        if not result.requires_grad:
            zero = torch.zeros((), dtype=result.dtype, device=result.device, requires_grad=True)
            result = result + zero
        of = kept.gradients, name, site.weight.T
        what = f"the gradient at the output of {name}"
        result.register_hook(lambda gradient: add(*of, gradient, what))
        return result

    with frozen(model), ExitStack() as hooks, steps("calibrating") as step:
        for site in sites:
            hook = site.module.register_forward_hook(partial(take, site))
            hooks.callback(hook.remove)
        for i, batch in enumerate(batches):
            step("calibrating", i, len(batches))
            mask = padding_mask(batch)
            with torch.set_grad_enabled(gradients):
                result = call(model, batch)
                loss = sensitivity_loss(result, batch, generator) if gradients else None
            if loss is not None and loss.requires_grad:
                try:
                    loss.backward()
                except RuntimeError as error:
                    raise ModelError(
                        f"{type(model).__name__} cannot be differentiated ({error}); pass "
                        'method="whitened", which needs no gradients'
                    ) from error
            # three matrices of the largest factorization in float64, and a Gram matrix
            work = max((3 * s.n * s.k + min(s.n, s.k) ** 2 for s in sites), default=0)
            every = (*kept.inputs.values(), *kept.gradients.values())
            sums = sum(moment.bytes() for moment in every)
            need = sums + 8 * work
            if free is not None and need > free:
                raise CapacityError(
                    f"calibrating {len(sites)} layers at once needs {need / 2**30:.2f} GiB for "
                    f"moments and factors, beside the model; {free / 2**30:.2f} GiB can be had: "
                    'pass method="whitened" for about half of it, or include= some layers at a time'
                )
    kept.tokens = max((moment.tokens for moment in kept.inputs.values()), default=0)
    kept.check(sites, gradients=False)
    return kept


def padding_mask(batch: Any) -> Tensor | None:
    """Return the batch's 2-D attention mask [sequences, tokens] as booleans, if it has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def main_output(result: Any) -> tuple[Tensor, bool]:
    """Return (tensor, whether it is logits) of what a model returned."""
    for name, is_logits in (("logits", True), ("last_hidden_state", False)):
        output = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(output, Tensor):
            return output, is_logits
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if isinstance(first, Tensor):
        return first, False
    raise ModelError(
        f"the model returned a {type(result).__name__} without logits or last_hidden_state; wrap "
        "it in a module that returns the tensor whose change matters, and pass that"
    )


def rows_of(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return [tokens, size] without padding."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    if mask is not None and mask.numel() == rows.shape[0]:
        rows = rows[mask.flatten().to(rows.device)]
    return rows


def sensitivity_loss(result: Any, batch: Any, generator: torch.Generator) -> Tensor:
    """Return a scalar whose gradients have the Fisher or Gauss-Newton matrix as second moment."""
    output, is_logits = main_output(result)
    rows = rows_of(output, padding_mask(batch)).float()
    if not is_logits:
        signs = torch.randint(0, 2, rows.shape, generator=generator).to(rows) * 2 - 1
        return (rows * signs).sum()
    chances = rows.detach().softmax(-1).cpu()
    labels = torch.multinomial(chances, 1, generator=generator).squeeze(1).to(rows.device)
    return nn.functional.cross_entropy(rows, labels, reduction="sum")


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Set eval mode and no parameter gradients inside the block; restore both after it."""
    modes = {module: module.training for module in model.modules()}
    wants = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.eval()
        model.requires_grad_(False)
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter, wanted in wants.items():
            parameter.requires_grad_(wanted)


def available_bytes() -> int | None:
    """Return the bytes of memory that processes can still get here; None where that is unknown."""
    limits = []
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if match:
            limits.append(int(match[1]) << 10)
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        if most.strip() != "max":
            limits.append(int(most) - int(used))
    except (OSError, ValueError):
        pass  # not Linux, or no limit for this group
    return min(limits, default=None)
