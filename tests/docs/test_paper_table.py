"""docs/paper-table.md is what its rows say, and the rows keep to what weights allow."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "paper_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_written_from_the_rows():
    table = script()
    rows = [json.loads(line) for line in table.ROWS.read_text().splitlines()]
    page = (ROOT / "docs" / "paper-table.md").read_text()
    assert page == table.markdown(rows) + "\n"


def test_gains_at_other_contexts_differ_in_attention_alone():
    table = script()
    row = {"dense": {"token": 100.0, "attention": 8.0}, "low": {"token": 90.0, "attention": 8.0}}
    assert table.token_gain(row, "dense", 4096) == pytest.approx(100 / 90)
    assert table.token_gain(row, "dense", 512) == pytest.approx(93 / 83)
    assert table.token_gain(row, "dense", 32768) == pytest.approx(156 / 146)
