"""The table of the paper's models: which rows are stale, and what a run computes anew."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import paper_table as table


def test_gains_at_other_contexts_differ_in_attention_alone():
    made = {"dense": {"token": 100.0}, "low": {"token": 90.0},
            "attention": {"512": 1.0, "4096": 8.0, "32768": 64.0}}  # fmt: skip
    assert table.token_gain(made, "dense", 4096) == pytest.approx(100 / 90)
    assert table.token_gain(made, "dense", 512) == pytest.approx(93 / 83)
    assert table.token_gain(made, "dense", 32768) == pytest.approx(156 / 146)


SETTING = {"model": "llama-3.2-1b", "target": "trn1", "weights": "bfloat16", "tp": 1, "batch": 1,
           "prompt": 128}  # fmt: skip


@pytest.fixture
def decided(monkeypatch):
    """Digests that a test may change, in place of today's."""
    dense = {"matmul", "gated_mlp", "attention"}
    columns = {"low": {*dense, "lowrank"}, "dense": dense, "tutorial": dense,
               "attention": {"attention"}}  # fmt: skip
    names = {*columns["low"], "machine", "prediction", "calls", "tutorial", "simulator"}
    monkeypatch.setattr(table, "families_of", lambda row: columns)
    now = dict.fromkeys(names, "0")
    monkeypatch.setattr(table, "code", lambda row: dict(now))
    return now


def row(price, now, ratio=0.1, **figures):
    return {**SETTING, "ratio": ratio, "price": price, "code": dict(now), **figures}


@pytest.mark.parametrize(
    ("name", "closed_form", "simulated"),
    [
        ("lowrank", {"low"}, {"low"}),
        ("matmul", {"low", "dense", "tutorial"}, {"low", "dense", "tutorial"}),
        ("attention", set(table.COLUMNS), set(table.COLUMNS)),
        ("tutorial", {"tutorial"}, {"tutorial"}),
        ("simulator", {"tutorial"}, set(table.COLUMNS)),
        ("calls", set(table.COLUMNS), set(table.COLUMNS)),
    ],
)
def test_what_changes_makes_its_own_columns_stale(decided, name, closed_form, simulated):
    cheap, dear = row("closed_form", decided), row("simulated", decided)
    assert not table.is_stale(cheap)
    assert not table.is_stale(dear)
    decided[name] = "1"
    assert table.changed(cheap) == {key: [name] for key in closed_form}
    assert table.changed(dear) == {key: [name] for key in simulated}


def test_a_current_row_is_shown_before_a_stale_one_then_a_simulated_one(decided):
    fresh, simulated = row("closed_form", decided), row("simulated", decided)
    assert table.shown_rows([simulated, fresh]) == [simulated]
    decided["simulator"] = "1"
    assert table.is_stale(fresh)
    anew = row("closed_form", decided)
    assert table.shown_rows([simulated, anew]) == [anew]


def test_stale_columns_are_computed_and_others_kept(decided, monkeypatch):
    old = row("closed_form", decided, low="kept", dense="kept", mlp="kept", attention="kept",
              weight_limit=1.0, fits=True, tutorial="old")  # fmt: skip
    monkeypatch.setattr(table, "tutorial", lambda *given, **named: None)
    monkeypatch.setattr(table, "times", lambda made: "anew")
    setting = {name: old[name] for name in (*SETTING, "price")}
    decided["tutorial"] = "1"
    (made,) = table.rows_of((setting, {0.1: old}))
    assert made == {**old, "tutorial": "anew", "code": decided}
    assert not table.is_stale(made)


def test_a_run_is_asked_for_what_is_missing_or_stale(decided, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        table, "computed", lambda path, jobs, rows_of, workers: asked.extend(jobs) or []
    )
    given = argparse.Namespace(
        weights=["bfloat16"], tps=["1"], batches=["1"], targets=["trn1"], models=["llama-3.2-1b"],
        prompts=["128"], ratios=["0.1", "0.2"], price="closed_form", rows=tmp_path, workers=1,
        subset=False,
    )  # fmt: skip
    known = row("closed_form", decided)
    table.compute(given, [known])
    assert asked == [[({**SETTING, "price": "closed_form"}, {0.2: None})]]
    asked.clear()
    decided["lowrank"] = "1"
    table.compute(given, [known])
    assert asked == [[({**SETTING, "price": "closed_form"}, {0.1: known, 0.2: None})]]


def test_a_setting_has_its_rows_in_every_column_and_the_tutorial_is_the_slower_model(monkeypatch):
    monkeypatch.setattr(table, "code", lambda row: {})
    monkeypatch.setattr(table, "CONTEXTS", (64, 128))
    monkeypatch.setattr(table, "CONTEXT", 64)
    setting = {**SETTING, "price": "closed_form"}
    (made,) = table.rows_of_group([(setting, {0.2: None})])
    assert made.keys() >= {*table.COLUMNS, "mlp", "weight_limit", "fits"}
    assert made["tutorial"]["token"] > made["dense"]["token"] > made["low"]["token"]
    assert made["attention"]["128"] >= made["attention"]["64"] > 0


def test_the_subset_that_is_simulated_is_of_one_sequence():
    given = argparse.Namespace(
        weights=["bfloat16", "float8_e4m3"], tps=["1", "4"], batches=["1", "8"],
        targets=["trn1", "trn2", "trn3"], models=["llama-3.2-1b"], prompts=["128"],
        price="simulated", subset=True,
    )  # fmt: skip
    names = ("target", "tp", "weights")
    found = [tuple(one[name] for name in names) for one in table.settings_of(given)]
    assert sorted(found) == [
        ("trn1", 1, "bfloat16"), ("trn2", 1, "bfloat16"), ("trn2", 1, "float8_e4m3"),
        ("trn2", 4, "bfloat16"), ("trn3", 1, "bfloat16"),
    ]  # fmt: skip
