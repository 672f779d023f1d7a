"""A plan says which setting pays and which does not, and never hides one that cannot be had."""

import dataclasses
import json
from contextlib import nullcontext

import pytest

from nmm_compiler.cli import on_models
from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.prediction import forms as forms_module
from nmm_compiler.prediction.forms import read_form
from nmm_compiler.prediction.model import Memory, ModelPrediction, Phase, PhaseLine
from nmm_compiler.prediction.plan import Plan, layer_gains, plan, settings
from nmm_compiler.prices import kernel as latency
from nmm_compiler.targets import get

pytest.importorskip("transformers")

TINY = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64,
}  # fmt: skip
SHORT = {"prompts": (16,), "contexts": (16,), "price": "closed_form"}


def made(us: dict[str, float], dense=None, **changes) -> ModelPrediction:
    lines = tuple(
        PhaseLine(module=f"model.layers.*.{name}", kind="kernel", calls=2, each_us=each,
             source="simulated")
        for name, each in us.items()
    )  # fmt: skip
    fields = {
        "name": "toy", "target": "trn2", "dtype": "bfloat16", "weights": "bf16", "prompt": 8,
        "context": 8, "batch": 1, "tp": 1, "lnc": 1, "ranks": (), "parameters": 1,
        "ratio": None if dense is None else 0.2, "dense": dense,
        "phases": (Phase(name="decode", lines=lines),),
        "memory": Memory(weight_bytes=1, cache_bytes=1, activation_bytes=1, capacity_bytes=9),
    }  # fmt: skip
    return ModelPrediction(**fields | changes)


DENSE = made({"mlp": 100.0, "self_attn": 50.0})


def test_the_best_setting_pays_and_its_layers_are_told_apart():
    fast = made({"mlp": 50.0, "self_attn": 60.0}, DENSE)
    shown = Plan(name="toy", predictions=(DENSE, fast))
    assert layer_gains(fast) == {"mlp": 2.0, "self_attn": pytest.approx(50 / 60)}
    text = "\n".join(shown.verdict())
    assert "pays most" in text
    assert "mlp 2.00x, self_attn 0.83x; what is below 1 can stay dense" in text
    assert "as fast as dense, by" not in str(shown), "a chart's title without its chart"
    assert "times as fast as dense, by setting" in shown._repr_html_()


TIGHT = Memory(weight_bytes=9, cache_bytes=1, activation_bytes=1, capacity_bytes=9)


@pytest.mark.parametrize(
    ("us", "more"),
    [
        ({"mlp": 110.0, "self_attn": 60.0}, {}),
        ({"mlp": 50.0, "self_attn": 50.0}, {"memory": TIGHT}),
    ],
)
def test_a_plan_where_nothing_pays_or_fits_says_so(us, more):
    shown = Plan(name="toy", predictions=(DENSE, made(us, DENSE, **more)))
    assert shown.verdict()[0].startswith("no setting ")


def test_a_gain_within_the_error_of_the_prices_is_not_told_apart(monkeypatch):
    kept = {"bf16": {"in": [1.0], "out": [1.0]}, "fp8": {"in": [1.01], "out": [1.01]}}
    monkeypatch.setattr(forms_module, "MEASURED", {"toy": kept})
    near = made({"mlp": 90.0, "self_attn": 55.0}, DENSE)
    (said, *_) = Plan(name="toy", predictions=(DENSE, near)).verdict()
    assert said.startswith("no setting pays beyond the error of its prices: the nearest is ")
    assert not near.pays
    assert made({"mlp": 50.0, "self_attn": 50.0}, DENSE).pays
    fp8 = made({"mlp": 95.0, "self_attn": 50.0}, weights="fp8")
    (said,) = Plan(name="toy", predictions=(DENSE, fp8)).verdict()
    assert said.startswith(
        "trn2: take fp8 (1.01 and 1.01 times the perplexity of bf16); 1.03x over bf16, not"
    )


def test_a_setting_that_cannot_be_had_is_named():
    shown = plan(TINY, forms=("bf16", "lowrank:0.3"), targets=("trn2", "trn1"),
                 weights="float8_e4m3", **SHORT)  # fmt: skip
    assert {p.target for p in shown.predictions} == {"trn2"}
    assert [one.setting.split()[0] for one in shown.refused] == ["trn1", "trn1"]
    assert "trn1" in str(shown)
    assert Plan.from_json(shown.to_json()) == shown
    with pytest.raises(ModelError, match="nothing could be predicted"):
        plan(TINY, targets=("trn1",), weights="float8_e4m3")


def test_the_command_writes_table_page_and_figures(tmp_path, monkeypatch, nmm):
    """And it simulates each kernel of all settings once, before it predicts."""
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(tmp_path / "cache"))
    simulated, simulate = [], latency._simulate
    monkeypatch.setattr(latency, "_simulate", lambda *one: simulated.append(one) or simulate(*one))
    monkeypatch.setattr(latency, "WORTH_WORKERS", 2)
    latency.simulated_us.cache_clear()
    steps = []
    noted = nullcontext(lambda *one: steps.append(one))
    monkeypatch.setattr(on_models, "steps", lambda first: noted)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    page = tmp_path / "plan.html"
    words = ("--prompt", "16", "--context", "16,32", "--ratio", "0.3", "--lnc", "1", "--json")
    saved = Plan.from_json(nmm("plan", config, *words, "--html", page, code=0).out)
    assert simulated == []  # workers did, each once
    counted = [step[1:] for step in steps if step[0].startswith("simulated")]
    assert counted == [(i + 1, len(counted)) for i in range(len(counted))]
    assert len(counted) > 4
    assert [(p.context, p.ratio) for p in saved.predictions] == [
        (16, None), (16, 0.3), (32, None), (32, 0.3),
    ]  # fmt: skip
    assert saved.verdict()[0].split(":")[0] in page.read_text()
    assert "<svg" in page.read_text()
    assert dataclasses.asdict(saved)["name"] == saved.name


def test_cores_that_share_a_model_have_two_physical_ones(tmp_path, nmm):
    """--tp 1,4 --lnc 2: each degree holds less; a logical core has the memory of two."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    words = ("--prompt", "16", "--context", "32", "--ratio", "0.3", "--tp", "1,4", "--lnc", "2")
    shown = nmm("plan", config, *words, "--price", "closed_form", "--json", code=0).out
    made = {(one.tp, one.ratio): one for one in Plan.from_json(shown).predictions}
    assert set(made) == {(tp, ratio) for tp in (1, 4) for ratio in (None, 0.3)}
    for (tp, ratio), one in made.items():
        assert one.lnc == 2
        assert one.memory.capacity_bytes == 2 * get("trn2").hbm_bytes
        if tp > 1:
            assert one.memory.weight_bytes < made[1, ratio].memory.weight_bytes


def test_each_target_is_told_its_form_with_what_was_measured_of_it(monkeypatch):
    """The fastest form that fits and keeps the quality; what a target lacks is a refusal."""
    rows = {"bf16": (1, 1), "fp8": (1.01, 1.01), "lowrank:0.2": (1.2, 2.4),
            "mxfp4, mxfp8 x": (1.5, 1.7), "mxfp4+64, mxfp8 x": (1.08, 1.17)}  # fmt: skip
    figures = {name: {"in": [a], "out": [b]} for name, (a, b) in rows.items()}
    monkeypatch.setattr(forms_module, "MEASURED", {"toy": figures})
    names = ("bf16", "fp8", "lowrank:0.2", "mxfp4", "mxfp4+64")
    wide = TINY | {"hidden_size": 2048, "intermediate_size": 8192}
    shown = plan(wide, targets=("trn2", "trn3"), forms=names, price="closed_form")
    assert [p.form for p in shown.predictions] == [*names[:3], *names]
    assert [shown.best_form(target) for target in ("trn2", "trn3")] == ["fp8", "mxfp4+64"]
    said = shown.verdict()
    assert said[0].startswith("trn2: take fp8 (")
    assert "over lowrank:0.2: low rank alone loses" in said[0]
    assert "x over mxfp4, which is not known to keep the quality" in said[1]
    assert len(shown.refused) == 2
    assert "pass a form that trn2 multiplies: bf16, fp8" in shown.refused[0].reason
    assert "1.08/1.17" in str(shown)
    bf16, fp8, _, _, branch = shown.predictions[3:]
    each = [sum(x.calls * x.bytes_us for x in p.phases[-1].lines) for p in (bf16, fp8, branch)]
    assert each[0] > each[1] > each[2]
    saved = fp8.memory.weight_bytes - branch.memory.weight_bytes
    one = read_form("mxfp4+64")
    assert one.stored_bytes(2048, 8192) == 8192 * (1024 + 64) + 2 * 64 * (2048 + 8192)
    assert saved > 0.4 * fp8.memory.weight_bytes * 0.9


def test_a_saved_low_rank_model_is_no_form_whose_quality_is_known(monkeypatch):
    ranks = {f"model.layers.{i}.mlp.down_proj": 32 for i in range(2)}
    saved = {**TINY, "quantization_config": {"quant_method": "nmm_lowrank", "ranks": ranks}}
    of_weights = lambda base: {k: v for k, v in settings(base).items() if "weights" in v}  # noqa: E731
    monkeypatch.setattr("nmm_compiler.prediction.plan.settings", of_weights)
    shown = plan(saved, targets=("trn2",), forms=("bf16", "fp8"), **SHORT)
    assert [p.form for p in shown.predictions] == ["lowrank", "lowrank fp8"]
    assert shown.best_form("trn2") is None
    assert not any(change.name == "weights bf16" for change in shown.changes)


def test_of_equally_fast_forms_the_one_with_the_least_memory_is_taken(monkeypatch):
    """A tiny model's time is gaps: its weights gain nothing in any form."""
    monkeypatch.setattr("nmm_compiler.prediction.plan.changes", lambda *given: ())
    shown = plan(TINY, targets=("trn2",), forms=("bf16", "fp8"), **SHORT)
    assert [round(shown.over_first(p), 2) for p in shown.predictions] == [1.0, 1.0]
    assert shown.best_form("trn2") == "fp8"


@pytest.mark.parametrize(
    "name", ["fp9", "mxfp4+", "mxfp4+0", "mxfp4+48", "bf16+8", "lowrank", "lowrank:1.5", "fp8:x"]
)
def test_a_form_that_is_none_is_one_error(name):
    with pytest.raises(OptionTypeError, match="option 'form'"):
        read_form(name)


def test_a_form_that_needs_the_weights_is_refused():
    with pytest.raises(ModelError, match=r'pass ranks that are known.*"mxfp4\+64"'):
        plan(TINY, targets=("trn3",), forms=("mxfp4:0.6",))
