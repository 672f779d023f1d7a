"""Copies of weights where their bits cannot be compared: the storage and the version must tell."""

import numpy as np
import pytest
import torch

from nmm_compiler.runtime import weights


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
def packs(monkeypatch):
    """Copies that take the stand-in for a plain tensor of another device."""
    monkeypatch.setattr(weights, "Tensor", OnDevice)
    return weights.Packs()


def values(w):
    return w.as_subclass(torch.Tensor)


def check(packs, w):
    got = packs.transposed(w)
    assert got.dtype == w.dtype
    assert torch.equal(values(got), values(w).t())
    return got


def test_the_stand_in_hides_the_bits(packs):
    """Without this, nothing below would show what the storage and the version guard."""
    w = on_device(torch.randn(4, 8))
    before = check(packs, w)
    values(w).data.add_(1)
    assert packs.transposed(w) is before  # documented: such a write needs clear()
    packs.clear()
    check(packs, w)
    assert packs.made == 2


def test_a_write_in_place_is_seen_by_its_version(packs):
    w = on_device(torch.randn(4, 8))
    first = check(packs, w)
    assert check(packs, w) is first
    for _ in range(3):
        values(w).mul_(2)
        check(packs, w)
    assert packs.made == 4


def test_a_write_to_any_view_is_seen(packs):
    both = torch.randn(8, 8)
    upper = on_device(both[:4])
    check(packs, upper)
    both[0, 0] = 7.0
    check(packs, upper)


def test_a_new_weight_at_a_reused_address_is_not_the_old_one(packs):
    """Two storages over one buffer stand for a freed weight and one allocated in its place."""
    buffer = np.zeros((64, 32), np.float32)
    old, new = torch.from_numpy(buffer), torch.from_numpy(buffer)
    assert old.data_ptr() == new.data_ptr()
    check(packs, on_device(old))
    buffer[:] = 1.0
    assert old._version == new._version == 0
    check(packs, on_device(new))


def test_views_of_one_storage_are_kept_apart_by_offset_shape_strides_and_dtype(packs):
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
            check(packs, on_device(view))
    assert packs.made == len(views)


def test_a_lazy_tensor_and_a_subclass_are_copied_at_each_call(packs):
    """Neither has a storage of its own whose address and version say anything."""
    weights_without = [on_device(torch.randn(4, 8), OnXla), torch.randn(4, 8).as_subclass(Wrapped)]
    for w in weights_without:
        assert packs.transposed(w) is not packs.transposed(w)
    assert (packs.made, len(packs)) == (0, 0)


class Wrapped(OnDevice):
    pass


def test_lazy_and_meta_tensors_have_no_memory_of_their_own(monkeypatch):
    assert weights.has_own_memory(torch.empty(4, 8))
    assert not weights.has_own_memory(torch.empty(4, 8, device="meta"))
    monkeypatch.setattr(weights, "Tensor", OnXla)
    assert not weights.has_own_memory(on_device(torch.randn(4, 8), OnXla))


def test_a_weight_made_in_inference_mode_has_no_version(packs):
    with torch.inference_mode():
        w = on_device(torch.randn(4, 8))
    assert check(packs, w) is check(packs, w)
