"""A report opened in headless Chromium: what is drawn, nothing on the console."""

import re

import pytest
from browser import CHROMIUM, MISSING, opened

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.report.charts import GraphNode, graph
from nmm_compiler.report.page import page
from nmm_compiler.report.parts import Grid, Line, Section

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

# What a reader would do: open what is folded, print; then say what the page shows.
READER = """
const bar = document.querySelector("svg[aria-label*='what each engine does'] rect");
const box = bar.getBoundingClientRect();
const folded = document.querySelector("details:not([open])");
dispatchEvent(new Event("beforeprint"));
const printed = folded.open;
dispatchEvent(new Event("afterprint"));
return {printed, refolded: !folded.open,
  drawn: box.width > 0 && box.height > 0, buttons: document.querySelectorAll("button").length,
  wider: document.documentElement.scrollWidth > window.innerWidth,
  hidden: [...document.querySelectorAll(".wide:has(.grid)")]
    .some(one => one.scrollWidth > one.clientWidth),
  named: [...document.querySelectorAll(".grid td + td")].every(
    cell => !cell.textContent || getComputedStyle(cell, "::before").content.length > 2),
  ink: getComputedStyle(document.querySelector("main")).color,
  paper: getComputedStyle(document.querySelector("main")).backgroundColor,
  graph: [...document.querySelectorAll("svg path")].some(p => p.getBoundingClientRect().height > 9),
  bytes: performance.getEntriesByType("resource").length};
"""


@pytest.fixture(scope="module")
def document():
    profile = build_kernel(LowRankSpec(m=16, k=256, r=128, n=384)).profile()
    nodes = [GraphNode("x", "input [16, 256]"), GraphNode("y", "linear [16, 384]", ("x",), "fused")]
    table = Grid.of(("a wide table", "of several", "columns"), [("word " * 9, "1", "2")])
    shown = profile.page_parts(profile.advice())
    parts = [Line("two kinds", "headline"), *shown, graph(nodes, "a graph"),
             Section("more", (table,), folded=True)]  # fmt: skip
    return page("a report", parts)


def test_a_page_is_drawn_and_says_nothing_on_the_console(document, tmp_path):
    seen, console = opened(document, tmp_path / "light.html", READER, "--window-size=1100,900")
    assert console == []
    assert seen["drawn"]
    assert seen["graph"]
    assert seen["buttons"] == 1, "one that opens what is folded"
    assert seen["printed"], "what is folded is not printed"
    assert seen["refolded"]
    assert seen["bytes"] == 0, "the page loads something from elsewhere"


def test_a_phone_in_the_dark(document, tmp_path):
    seen, console = opened(
        document, tmp_path / "dark.html", READER, "--window-size=500,800",
        "--blink-settings=preferredColorScheme=0",
    )  # fmt: skip
    assert console == []
    assert not seen["wider"], "the page is wider than the window"
    assert not seen["hidden"], "a table is wider than the window"
    assert seen["named"], "a value stands without the name of its column"
    ink, paper = (sum(map(int, re.findall(r"\d+", seen[name])[:3])) for name in ("ink", "paper"))
    assert ink > 500 > 200 > paper
