"""Tokens that are cut into windows before a chain: one axis is cut at several places at once."""

import pytest
import torch
from torch import nn

import nmm_compiler as nmm


class Windows(nn.Module):
    """A chain on the windows of a picture, as Swin and CLAP partition it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.a = nn.Linear(16, 4, bias=False)
        self.b = nn.Linear(4, 16)

    def forward(self, x):
        side, w = 8, self.window
        x = x.view(-1, side // w, w, side // w, w, 16).transpose(2, 3).contiguous()
        return self.b(self.a(x.view(-1, w * w, 16)))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("window", [2, 4])
def test_windows_fuse_at_any_batch(batch, window):
    x = torch.randn(batch, 64, 16)
    options = {"strict": True}
    result = nmm.rewrite(Windows(window).eval(), (x,), options=options, verify=True)
    assert len(result.rewritten) == 1
