"""A report opened in headless Chromium: what is drawn, zoom by keyboard, nothing on the console."""

import re

import pytest
from browser import CHROMIUM, MISSING, opened

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.report.graphs import GraphNode, graph
from nmm_compiler.report.page import page
from nmm_compiler.report.parts import Grid, Line, Section

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

# What a reader would do: press + on the timeline, click a slice; then say what the page shows.
READER = """
const picture = document.querySelector("svg.timeline"), plot = picture.querySelector("svg.plot");
const before = plot.getAttribute("viewBox");
picture.focus();
const focused = document.activeElement === picture;
picture.dispatchEvent(new KeyboardEvent("keydown", {key: "+", bubbles: true}));
const zoomed = plot.getAttribute("viewBox");
picture.dispatchEvent(new KeyboardEvent("keydown", {key: "0", bubbles: true}));
const box = plot.querySelector("rect").getBoundingClientRect();
plot.querySelector("rect").dispatchEvent(new MouseEvent("click", {bubbles: true}));
const folded = document.querySelector("details:not([open])");
dispatchEvent(new Event("beforeprint"));
const printed = folded.open;
dispatchEvent(new Event("afterprint"));
return {focused, printed, refolded: !folded.open, before, zoomed, all: plot.getAttribute("viewBox"),
  drawn: box.width > 0 && box.height > 0, buttons: document.querySelectorAll("button").length,
  said: document.querySelector("output").textContent,
  wider: document.documentElement.scrollWidth > window.innerWidth,
  ink: getComputedStyle(document.querySelector("h1")).color,
  paper: getComputedStyle(document.querySelector("main")).backgroundColor,
  graph: [...document.querySelectorAll("svg path")].some(p => p.getBoundingClientRect().height > 9),
  bytes: performance.getEntriesByType("resource").length};
"""


@pytest.fixture(scope="module")
def document():
    profile = build_kernel(LowRankSpec(m=16, k=256, r=128, n=384)).profile()
    nodes = [GraphNode("x", "input [16, 256]"), GraphNode("y", "linear [16, 384]", ("x",), "fused")]
    table = Grid.of(("a wide table", "of several", "columns"), [("word " * 9, "1", "2")])
    parts = [Line("two kinds", "headline"), *profile.report(), graph(nodes, "a graph"),
             Section("more", (table,), folded=True)]  # fmt: skip
    return page("a report", parts)


def test_a_page_is_drawn_zooms_by_keyboard_and_says_nothing_on_the_console(document, tmp_path):
    seen, console = opened(document, tmp_path / "light.html", READER, "--window-size=1100,900")
    assert console == []
    assert seen["drawn"]
    assert seen["graph"]
    assert seen["focused"], "the timeline cannot be reached by keyboard"
    start, _, width, _ = map(float, seen["before"].split())
    closer, _, narrower, _ = map(float, seen["zoomed"].split())
    assert (start, closer, narrower) == pytest.approx((0, width / 4, width / 2))
    assert float(seen["all"].split()[2]) == pytest.approx(width)
    assert seen["buttons"] == 6, "five of the timeline, one that opens what is folded"
    assert " us" in seen["said"]
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
    ink, paper = (sum(map(int, re.findall(r"\d+", seen[name])[:3])) for name in ("ink", "paper"))
    assert ink > 500 > 200 > paper
