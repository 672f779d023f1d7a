"""The models of the kernel benchmarks, by the sizes of their public configurations."""

from __future__ import annotations

from typing import NamedTuple

RATIO = 0.2


class Sizes(NamedTuple):
    """Features of the hidden state, of the MLP, of all queries, and of all keys."""

    hidden: int
    intermediate: int
    queries: int
    keys: int

    def mlp(self, part: str) -> tuple[int, int]:
        """Return the inputs and outputs of "down", or of "up" and every other part."""
        both = (self.hidden, self.intermediate)
        return both if part != "down" else (both[1], both[0])


MODELS = {
    "Llama-3.2-1B": Sizes(2048, 8192, 2048, 512),
    "Llama-3.2-3B": Sizes(3072, 8192, 3072, 1024),
    "Llama-3.1-8B": Sizes(4096, 14336, 4096, 1024),
    "Qwen3-1.7B": Sizes(2048, 6144, 2048, 1024),
    "Qwen3-4B": Sizes(2560, 9728, 4096, 1024),
    "Qwen3-8B": Sizes(4096, 12288, 4096, 1024),
}


def rank(k: int, n: int) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, to the nearest tile of 128."""
    return 128 * round(k * n * (1 - RATIO) / ((k + n) * 128))
