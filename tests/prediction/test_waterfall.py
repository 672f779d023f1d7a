"""A pass as steps that sum to its time, what would change it, and measured times beside it."""

import json

import pytest
import transformers

import nmm_compiler as nmm
from nmm_compiler.errors import NmmError
from nmm_compiler.prediction.model import Phase, PhaseLine
from nmm_compiler.prediction.plan import differences, plan, read_measured, verdict
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prediction.stacks import STACKS

CONFIG = transformers.LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=2048,
    num_attention_heads=8, num_key_value_heads=4,
)  # fmt: skip


@pytest.mark.parametrize("weights", [None, "float8_e4m3"])
@pytest.mark.parametrize(("tp", "lnc"), [(1, 1), (2, 2)])
def test_the_steps_of_a_pass_sum_to_its_time(weights, tp, lnc):
    made = predict(CONFIG, tp=tp, lnc=lnc, weights=weights, price="closed_form")
    for phase in made.phases:
        assert sum(step.us for step in phase.steps) == pytest.approx(phase.us, rel=1e-3)
        assert all(step.us > 0 for step in phase.steps)
        assert phase.steps[0].name == "bytes at the full rate"
        shown = json.loads(made.to_json())["phases"][made.phases.index(phase)]["steps"]
        assert sum(step["us"] for step in shown) == pytest.approx(phase.us, rel=1e-3)
        assert all(step["sources"] and len(step["error_band"]) == 2 for step in shown)
    assert type(made).from_json(made.to_json()) == made
    if tp == 1:  # the weights but for the embedding, and the cache, by hand; x and y are small
        embedding = CONFIG.vocab_size * CONFIG.hidden_size * 2
        moved = made.memory.weight_bytes - embedding + made.memory.cache_bytes
        rate = nmm.targets.get("trn2").memory_bytes_per_second
        assert made.phases[1].steps[0].us == pytest.approx(1e6 * moved / rate, rel=0.02)


def test_every_stack_is_priced_and_a_program_a_layer_costs_its_gaps():
    made = {name: predict(CONFIG, stack=name, price="closed_form") for name in STACKS}
    own = made["own"].tpot_us
    apart = made["nxdi"].tpot_us  # its kernels have no norm and no sum inside
    assert apart == made["neuronx-cc"].tpot_us > own
    assert made["vllm-neuron"].tpot_us == pytest.approx(apart + 1600)
    layers = CONFIG.num_hidden_layers
    assert made["pjrt-2.31"].tpot_us == pytest.approx(own + 180.0 * (layers + 1))
    assert "stack pjrt-2.31" in made["pjrt-2.31"].headline()
    assert "stack own" in made["own"].headline()
    assert made["vllm-optimum"].tpot_us == pytest.approx(apart + 5500)
    assert all(stack.source and stack.kernels for stack in STACKS.values())
    assert predict(CONFIG, stack="nxdi-2.27", price="closed_form") == made["nxdi"]
    with pytest.raises(NmmError, match="vllm-neuron"):
        predict(CONFIG, stack="vlm-neuron")


def test_what_would_change_it_is_predicted_again():
    made = plan(CONFIG, forms=("bf16", "lowrank:0.2"), price="closed_form")
    found = {change.name: change for change in made.changes}
    gains = [change.gain for change in made.changes]
    assert gains == sorted(gains, reverse=True)
    base = made.predictions[0]
    eight = predict(CONFIG, weights="float8_e4m3", price="closed_form")
    assert found["weights fp8"].us == eight.tpot_us
    assert not {"weights bf16", "weights mxfp4+32fp8", "tp 0"} & set(found)  # trn2 has no MX blocks
    batch = predict(CONFIG, batch=4, price="closed_form", last=True)
    assert [phase.name for phase in batch.phases] == ["decode"]
    assert found["batch 4"].gain == pytest.approx(4 * base.tpot_us / batch.tpot_us)
    low = predict(CONFIG, ratio=0.2, price="closed_form")
    assert found["low rank, ratio 0.2"].gain == pytest.approx(base.tpot_us / low.tpot_us)
    assert not found["stack nxdi"].told_apart
    assert found["one launch a layer"].us < base.tpot_us
    assert "what would change it" in str(made)
    assert plan(CONFIG, forms=("bf16",), contexts=(1024, 2048), price="closed_form").changes == ()


def phase():
    lines = (
        PhaseLine(module="m", kind="kernel", calls=10, each_us=100.0, source="simulated",
             bytes_us=60.0, floor_us=70.0),
        PhaseLine(module="m", kind="all_reduce", calls=5, each_us=20.0, source="published law"),
        PhaseLine(module="(host)", kind="call", calls=1, each_us=133.0, source="published law"),
    )  # fmt: skip
    return Phase(name="decode", lines=lines)


def test_measured_figures_stand_beside_the_predicted_steps():
    summary = {"total_time": 0.0015, "cc_op_active_time": 0.0004, "hbm_read_bytes": 200_000_000,
               "hbm_write_bytes": 16_000_000, "event_count": 7}  # fmt: skip
    for text in (summary, [summary], {"summary": [summary], "instruction": []}):
        made = differences(phase(), read_measured(json.dumps(text), "p.json"), 360e9)
        shown = {one.step: one for one in made}
        assert shown["the pass on the device"].predicted_us == pytest.approx(1100.0)
        assert shown["the pass on the device"].measured_us == pytest.approx(1500.0)
        assert shown["bytes at the full rate"].measured_us == pytest.approx(600.0)
        assert shown["collectives"].measured_us == pytest.approx(400.0)
        assert shown["the rest"].predicted_us == pytest.approx(400.0)
        assert shown["the rest"].measured_us == pytest.approx(500.0)
        assert "slowest against its prediction: collectives, +0.300 ms" in verdict(
            made, (-0.3, 0.5)
        )
    made = differences(phase(), read_measured("2.466", "ms.txt"), 360e9)
    assert [one.step for one in made] == ["the pass"]
    assert verdict(made, (-0.3, 0.5)).startswith("measured is 2.00x of predicted, beyond")


@pytest.mark.parametrize("text", ["", "ten", "true", "-3", "{}", '{"summary": []}',
                                  '{"total_time": "1"}', "[]", "null"])  # fmt: skip
def test_a_file_without_a_time_is_refused_by_name(text):
    with pytest.raises(NmmError, match=r"mine\.json"):
        read_measured(text, "mine.json")
