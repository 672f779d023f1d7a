"""Small models and data for the tests of compress/."""

import contextlib
import copy
import re
import resource
import signal

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        x = x + self.q(x) * torch.sigmoid(self.k(x))
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """A small residual network [.., width] -> [.., width] with `layers.N.{q,k,up,down}`."""

    def __init__(self, width=32, inner=64, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stack(seed=0, **sizes):
    torch.manual_seed(seed)
    return Stack(**sizes).eval()


def tokens(count=4, length=40, width=32, seed=1):
    """Batches of tokens with a decaying spectrum, which is the same for any seed."""
    scale = torch.logspace(0, -2, width)
    generator = torch.Generator().manual_seed(0)
    mix = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    generator.manual_seed(seed)
    return [torch.randn(2, length, width, generator=generator) * scale @ mix for _ in range(count)]


def check_reasons(skipped, *wanted):
    """Assert that these layers were left alone for reasons that match: (name, expression)."""
    reasons = {skip.name: skip.reason for skip in skipped}
    for name, words in wanted:
        assert re.search(words, reasons[name]), (name, reasons[name])


@contextlib.contextmanager
def unchanged(model):
    """Assert that a block leaves every tensor of a model as it was."""
    before = copy.deepcopy(model.state_dict())
    yield
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@contextlib.contextmanager
def full_disk():
    """Writes past 8 KiB in any one file fail with EFBIG, as a full disk does with ENOSPC."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
