"""Transposed copies of weights: every way a weight changes is seen at the next use.

On a device their bits cannot be compared: the storage and the version must tell.
"""

import numpy as np
import pytest
import torch
from torch import nn

from nmm_compiler.runtime import weights


@pytest.fixture
def packs():
    return weights.Packs()


def values(w):
    return w.detach().as_subclass(torch.Tensor)


def check(packs, w):
    got = packs.transposed(w)
    assert got.is_contiguous()
    assert not got.requires_grad
    assert got.dtype == w.dtype
    assert torch.equal(values(got), values(w).t())
    return got


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
    before = check(packs, layer.weight)
    assert check(packs, layer.weight) is before  # an unchanged weight is copied once
    before = before.clone()
    CHANGES[change](layer)
    after = check(packs, layer.weight)
    assert before.dtype != after.dtype or not torch.equal(before, after)


def test_a_reused_address_is_not_mistaken_for_the_old_weight(packs):
    """Freed memory often comes back at the same address, with version 0 and the same shape."""
    addresses = set()
    for value in range(20):
        w = torch.full((64, 32), float(value))
        addresses.add(w.data_ptr())
        check(packs, w)
        del w
    assert len(addresses) < 20, "the allocator never reused an address: this shows nothing"
    assert len(packs) == 0  # dead origins are dropped


def test_nan_and_signed_zero_are_compared_by_their_bits(packs):
    nan, zero = torch.full((4, 8), float("nan")), torch.zeros(4, 8)
    assert packs.transposed(nan) is packs.transposed(nan)
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


def test_copies_live_as_long_as_their_weights(packs):
    weights = [torch.randn(4, 8) for _ in range(2000)]  # as many as a large model has factors
    for w in (*weights, *weights):
        check(packs, w)
    assert packs.made == len(packs) == 2000
    del w, weights[:]
    assert len(packs) == 0


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on an accelerator, so that nobody compares its bits."""

    kind = "privateuseone"

    @property
    def device(self):
        return torch.device(self.kind)


class OnXla(OnDevice):
    kind = "xla"


def on_device(w, kind=OnDevice):
    return w.as_subclass(kind)


@pytest.fixture
def device_packs(monkeypatch):
    """Copies that take the stand-in for a plain tensor of another device."""
    monkeypatch.setattr(weights, "Tensor", OnDevice)
    return weights.Packs()


def test_the_stand_in_hides_the_bits(device_packs):
    """Without this, nothing below would show what the storage and the version guard."""
    w = on_device(torch.randn(4, 8))
    before = check(device_packs, w)
    values(w).data.add_(1)
    assert device_packs.transposed(w) is before  # documented: such a write needs clear()
    device_packs.clear()
    check(device_packs, w)
    assert device_packs.made == 2


def test_a_write_in_place_or_to_a_view_is_seen_by_its_version(device_packs):
    both = torch.randn(8, 8)
    w = on_device(both[:4])
    assert check(device_packs, w) is check(device_packs, w)
    for written in (values(w), both[:1], both):
        written.mul_(2)
        check(device_packs, w)
    assert device_packs.made == 4


def test_a_new_weight_at_a_reused_address_is_not_the_old_one(device_packs):
    """Two storages over one buffer stand for a freed weight and one allocated in its place."""
    buffer = np.zeros((64, 32), np.float32)
    old, new = torch.from_numpy(buffer), torch.from_numpy(buffer)
    assert old.data_ptr() == new.data_ptr()
    check(device_packs, on_device(old))
    buffer[:] = 1.0
    assert old._version == new._version == 0
    check(device_packs, on_device(new))


def test_views_of_one_storage_are_kept_apart_by_offset_shape_strides_and_dtype(device_packs):
    base = torch.randn(8, 8)
    views = [
        base[:4, :4],
        base[4:, :4],  # another offset
        base[:4, :2],  # another shape
        base.as_strided((4, 4), (16, 1)),  # other strides
        base.view(torch.int32)[:4, :4],  # another dtype
    ]
    for _ in range(2):
        for view in views:
            check(device_packs, on_device(view))
    assert device_packs.made == len(views)


class Wrapped(OnDevice):
    """A subclass that nothing is known of."""


@pytest.mark.parametrize("kind", [OnXla, Wrapped])
def test_a_lazy_tensor_and_a_subclass_are_copied_at_each_call(device_packs, kind, monkeypatch):
    """Neither has a storage of its own whose address and version say anything; nor has meta."""
    w = on_device(torch.randn(4, 8), kind)
    assert device_packs.transposed(w) is not device_packs.transposed(w)
    assert (device_packs.made, len(device_packs)) == (0, 0)
    monkeypatch.setattr(weights, "Tensor", OnXla)
    assert not weights.has_own_memory(w)
    monkeypatch.undo()
    assert not weights.has_own_memory(torch.empty(4, 8, device="meta"))


def test_a_weight_made_in_inference_mode_has_no_version(device_packs):
    with torch.inference_mode():
        w = on_device(torch.randn(4, 8))
    assert check(device_packs, w) is check(device_packs, w)
