"""Experts as transformers spells them become one call that equals the eager model."""

import pytest
import torch
from models import compiled, explained
from torch.nn.functional import silu
from toy_models import experts_model

import nmm_compiler as nmm
from nmm_compiler.prices.kernel import PRICES

transformers = pytest.importorskip("transformers")
MODELS = ("Qwen3Moe", "GptOss", "Mixtral", "DeepseekV3")
IDS = torch.tensor([[1, 7, 3, 9, 2]])


def tiny(name, way):
    model = experts_model(name, hidden_size=64, num_hidden_layers=1, first_k_dense_replace=0)
    model.config._experts_implementation = way
    return model


def layer_of(name, way):
    """Return the layer of experts of a tiny model, which is traced faster, and an input of it."""
    return tiny(name, way).model.layers[0].mlp, torch.randn(1, 5, 64)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_experts_in_batches_become_one_call(name):
    layer, x = layer_of(name, "batched_mm")
    wanted = layer(x)
    assert explained(layer, x)[0] == ["experts"]
    torch.testing.assert_close(compiled(layer)(x), wanted)


@torch.no_grad()
def test_a_compiled_decode_step_runs_the_kernel_in_the_simulator():
    model = tiny("GptOss", "grouped_mm")
    wanted = model(IDS[:, :2], use_cache=False).logits
    made = compiled(model, executor="simulator")(IDS[:, :2], use_cache=False).logits
    torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-4)


class Experts(torch.nn.Module):
    """One mixture in the batched form, with a function between the products.

    What tests change: the rows, h before the function, the picks of the last product, the sum.
    """

    def __init__(
        self, function, rows=lambda p, rows: rows, hidden=lambda p, h, picks: h,
        last=lambda p, index, picks: picks, total=lambda p, y: y.sum(1),
    ):  # fmt: skip
        super().__init__()
        self.function, self.steps = function, (rows, hidden, last, total)
        self.up = torch.nn.Parameter(torch.randn(4, 32, 48) / 6)
        self.down = torch.nn.Parameter(torch.randn(4, 24, 32) / 6)

    def forward(self, x, index, gates):
        take, hidden, last, total = self.steps
        picks = index.reshape(-1)
        rows = take(self, x.repeat_interleave(2, dim=0))
        h = hidden(self, torch.bmm(rows.unsqueeze(1), self.up[picks]).squeeze(1), picks)
        down = self.down[last(self, index, picks)]
        y = torch.bmm(self.function(h).unsqueeze(1), down).squeeze(1)
        return total(self, (y * gates.reshape(-1).unsqueeze(-1)).view(3, 2, 32))


def picks():
    return torch.randn(3, 32), torch.tensor([[0, 1], [3, 2], [1, 3]]), torch.rand(3, 2)


def of_halves(function):
    """Return a function of (gate, up) as one of their joined halves."""
    return lambda h: function(*h.chunk(2, -1))


silu_of_first = of_halves(lambda gate, up: silu(gate) * up)


def results_and_gradients(model, *args):
    """Return what the compiled model and the model return, each with the gradients of its loss."""
    leaves, found = [*model.parameters(), *(one for one in args if one.requires_grad)], []
    for call in (compiled(model), model):
        y = call(*args)
        parts = y if isinstance(y, tuple) else (y,)
        loss = parts[0].square().sum() + sum(part.sum() for part in parts[1:])
        found.append([parts[0].detach(), *torch.autograd.grad(loss, leaves)])
    return found


LOOK_ALIKES = {
    "written product": of_halves(lambda gate, up: silu(gate).mul_(2) * up),
    "written input": lambda h: silu_of_first(h.mul_(3)),
    "written result": lambda h: silu_of_first(h).add_(1),
    "clamped up": of_halves(lambda gate, up: silu(gate) * up.clamp(-20.0, 20.0)),
    "clamped product": lambda h: silu_of_first(h).clamp(-300, 300),
    "zero above": of_halves(
        lambda gate, up: torch.where(gate > 15, torch.zeros_like(gate), silu(gate)) * up
    ),
    "nearly": lambda h: silu_of_first(h) * 1.0001,
    "without nan": lambda h: torch.nan_to_num(silu_of_first(h)),
    "quick gelu": of_halves(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up),
}


@pytest.mark.parametrize("function", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
@torch.no_grad()
def test_a_function_that_only_looks_like_a_gated_product_stays(function):
    """Values far from zero and writes in place tell them apart."""
    model, args = Experts(function), picks()
    args = (60 * args[0], *args[1:])
    torch.testing.assert_close(compiled(model)(*args), model(*args), rtol=0.0, atol=0.0)


@torch.no_grad()
def test_a_clamp_of_large_numbers_is_kept():
    clamps = of_halves(lambda gate, up: silu(gate.clamp(max=20.0)) * up.clamp(-20.0, 20.0))
    model, args = Experts(clamps), picks()
    args = (60 * args[0], *args[1:])
    assert explained(model, picks())[0] == ["experts"]
    wanted = model(*args)
    rounding = (32 + 24) * torch.finfo(torch.float32).eps  # of both sums
    torch.testing.assert_close(
        compiled(model)(*args), wanted, rtol=0.0, atol=rounding * float(wanted.abs().max())
    )


@pytest.mark.parametrize("bias", [lambda b, picks: b[0], lambda b, picks: b[picks]])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("alpha", [1, 2])
@torch.no_grad()
def test_biases_and_sums_are_read_whole(bias, keepdim, alpha):
    model = Experts(
        silu_of_first,
        hidden=lambda p, h, picks: torch.add(h, bias(p.bias, picks), alpha=alpha),
        total=lambda p, y: y.sum(1, keepdim=keepdim),
    )
    model.bias = torch.nn.Parameter(torch.randn(4, 48))
    x, index, gates = picks()
    for numbers in (index, index - 4):  # negative numbers count from the end
        got, wanted = (call(x, numbers, gates) for call in (compiled(model), model))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama_4_multiplies_all_tokens_with_the_experts_that_they_chose(top_k):
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=48, num_local_experts=4, num_experts_per_tok=top_k
    )
    layer, x = Llama4TextMoe(config).eval(), torch.randn(2, 5, 64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (match,) = [m for m in nmm.explain(layer, x).matches if m.rule == "experts"]
    assert (match.info["m"], match.info["top_k"]) == (10 * top_k, 1)
    torch.testing.assert_close(*results_and_gradients(layer, x), rtol=1e-4, atol=1e-4)


def clamped(both):
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class AllExperts(torch.nn.Module):
    """gpt-oss's experts as one product of all tokens with all of them."""

    def __init__(self, fill=0.0, chosen=True):
        super().__init__()
        self.fill, self.chosen = fill, chosen
        shapes = {"up": (4, 32, 48), "up_bias": (4, 48), "down": (4, 24, 32), "down_bias": (4, 32)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / 6))

    def forward(self, x, logits):
        top, index = logits.topk(2, -1)
        index = index if self.chosen else logits.long().abs()[:, :2] % 4
        scores = torch.full_like(logits, self.fill).scatter_(1, index, top.softmax(-1))
        rows = x.repeat(4, 1).view(4, -1, 32)
        h = torch.bmm(rows, self.up) + self.up_bias[..., None, :]
        y = torch.bmm(clamped(h), self.down) + self.down_bias[..., None, :]
        y = y.view(4, 3, -1, 32) * scores.transpose(0, 1).view(4, 3, -1)[..., None]
        return y.sum(dim=0)


@pytest.mark.parametrize("changes", [{}, {"fill": 0.5}, {"chosen": False}])
def test_gates_of_all_experts_that_are_0_leave_the_chosen_ones(changes):
    """Others may not be 0: all experts stay."""
    torch.manual_seed(1)
    model, args = AllExperts(**changes), (torch.randn(3, 32), torch.randn(3, 4))
    assert explained(model, args)[0] == ([] if changes else ["experts"])
    torch.testing.assert_close(compiled(model)(*args), model(*args))


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_experts_of_other_devices_are_left_out(name, way):
    """Expert parallelism names an expert of another device by the number of those here."""
    model = tiny(name, way)
    (experts,) = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    experts._is_expert_parallel = True
    index = torch.tensor([[0, 1], [3, 4], [4, 2], [1, 0], [4, 4]])
    gates = torch.rand(5, 2, requires_grad=True)
    args = torch.randn(5, 64), index, gates
    assert explained(experts, args)[0] == ["experts"]
    torch.testing.assert_close(*results_and_gradients(experts, *args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_over_experts_is_refused_with_the_way_out(name):
    declined = explained(*layer_of(name, "eager"))[1]
    texts = [text for text in declined if text.startswith("experts ")]
    assert texts
    assert all("a loop over the experts" in one and "grouped_mm" in one for one in texts)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_gates_of_more_bits_round_where_the_model_does(name):
    """Mixtral and DeepSeek-V3 multiply by gates in float32, and then cast to the model's dtype."""
    layer, x = layer_of(name, "grouped_mm")
    layer, x = layer.to(torch.bfloat16), x.to(torch.bfloat16)
    assert explained(layer, x)[0] == ["experts"]
    compiled(layer, verify=True, strict=True)(x)  # bounds follow from the dtype


class Wide(Experts):
    def forward(self, x, index, gates):
        return super().forward(x.bfloat16(), index, gates.float()) + 1.0


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Wide(silu_of_first).bfloat16(), {}, "are not one dtype"),
        (Experts(silu_of_first, rows=lambda p, rows: (rows.mul_(2.0), rows)[1]), {}, None),
        (Experts(silu_of_first, last=lambda p, index, picks: index.flip(0).reshape(-1)), {}, None),
        (Experts(silu_of_first), {"target": "trn1"}, "trn1"),
        (Experts(lambda h: torch.sin(h[:, :24]) * h[:, 24:]), {}, "no gated product"),
        (Experts(lambda h: h[:, :24] + h[:, 24:]), {}, "no gated product"),
    ],
)
def test_what_no_call_computes_is_refused_and_right(model, options, words):
    """More bits read, a write in place that is no bias, an index of other picks, a target."""
    args = picks()
    matches, declined = explained(model, args, **options)
    assert matches == []
    assert words is None or words in declined[0]
    torch.testing.assert_close(compiled(model, **options)(*args), model(*args))


def test_experts_one_by_one_that_are_faster_stay_as_they_are(monkeypatch):
    assert explained(Experts(silu_of_first), picks())[0] == ["experts"]
    cost = {"experts": 90.0}
    monkeypatch.setitem(PRICES, "closed_form", lambda spec, target: cost.get(spec.family, 2.0))
    matches, declined = explained(Experts(silu_of_first), picks())
    assert matches == []
    assert "one call for 3 tokens: 90.0 us on trn2, smaller calls 14.0 us" in declined[0]
