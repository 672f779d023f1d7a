"""Prices and verdicts on the page of a whole model, against kernels built and simulated anew."""

import dataclasses
import html
import re

import pytest
import torch

from nmm_compiler.backend.report import compile_parts
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.prices.kernel import LAUNCH_GAP_US
from nmm_compiler.prices.ways import alternatives, dense_rows

transformers = pytest.importorskip("transformers")


def tables(page):
    """Return the tables of a page: rows of texts, the head first."""
    return [
        [
            [html.unescape(re.sub("<[^>]+>", "", cell)).strip()
             for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)]
            for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        for table in re.findall(r"<table.*?</table>", page, re.DOTALL)
    ]  # fmt: skip


def row_us(row):
    """Return the microseconds of built kernels one after the other."""
    times = [build_kernel(one).profile().latency_us for one in row]
    return sum(times) + LAUNCH_GAP_US * (len(row) - 1)


def simulated(spec):
    """Return the microseconds of a call fused, in smaller calls and dense."""
    fused, *smaller = map(row_us, alternatives(spec))
    return fused, min(smaller), min(map(row_us, dense_rows(spec)))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_a_call_has_one_price_and_the_simulator_agrees_with_the_verdict(
    dtype, tmp_path, monkeypatch, nmm
):
    built = {}
    monkeypatch.setattr(
        "nmm_compiler.backend.report.compile_parts",
        lambda reports: (
            built.update({one.spec.short(): one.spec for made in reports for one in made.built})
            or compile_parts(reports)
        ),
    )
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(dtype).save_pretrained(tmp_path / "qwen3")
    page = tmp_path / "page.html"
    nmm("explain", tmp_path / "qwen3", "--ratio", "0.3", "--html", page, code=0)
    text = page.read_text(encoding="utf-8")
    by_head = {}
    for head, *rows in tables(text):
        by_head.setdefault(tuple(head), []).append(
            [dict(zip(head, row, strict=True)) for row in rows]
        )

    (report,) = (rows for head, rows in by_head.items() if "predicted us" in head)
    (matches,) = (rows for head, rows in by_head.items() if "smaller" in head)
    phases = next(rows for head, rows in by_head.items() if "us each" in head)
    assert set(built) == {row["kernel"] for row in report[0]}
    assert len(built) > (dtype == torch.bfloat16)  # in float32, compress leaves more dense
    saved = whole = 0.0
    for line, match in zip(report[0], matches[0], strict=True):
        spec = built[line["kernel"]]
        times = simulated(spec)
        shown = [f"{us:.1f}" for us in times]
        assert [match[name] for name in ("us", "smaller", "dense")] == shown
        assert line["predicted us"] == shown[0]
        one_token = row_us([dataclasses.replace(spec, m=1)])
        for rows, us in zip(phases, (shown[0], f"{one_token:.1f}"), strict=True):
            name = line["kernel"] if rows is phases[0] else line["kernel"].replace("m64", "m1", 1)
            (each,) = (one["us each"] for one in rows if [*one.values()][-1].endswith(name))
            assert each == us
        saved += int(line["calls"]) * (times[2] - times[0])
        whole += int(line["calls"]) * times[0]
    said = html.unescape(re.sub("<[^>]+>", " ", text))
    (calls,) = map(
        float, re.findall(r"([\d.]+)x in the fused calls \(64 tokens, simulated\)", said)
    )
    assert calls == pytest.approx((whole + saved) / whole, abs=0.01)
    (graph,) = map(float, re.findall(r"([\d.]+)x for this graph \(64 tokens a call", said))
    assert (graph > 1.0) == (saved > 0) or abs(graph - 1.0) < 0.005
    assert abs(graph - 1.0) <= abs(calls - 1.0) + 0.01  # the rest of the graph is the same
