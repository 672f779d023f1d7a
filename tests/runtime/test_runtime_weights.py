"""Transposed copies of weights: every way a weight changes is seen at the next use."""

import pytest
import torch
from torch import nn

from nmm_compiler.runtime.weights import Packs


@pytest.fixture
def packs():
    return Packs()


def check(packs, w):
    got = packs.transposed(w)
    assert got.is_contiguous()
    assert not got.requires_grad
    assert torch.equal(got, w.detach().t())
    return got


def test_an_unchanged_weight_is_copied_once(packs):
    w = nn.Linear(8, 4).weight
    first = check(packs, w)
    assert all(check(packs, w) is first for _ in range(3))
    assert packs.made == 1


def step(layer, **more):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **more)
    layer(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()


def set_data(layer, value):
    layer.weight.data = value


def replaced(layer):
    layer.weight = nn.Parameter(torch.randn(4, 8))


STATE = {"weight": torch.randn(4, 8), "bias": torch.zeros(4)}
CHANGES = {
    "in place": torch.no_grad()(lambda layer: layer.weight.mul_(2)),
    "through data": lambda layer: layer.weight.data.add_(1),
    "through NumPy": lambda layer: layer.weight.detach().numpy().fill(42),
    # Keeps every sum and every xor of the values.
    "swapped rows": lambda layer: layer.weight.data.copy_(layer.weight.detach().flip(0).clone()),
    "one bit": lambda layer: layer.weight.data.view(torch.int32)[0, :1].bitwise_xor_(1),
    "load_state_dict": lambda layer: layer.load_state_dict(STATE),
    "replaced": replaced,
    "cast": lambda layer: layer.to(torch.bfloat16),
    "cast and back": lambda layer: layer.to(torch.bfloat16).to(torch.float32),
    "optimizer": step,
    "fused optimizer": lambda layer: step(layer, fused=True),
    "set data": lambda layer: set_data(layer, torch.randn(4, 8)),
    "transposed storage": lambda layer: set_data(layer, torch.randn(8, 4).t()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_use(packs, change):
    layer = nn.Linear(8, 4)
    before = check(packs, layer.weight).clone()
    CHANGES[change](layer)
    after = check(packs, layer.weight)
    assert before.dtype != after.dtype or not torch.equal(before, after)


def test_tied_weights_share_a_copy_and_see_each_other(packs):
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    second.weight = first.weight
    assert check(packs, first.weight) is check(packs, second.weight)
    CHANGES["in place"](first)
    check(packs, second.weight)
    assert packs.made == 2


def test_a_reused_address_is_not_mistaken_for_the_old_weight(packs):
    """Freed memory often comes back at the same address, with version 0 and the same shape."""
    addresses = set()
    for value in range(20):
        w = torch.full((64, 32), float(value))
        addresses.add(w.data_ptr())
        check(packs, w)
        del w
    assert len(addresses) < 20, "the allocator never reused an address: this shows nothing"
    assert len(packs) == 1  # dead origins are dropped


def test_nan_and_signed_zero_are_compared_by_their_bits(packs):
    w = torch.full((4, 8), float("nan"))
    packs.transposed(w)
    packs.transposed(w)
    assert packs.made == 1
    zero = torch.zeros(4, 8)
    packs.transposed(zero)
    zero.data.neg_()
    assert torch.signbit(packs.transposed(zero)).all()


def test_a_weight_that_is_already_stored_that_way_is_not_copied(packs):
    w = torch.randn(8, 4).t()
    assert packs.transposed(w).data_ptr() == w.data_ptr()
    assert packs.made == 0


def test_freeze_skips_the_proof_but_not_a_replaced_weight(packs):
    layer = nn.Linear(8, 4)
    before = packs.transposed(layer.weight, freeze=True)
    CHANGES["through data"](layer)
    assert packs.transposed(layer.weight, freeze=True) is before  # the caller's promise, broken
    replaced(layer)
    assert torch.equal(packs.transposed(layer.weight, freeze=True), layer.weight.detach().t())


def test_capacity_drops_the_least_recently_used(packs):
    packs.capacity = 2
    weights = [torch.randn(4, 8) for _ in range(3)]
    for w in (weights[0], weights[1], weights[0], weights[2], weights[0]):
        check(packs, w)
    assert packs.made == 3
    check(packs, weights[1])
    assert packs.made == 4
