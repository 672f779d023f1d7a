"""What only a Neuron device can show: `make test-device` runs it, elsewhere it is skipped."""

import numpy as np
import pytest
import torch
from torch import nn

from nmm_compiler.device import ladder
from nmm_compiler.kernels.base import numpy_dtype
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.runtime import machine, neuron

FOUND = machine.probe()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not FOUND.devices or bool(FOUND.problem),
        reason=f"no usable Neuron device: {FOUND.problem or 'no /dev/neuron*'}",
    ),
]


def test_every_rung_passes_on_the_device():
    found = ladder.climb()
    assert found.passed, str(found)


def agrees(got, x, model):
    """Return whether results are within the error bound of the product in float64."""
    first, second = model
    arrays = [
        t.detach().to("cpu").float().numpy().astype(numpy_dtype("bfloat16"))
        for t in (x, first.weight, second.weight, second.bias)
    ]
    spec = LowRankSpec(m=256, k=512, r=128, n=1024, u_layout="col", v_layout="col", bias=True)
    distance = np.abs(got.detach().to("cpu").double().numpy() - spec.reference(*arrays))
    return bool((distance <= spec.error_bound(*arrays)).all())


def test_a_low_rank_model_runs_its_kernels_and_agrees_with_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 128, bias=False), nn.Linear(128, 1024)).bfloat16().eval()
    x = torch.randn(256, 512).bfloat16()
    device = neuron.device()
    compiled = torch.compile(
        model.to(device), backend="nmm", dynamic=False,
        options={"target": FOUND.target, "executor": "neuron", "strict": True},
    )  # fmt: skip
    with torch.no_grad():
        assert agrees(compiled(x.to(device)), x, model)
