"""The blocks of a model and their recorded inputs, for calibration one block at a time.

A model is mostly a list of equal blocks. One pass over the data records, per batch, the arguments
of every block and the gradient at its output. With these, a block can run again by itself: its
layers' moments are those of a pass of the whole model (`calibrate.collect`), and no moments of
other blocks are in memory. That bounds the memory, and makes sequential calibration linear in
depth.

`find_blocks` finds the layers of each block, `trace` records the passages through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress.select import Site
from nmm_compiler.errors import NotInBlocksError


@dataclass(frozen=True)
class Block:
    """A block by its dotted name, and the sites in it."""

    name: str
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Passage:
    """One batch at one block: the arguments of the block's call, detached.

    hidden: the first tensor of its arguments, [.., width]; at `key`, a position or a keyword.
    mask: the padding of the batch, as `calibrate.padding_mask` gives it.
    gradient: of the loss, at the block's output, or None.
    original: the same passage in the original model, where `hidden` is of a compressed one.
    """

    hidden: torch.Tensor
    key: int | str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    mask: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    original: Passage | None = None

    def run(self, block: nn.Module) -> torch.Tensor:
        """Run the block and return its first tensor."""
        arguments, keywords = list(self.arguments), dict(self.keywords)
        if isinstance(self.key, int):
            arguments[self.key] = self.hidden
        else:
            keywords[self.key] = self.hidden
        found = first_tensor(block(*arguments, **keywords))
        assert found is not None
        return found


def first_tensor(result: Any) -> torch.Tensor | None:
    """Return the tensor of a block's result that the next block reads."""
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    return result if isinstance(result, torch.Tensor) else None


def find_blocks(model: nn.Module, sites: Sequence[Site]) -> tuple[list[Block], tuple[Site, ...]]:
    """Return (blocks in the order of the model, sites that are in none).

    Blocks are the members of the outermost lists (`nn.ModuleList`, `nn.Sequential`) in which two or
    more members hold sites. A module that is shared by two blocks is in none.
    """
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == one or name.startswith(_prefix(one)) for one in lists)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        held = {_member(name, n) for site in sites for n in site.names} - {None}
        if len(held) >= 2:
            lists.append(name)
    found: dict[str, list[Site]] = {}
    rest = []
    for site in sites:
        homes = {next((m for one in lists if (m := _member(one, n))), None) for n in site.names}
        home = homes.pop()
        if home is None or homes:
            rest.append(site)
        else:
            found.setdefault(home, []).append(site)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    names = sorted(found, key=lambda name: order[name])
    return [Block(name, tuple(found[name])) for name in names], tuple(rest)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _member(container: str, name: str) -> str | None:
    """Return the member of a list that a dotted name lies in, or None."""
    prefix = _prefix(container)
    if not name.startswith(prefix) or name == container:
        return None
    return prefix + name[len(prefix) :].split(".")[0]


class Tracer:
    """Records the passages of each batch; `chained`: each block's input is the output of the
    last."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], gradients: bool) -> None:
        self.model, self.blocks, self.gradients = model, blocks, gradients
        self.passages: dict[str, list[Passage]] = {block.name: [] for block in blocks}
        self.chained = True
        self._mask: torch.Tensor | None = None
        self._batch: dict[str, Passage] = {}
        self._output: torch.Tensor | None = None

    @contextmanager
    def batch(self, mask: torch.Tensor | None) -> Iterator[None]:
        """Record while one batch runs."""
        self._mask, self._batch, self._output = mask, {}, None
        with ExitStack() as stack:
            stack.enter_context(_no_cache(self.model))
            for block in self.blocks:
                module = self.model.get_submodule(block.name)
                before = module.register_forward_pre_hook(self._before(block), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(self._after(block)).remove)
            yield
        lacking = [block.name for block in self.blocks if block.name not in self._batch]
        if lacking:
            raise NotInBlocksError(f"{lacking[0]} was not called")
        for name, passage in self._batch.items():
            self.passages[name].append(passage)

    def bytes(self) -> int:
        """Return the bytes of the passages so far: hidden states and gradients."""
        tensors = [(p.hidden, p.gradient) for kept in self.passages.values() for p in kept]
        return sum(t.numel() * t.element_size() for pair in tensors for t in pair if t is not None)

    def _before(self, block: Block) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if block.name in self._batch:
                raise NotInBlocksError(f"{block.name} was called twice")
            places: list[tuple[int | str, Any]] = [*enumerate(arguments), *keywords.items()]
            key = next((k for k, v in places if isinstance(v, torch.Tensor)), None)
            if key is None:
                raise NotInBlocksError(f"{block.name} was called without a tensor")
            hidden = dict(places)[key]
            first = block.name == self.blocks[0].name
            self.chained &= first or hidden is self._output
            self._batch[block.name] = Passage(
                hidden.detach(), key, _detached(arguments), _detached(keywords), self._mask
            )
            if not self.gradients or hidden.requires_grad or not hidden.is_floating_point():
                return None
            wanted = hidden.detach().requires_grad_()  # the autograd graph begins here
            if isinstance(key, int):
                return (*arguments[:key], wanted, *arguments[key + 1 :]), keywords
            return arguments, {**keywords, str(key): wanted}

        return hook

    def _after(self, block: Block) -> Any:
        def hook(module: nn.Module, arguments: Any, result: Any) -> None:
            self._output = first_tensor(result)
            if self._output is None:
                raise NotInBlocksError(f"{block.name} returned no tensor")
            if self._output.requires_grad:
                self._output.register_hook(lambda gradient: self._take(block.name, gradient))

        return hook

    def _take(self, name: str, gradient: torch.Tensor) -> None:
        self._batch[name] = replace(self._batch[name], gradient=gradient.detach())


def _detached(value: Any) -> Any:
    """Return nested arguments with every tensor detached."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return value


@contextmanager
def _no_cache(model: nn.Module) -> Iterator[None]:
    """Keep transformers models from filling a key-value cache, which a second run would extend."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    known = [(c, c.use_cache) for c in configs.values() if hasattr(c, "use_cache")]
    try:
        for config, _ in known:
            config.use_cache = False
        yield
    finally:
        for config, wanted in known:
            config.use_cache = wanted
