"""Name patterns and which layers are found."""

import pytest
import torch
from compress_models import check_reasons, stack
from torch import nn
from toy_models import Model

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.select import find_sites, matches

ToyRouter = type("ToyRouter", (Model,), {})


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


def test_include_and_exclude_narrow_down():
    model = stack()
    names = lambda **how: [s.name for s in find_sites(model, **how)[0]]  # noqa: E731
    assert len(names()) == 8
    assert names(include="layers.1", exclude=["up", "down"]) == ["layers.1.q", "layers.1.k"]
    with pytest.raises(ModelError, match=r"'dwn'.*did you mean"):
        find_sites(nn.Sequential(nn.ModuleDict({"down": nn.Linear(4, 4)})), include="dwn")


def test_the_output_head_needs_to_be_named():
    model = Model(None, body=nn.Linear(8, 8), head=nn.Linear(8, 30))
    model.get_output_embeddings = lambda: model.head
    sites, skipped = find_sites(model)
    assert [s.name for s in sites] == ["body"]
    assert "output head" in skipped[0].reason
    assert [s.name for s in find_sites(model, include="head")[0]] == ["head"]


def test_weights_of_whole_numbers_are_refused():
    wrong = nn.Sequential(nn.Linear(3, 5))
    wrong[0].weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"torch\.int8"):
        find_sites(wrong)


FORWARDS = {
    "Reordered": lambda m, x: x @ m.weight.T + m.bias,
    "Scaled": lambda m, x: 1.001 * nn.Linear.forward(m, x),
    "Noisy": lambda m, x: nn.functional.dropout(nn.Linear.forward(m, x), 0.5, m.training),
    "Routed": lambda m, x: nn.Linear.forward(m, x).topk(2),
    "Asking": lambda m, x, gate: nn.Linear.forward(m, x) * gate,
}
SUBCLASSES = {
    name: type(name, (nn.Linear,), {"forward": forward}) for name, forward in FORWARDS.items()
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subclasses_that_are_linear_are_taken_and_others_named(dtype):
    torch.manual_seed(0)
    kinds = {name: kind(96, 64, bias=name != "Asking") for name, kind in SUBCLASSES.items()}
    model = nn.ModuleDict(kinds).to(dtype).eval()
    sites, skipped = find_sites(model)
    assert [site.name for site in sites] == ["Reordered"]
    check_reasons(
        skipped, ("Noisy", r"x W\^T \+ b"), ("Routed", r"x W\^T"), ("Asking", "TypeError"),
        ("Scaled", r"subclass of nn\.Linear \(Scaled\)"),
    )  # fmt: skip
    assert not any(module.training for module in model.modules())
    with torch.device("meta"):
        _, skipped = find_sites(nn.ModuleList([SUBCLASSES["Reordered"](8, 8), nn.Linear(8, 8)]))
    assert "meta tensor" in skipped[0].reason


def test_weights_that_are_not_plain_tensors_are_named():
    class Wrapped(torch.Tensor):
        pass

    names = ("a", "b", "c", "d", "e", "eight", "fine")
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in names})
    torch.nn.utils.parametrizations.weight_norm(model["a"])
    torch.nn.utils.weight_norm(model["b"])
    model["c"].weight = nn.Parameter(torch.zeros(32, 32).as_subclass(Wrapped))
    model["d"].forward = lambda x: x
    model["e"] = nn.LazyLinear(8)
    eight = torch.zeros(32, 32, dtype=torch.float8_e4m3fn)
    model["eight"].weight = nn.Parameter(eight, requires_grad=False)
    model["router"] = ToyRouter(None, weight=torch.zeros(4, 32))
    sites, skipped = find_sites(model)
    assert [site.name for site in sites] == ["fine"]
    check_reasons(
        skipped, ("a", "its weight is parametrized"), ("b", "not a plain tensor|hooks"),
        ("c", "Wrapped"), ("d", "a forward of its own"), ("e", "no weight yet"),
        ("eight", "float8_e4m3fn.*load it as bfloat16"),
        ("router", "ToyRouter multiplies by a weight of its own"),
    )  # fmt: skip
