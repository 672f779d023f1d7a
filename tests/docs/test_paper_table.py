"""docs/paper-table.md is what its rows say, and the rows keep to what weights allow."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import paper_table as table
from row_file import read_rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_written_from_the_rows(monkeypatch):
    """But for the marks of rows that later code made stale."""
    rows = read_rows(table.ROWS)
    page = (ROOT / "docs" / "paper-table.md").read_text()
    monkeypatch.setattr(table, "is_stale", lambda row: False)
    told = page.replace("Rows with + were computed by earlier code.\n", "")
    assert re.sub(r"^(\| [^|]*?)\+ \|", r"\1 |", told, flags=re.MULTILINE) == (
        table.markdown(rows) + "\n"
    )


def test_gains_at_other_contexts_differ_in_attention_alone():
    row = {"dense": {"token": 100.0}, "low": {"token": 90.0},
           "attention": {"512": 1.0, "4096": 8.0, "32768": 64.0}}  # fmt: skip
    assert table.token_gain(row, "dense", 4096) == pytest.approx(100 / 90)
    assert table.token_gain(row, "dense", 512) == pytest.approx(93 / 83)
    assert table.token_gain(row, "dense", 32768) == pytest.approx(156 / 146)


def test_a_row_is_stale_when_code_that_it_depends_on_changes(monkeypatch):
    setting = {"model": "llama-3.2-1b", "target": "trn1", "weights": "bfloat16", "tp": 1,
               "batch": 1, "prompt": 128, "ratio": 0.1}  # fmt: skip
    fresh = {**setting, "price": "closed_form", "code": table.code("closed_form")}
    simulated = {**setting, "price": "simulated", "code": table.code("simulated")}
    assert "simulator" not in fresh["code"]
    assert table.shown_rows([simulated, fresh]) == [simulated]
    monkeypatch.setattr(table, "code_digests", lambda: dict.fromkeys(fresh["code"], "0" * 16)
                        | {"simulator": "0" * 16})  # fmt: skip
    table.code.cache_clear()
    assert table.is_stale(fresh)
    assert table.is_stale(simulated)
    anew = {**fresh, "code": table.code("closed_form")}
    assert table.shown_rows([simulated, anew]) == [anew]
    table.code.cache_clear()
