"""Tokens that are cut into windows before a chain: one axis is cut at several places at once."""

import pytest
import torch
from models import Model, Pair

import nmm_compiler as nmm


def windows(window):
    """Return a chain on the windows of a picture, as Swin and CLAP partition it."""

    def function(p, x):
        side, w = 8, window
        x = x.view(-1, side // w, w, side // w, w, 16).transpose(2, 3).contiguous()
        return p.pair(x.view(-1, w * w, 16))

    return Model(function, pair=Pair(16, 4, 16))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("window", [2, 4])
def test_windows_fuse_at_any_batch(batch, window):
    x = torch.randn(batch, 64, 16)
    options = {"strict": True}
    result = nmm.rewrite(windows(window).eval(), (x,), options=options, verify=True)
    assert len(result.rewritten) == 1
