"""docs/paper-table.md is what its rows say, and the rows keep to what weights allow."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import paper_table as table
from row_file import read_rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_written_from_the_rows():
    rows = read_rows(table.ROWS)
    page = (ROOT / "docs" / "paper-table.md").read_text()
    assert page == table.markdown(rows) + "\n"


def test_gains_at_other_contexts_differ_in_attention_alone():
    row = {"dense": {"token": 100.0, "attention": 8.0}, "low": {"token": 90.0, "attention": 8.0}}
    assert table.token_gain(row, "dense", 4096) == pytest.approx(100 / 90)
    assert table.token_gain(row, "dense", 512) == pytest.approx(93 / 83)
    assert table.token_gain(row, "dense", 32768) == pytest.approx(156 / 146)
