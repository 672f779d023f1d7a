"""Name patterns and which layers are found."""

import pytest
import torch
from compress_models import stack
from torch import nn

from nmm_compiler.compress.select import find_sites, matches
from nmm_compiler.errors import NoMatchingModulesError


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.0.mlp.up_proj", "mlp", True),
        ("model.layers.0.mlp.up_proj", "up_proj", True),
        ("model.layers.0.mlp.up_proj", "up", False),
        ("model.layers.0.mlp.up_proj", "layers.0", True),
        ("model.layers.10.mlp.up_proj", "layers.1", False),
        ("model.layers.10.mlp.up_proj", "layers.*.mlp", True),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp.up_proj", "*_proj", True),
        ("model.layers.0.mlp.up_proj", r"re:.*\.(up|gate)_proj", True),
        ("model.layers.0.mlp.up_proj", r"re:mlp", False),
        ("model.layers.0.mlp.up_proj", "MLP", False),
    ],
)
def test_patterns(name, pattern, expected):
    assert matches(name, pattern) is expected


def test_include_exclude_and_filter_narrow_down():
    model = stack()
    names = lambda **how: [s.name for s in find_sites(model, **how)[0]]  # noqa: E731
    assert len(names()) == 8
    assert names(include="layers.1", exclude=["up", "down"]) == ["layers.1.q", "layers.1.k"]
    assert names(filter_fn=lambda m, n: m.out_features == 64) == ["layers.0.up", "layers.1.up"]
    with pytest.raises(NoMatchingModulesError, match=r"'dwn'.*did you mean"):
        find_sites(nn.Sequential(nn.ModuleDict({"down": nn.Linear(4, 4)})), include="dwn")


def test_the_output_head_needs_to_be_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 30)

        def get_output_embeddings(self):
            return self.head

    sites, skipped = find_sites(Model())
    assert [s.name for s in sites] == ["body"]
    assert "output head" in skipped[0].reason
    assert [s.name for s in find_sites(Model(), include="head")[0]] == ["head"]


def test_sites_see_the_weight_as_n_by_k():
    (site,), _ = find_sites(nn.Sequential(nn.Linear(3, 5)))
    assert (site.k, site.n, tuple(site.weight.shape)) == (3, 5, (5, 3))
    assert site.weight.data_ptr() == site.module.weight.data_ptr()
    assert not site.weight.requires_grad
    wrong = nn.Sequential(nn.Linear(3, 5))
    wrong[0].weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(NoMatchingModulesError, match=r"torch\.int8"):
        find_sites(wrong)
