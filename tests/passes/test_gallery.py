"""The gallery of spellings: each level finds exactly what is written beside the case."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import rewrite_gallery as gallery

from nmm_compiler.passes.pipeline import RULES, run
from nmm_compiler.passes.rules import Rule
from nmm_compiler.passes.rules.lowrank import LowRank

# Products of two norms below 1, summed over at most 64 + 8 terms, rounded a few times in fp32.
BOUND = 2.0**-23 * (gallery.K + gallery.R + 8) * 2
QUICK_DYNAMO = (
    "matmul_op", "linear_both_biases", "gpt2_conv1d", "feature_major", "einsum3", "conv2d",
    "inplace_between", "autocast", "vmap", "lora_iadd", "swiglu_transposed", "qkv", "one_u_two_v",
    "mla", "no_grad_edge", "checkpointed", "inplace_view",
)  # fmt: skip


def check(name: str, level: str) -> None:
    (one,) = (c for c in gallery.CASES if c.name == name)
    expected = one.expected(level)
    if expected == "n/a":
        pytest.skip("the level does not have the case")
    found, error, result = gallery.try_case(one, level)
    assert found == expected, str(result)
    assert error <= BOUND


NAMES = [c.name for c in gallery.CASES]


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_symbolic_trace(name):
    check(name, "S")


@pytest.mark.parametrize("name", QUICK_DYNAMO)
def test_dynamo(name):
    check(name, "D")


@pytest.mark.parametrize(
    "name", ["matmul_op", "einsum2", "lora_linear", "swiglu_mlp", "bmm_expand"]
)
def test_plain_aten(name):
    check(name, "A")


@pytest.mark.long
@pytest.mark.parametrize("level", ["D", "A", "E", "C"])
@pytest.mark.parametrize("name", NAMES)
def test_every_level(name, level):
    check(name, level)


@pytest.mark.parametrize(
    "name",
    [c.name for c in gallery.CASES if c.name in QUICK_DYNAMO and c.expected("S") != "n/a"],
)
def test_rules_say_all_forms_that_their_matches_end_at(name, monkeypatch):
    (one,) = (c for c in gallery.CASES if c.name == name)
    module, inputs = gallery.capture(one, "S")
    results = [run(module, inputs)]
    for rule in RULES:
        if rule.ends_at != ():  # else it joins what others find, and proposes nothing
            monkeypatch.setattr(type(rule), "ends_at", None)
    results.append(run(module, inputs))
    said = [[str(d) for d in (*r.matches, *r.declined)] for r in results]
    assert said[0] == said[1]


def test_a_pattern_of_its_own_is_asked_everywhere():
    class Mine(LowRank):
        def pattern(self, graph, node):
            yield from ()

    class Named(LowRank):
        name = "named"

    assert Rule.ends_at is None
    assert Mine.ends_at is None
    assert Named.ends_at == LowRank.ends_at
