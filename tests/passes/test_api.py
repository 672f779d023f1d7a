"""rewrite, explain and rules as people use them, and what they get for bad input."""

import contextlib
import functools
import warnings

import models
import pytest
import torch
import torch.nn.functional as F
from models import OwnRule, kernel_calls, match_of
from torch import fx, nn
from torch.utils import _pytree as pytree
from toy_models import llama

import nmm_compiler as nmm
from nmm_compiler.errors import BrokenRuleError, ModelError, OptionTypeError, UnknownNameError
from nmm_compiler.options import Options
from nmm_compiler.passes.pipeline import RULES, explain, rewrite, run
from nmm_compiler.passes.rules import Match

X = torch.randn(3, 64)


Pair = functools.partial(models.Pair, 64, 8, 48)


@torch.no_grad()
def test_the_new_graph_shares_parameters_and_the_given_one_is_not_changed():
    module = fx.symbolic_trace(Pair())
    before = module.code
    result = rewrite(module, X)
    assert module.code == before
    assert "nmm.lowrank_matmul" in result.graph_module.code
    module.a.weight.mul_(2.0)
    torch.testing.assert_close(result.graph_module(X), module(X), rtol=1e-5, atol=1e-5)


def test_metadata_is_copied():
    program = torch.export.export(Pair(), (X,)).module()
    result = run(program)
    ((node, spec),) = kernel_calls(result.graph_module)
    assert tuple(node.meta["val"].shape) == (3, 48)
    assert "nn_module_stack" in node.meta
    assert (spec.m, spec.k, spec.r, spec.n) == (3, 64, 8, 48)
    assert (spec.u_layout, spec.v_layout, spec.bias) == ("col", "col", True)


def three_layers():
    def function(p, x):
        for layer, mix in zip(p.layers, p.mix, strict=True):
            x = mix(torch.tanh(layer(x)))
            x = torch.tanh(x @ layer.a.weight.t()) @ layer.a.weight
        return x

    parts = {"layers": [Pair() for _ in range(3)], "mix": [nn.Linear(48, 64) for _ in range(3)]}
    return models.Model(function, **{name: nn.ModuleList(part) for name, part in parts.items()})


@pytest.mark.parametrize("width", [60, 80])
def test_the_report_fits_the_page_and_says_equal_things_once(width):
    report = explain(three_layers(), X)
    text = report.table(width)
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width
    assert "layers.*" in text
    assert text.count("lowrank: activation tanh between the products") == 1
    assert "3 x lowrank: activation tanh" in text
    assert "row>row" in text or width < 80
    assert [m.module for m in report.matches] == [f"layers.{i}" for i in range(3)]


def test_explain_covers_every_graph():
    def broken(p, x):
        y = p.pair(x)
        torch._dynamo.graph_break()
        return F.linear(p.pair.a(x), p.pair.b.weight) + y

    report = explain(models.Model(broken, pair=Pair()), X)
    assert len(report.results) == len(report.matches) == 2
    assert all(words in str(report) for words in ("2 graphs", "graph_breaks"))


def test_explain_reads_models_past_dynamos_recompile_limit():
    model = Pair()
    limit = torch._dynamo.config.recompile_limit
    counts = [len(explain(model, torch.randn(m, 64)).matches) for m in range(2, limit + 4)]
    assert counts == [1] * (limit + 2)


def test_explain_says_what_factorizing_would_save():
    inputs = {"input_ids": torch.arange(6)[None], "use_cache": False}
    report = explain(llama(32, 64).model, inputs)
    assert len(report.opportunities) == 7
    one = next(o for o in report.opportunities if (o.k, o.n) == (32, 64))
    assert one.r == int(0.8 * 32 * 64 / 96)
    assert one.saved_bytes == 4 * (32 * 64 - one.r * 96)


# -- rules ------------------------------------------------------------------------------------


def test_disable_and_order():
    assert not rewrite(Pair(), X, options={"rules": ["-lowrank"]}).matches
    names = [r.name for r in RULES]
    assert names[-4:] == ["shared_x", "attention", "norm", "residual"]
    assert names.index("lora") < names.index("lowrank") < names.index("shared_x")
    assert rewrite(Pair(), X, rules=["lowrank"]).matches
    assert not rewrite(Pair(), X, rules=["lora"]).matches
    with pytest.raises(UnknownNameError, match="did you mean 'lowrank'"):
        rewrite(Pair(), X, options={"rules": ["-lowrang"]})
    with pytest.raises(UnknownNameError, match="rule 'loora'"):
        rewrite(Pair(), X, rules=["loora"])


@pytest.fixture(scope="module")
def exported():
    return torch.export.export(Pair(), (X,)).module()


@contextlib.contextmanager
def faulty(module, name, said):
    """Assert that a block blames the rule of a name, and leaves the module as it was."""
    before = module.code
    with pytest.raises(BrokenRuleError, match=rf"rule '{name}' failed .*{said}"):
        yield
    assert module.code == before


def is_linear(node):
    return node.op == "call_function" and "linear" in node.name


def boom(*_):
    raise ValueError("boom")


def broken(ends=is_linear, rewrites=None, checks=None):
    return OwnRule("broken", ends, rewrites, checks)


def of(name):
    return functools.partial(match_of, name)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (broken(lambda node: is_linear(node) and boom()), "boom"),
        (broken(checks=boom), "boom"),
        (broken(rewrites=boom), "boom"),
        (broken(checks=of("other")), "check returned a match of rule 'other'; pass rule=self.name"),
        (broken(checks=lambda node: True), "check returned True; return a Match"),
        (broken(rewrites=lambda m, e: None), "rewrite returned None; return the node"),
        (
            broken(rewrites=lambda m, e: e.call(torch.ops.aten.neg.default, m.node.args[0])),
            "of the same shape and dtype",
        ),
    ],
)
def test_a_broken_rule_is_named_and_the_graph_is_left_alone(rule, said, exported):
    with faulty(exported, "broken", f"on node 'linear.*{said}"):
        run(exported, rules=[rule, "..."])


def test_a_rule_that_finds_nothing_leaves_its_places_to_others(exported):
    assert run(exported, rules=[broken(checks=lambda node: None), "..."]).matches


def covering(nodes):
    return Match(rule="combines", node=max(nodes, key=lambda n: n.name), nodes=frozenset(nodes))


@pytest.mark.parametrize(
    ("joined", "said"),
    [
        (lambda ms: [of("lowrank")(ms[0].node)], "combine returned a match of rule 'lowrank'"),
        (lambda ms: [of("unheard")(ms[0].node)], "combine returned a match of rule 'unheard'"),
        (lambda ms: None, "combine returned None; return a list of matches"),
        (lambda ms: [ms[0].node], "combine returned .*; return a list of matches"),
        (lambda ms: [*ms, covering([m.node for m in ms])], "both take over node"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_answer_of_combine_is_the_fault_of_its_rule(joined, said, strict, exported):
    rule = OwnRule("combines", is_linear, combines=lambda graph, matches: joined(matches))
    with faulty(exported, "combines", said):
        run(exported, options=Options(strict=strict, rules=("-lowrank",)), rules=[rule])


EDITS = {
    "target": lambda node: setattr(node, "target", torch.ops.aten.neg.default),
    "arguments": lambda node: setattr(node, "args", node.args[:2]),
    "keywords": lambda node: setattr(node, "kwargs", {"bias": None}),
    "readers": lambda node: node.replace_all_uses_with(node.args[0]),
    "new node": lambda node: node.graph.call_function(torch.neg, (node.args[0],)),
    "order": lambda node: next(iter(node.graph.nodes)).prepend(node),
}


@pytest.mark.parametrize(
    ("where", "edit"),
    [*(("check", edit) for edit in EDITS), ("pattern", "target"), ("combine", "order")],
)
def test_a_rule_that_edits_the_graph_while_it_looks_is_named(where, edit, exported):
    def edited(step, node):
        if step == where and is_linear(node):
            EDITS[edit](node)
        return is_linear(node)

    def combines(graph, matches):
        edited("combine", matches[0].node)
        return matches

    def checks(node):
        edited("check", node)
        return match_of("edits", node)

    rule = OwnRule("edits", lambda node: edited("pattern", node), None, checks, combines)
    with faulty(exported, "edits", "edited the graph"):
        run(exported, options=Options(rules=("-lowrank",)), rules=[rule, "..."])


def compiled(model, x, *, options):
    torch._dynamo.reset()
    return torch.compile(model, backend="nmm", options={**options, "inner": "eager"})(x)


@pytest.mark.parametrize(
    ("call", "option", "strict"),
    [(rewrite, "target", False), (rewrite, "verdicts", True), (explain, "verdicts", False),
     (explain, "target", True), (compiled, "verdicts", False), (compiled, "target", True)],
)  # fmt: skip
def test_a_file_of_the_user_that_is_missing_is_no_fault(
    option, strict, call, tmp_path, monkeypatch
):
    missing = str(tmp_path / "missing.json")
    options = {"target": missing} if option == "target" else {}
    if option == "verdicts":
        monkeypatch.setenv("NMM_VERDICTS", missing)
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(Exception, match=r"missing\.json") as caught,
    ):
        call(Pair(), X, options={**options, "strict": strict})
    assert "fault in nmm_compiler" not in str(caught.value)


@pytest.mark.parametrize("rules", [[OwnRule], [OwnRule("twice", is_linear)] * 2])
def test_rules_are_objects_with_names_of_their_own(rules):
    with pytest.raises(OptionTypeError, match="each with its own name"):
        rewrite(Pair(), X, rules=rules)


# -- bad input --------------------------------------------------------------------------------


BRANCHING = models.Model(lambda p, x: x if x.sum() > 0 else -x)
SHAPES = r"a tensor, a tuple of positional arguments or a dict"


@pytest.mark.parametrize(
    ("ask", "given", "words"),
    [
        (rewrite, (fx.symbolic_trace(Pair()),), "pass example_inputs"),
        (rewrite, (3,), "int"),
        (rewrite, (Pair(),), "example_inputs"),
        (explain, ("model",), "str"),
        (rewrite, (BRANCHING, X), r"torch\.export could not make one graph"),
        (rewrite, (Pair(), 3), SHAPES),
        (explain, (Pair(), 3), SHAPES),
    ],
)
def test_what_is_no_model_or_no_input_is_refused_by_name(ask, given, words):
    with pytest.raises(ModelError, match=words):
        ask(*given)


# -- example inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "inputs"),
    [("module", X), ("graph", (X,)), ("program", [X]), ("module", {"x": X}), ("program", {"x": X})],
    ids=["tensor", "tuple", "list", "dict", "dict of a program"],
)
@pytest.mark.parametrize("ask", [rewrite, explain])
def test_inputs_are_a_tensor_a_sequence_or_a_dict(ask, inputs, form):
    model = Pair()
    given = {
        "module": lambda: model,
        "graph": lambda: torch.fx.symbolic_trace(model),
        "program": lambda: torch.export.export(model, (X,)),
    }[form]()
    assert len(ask(given, inputs).matches) == 1


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
MODELS = {
    "Gemma3ForCausalLM": {
        **SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GPT2LMHeadModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4},
    "MambaForCausalLM": {**SMALL, "state_size": 4},
    "T5ForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n == "Gemma3ForCausalLM" else []) for n in MODELS],
)
def test_a_model_that_returns_its_cache_is_rewritten_as_it_is(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name])).eval()
    ids = torch.arange(6)[None]
    inputs = {"input_ids": ids}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = ids
    nmm.compress(model, rank=8, align=8, exclude="lm_head", allow_slower=True)
    result = rewrite(model, inputs, verify=True)
    assert result.matches
    wanted, got = model(**inputs), result.graph_module(**inputs)
    assert type(got) is type(wanted)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    cache = "cache_params" if name.startswith("Mamba") else "past_key_values"
    assert type(got[cache]) is type(wanted[cache])
    held = [pytree.tree_leaves(outputs[cache]) for outputs in (got, wanted)]
    assert any(isinstance(leaf, torch.Tensor) for leaf in held[1])
    torch.testing.assert_close(*held, rtol=1e-5, atol=1e-5)
