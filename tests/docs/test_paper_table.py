"""The paper's table: what is computed anew, which rows are shown, what a row holds."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import paper_table as table
import row_file


def test_gains_at_other_contexts_differ_in_attention_alone():
    made = {"dense": {"token": 100.0}, "low": {"token": 90.0},
            "attention": {"512": 1.0, "4096": 8.0, "32768": 64.0}}  # fmt: skip
    assert table.token_gain(made, "dense", 4096) == pytest.approx(100 / 90)
    assert table.token_gain(made, "dense", 512) == pytest.approx(93 / 83)
    assert table.token_gain(made, "dense", 32768) == pytest.approx(156 / 146)


SETTING = {"model": "llama-3.2-1b", "target": "trn1", "weights": "bfloat16", "tp": 1, "batch": 1,
           "prompt": 128}  # fmt: skip


def row(price, code="today", ratio=0.1):
    return {**SETTING, "ratio": ratio, "price": price, "code": code}


@pytest.fixture(autouse=True)
def today(monkeypatch):
    monkeypatch.setattr(row_file, "version", lambda: "today")


def test_a_current_row_is_shown_before_a_stale_one_then_a_simulated_one():
    closed, simulated, old = row("closed_form"), row("simulated"), row("simulated", "before")
    assert table.shown_rows([simulated, closed]) == [simulated]
    assert table.shown_rows([old, closed]) == [closed]


def test_a_run_is_asked_for_what_is_missing_or_stale(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(table, "computed", lambda path, jobs, *more: asked.extend(jobs) or [])
    given = argparse.Namespace(
        weights=["bfloat16"], tps=["1"], batches=["1"], targets=["trn1"], models=["llama-3.2-1b"],
        prompts=["128"], ratios=["0.1", "0.2", "0.3"], price="closed_form", rows=tmp_path,
        workers=1, subset=False,
    )  # fmt: skip
    rows = [row("closed_form"), row("closed_form", "before", 0.2), row("simulated", ratio=0.3)]
    table.check(given, rows)
    assert capsys.readouterr().out == "1 current, 1 stale, 1 missing\n"
    table.compute(given, rows)
    assert asked == [[({**SETTING, "price": "closed_form"}, [0.2, 0.3])]]


def test_a_row_has_its_columns_and_is_a_line_of_the_table(monkeypatch):
    monkeypatch.setattr(table, "CONTEXTS", (64, 128))
    monkeypatch.setattr(table, "CONTEXT", 64)
    (made,) = table.rows_of_group([({**SETTING, "price": "closed_form"}, [0.2])])
    assert made["tutorial"]["token"] > made["dense"]["token"] > made["low"]["token"]
    assert made["attention"]["128"] >= made["attention"]["64"] > 0
    assert f"| {made['weight_limit']:.2f} |" in table.markdown([made])


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
