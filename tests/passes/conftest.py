"""Each test starts with the tables of Dynamo empty, and with the same random numbers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_torch():
    torch._dynamo.reset()
    torch.manual_seed(0)
