"""The report toolkit: the same parts as text and as HTML, charts, and files written whole."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from nmm_compiler.report import charts
from nmm_compiler.report.charts import GraphNode, graph
from nmm_compiler.report.headline import headline
from nmm_compiler.report.page import as_html, page
from nmm_compiler.report.parts import Code, Grid, Line, Section
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import as_text

VOID = {"meta", "br", "img"}
URL = "https://example.org/a/very/long/path/that-has-hyphens/and_more/of/it/kernel.py"


class Checker(HTMLParser):
    """Collects the text of a page and checks that every tag closes."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


class Fruit(Shown):
    def parts(self):
        return [
            Line("two <kinds> of fruit & more", "headline"),
            Grid.of(
                ("name", "weight", "note"), [("apple", 10.5, "red"), ("fig", 7, URL)], ["weight"]
            ),
            Section("source", (Code("a < b\n  c"),), folded=True),
        ]


def test_text_aligns_wraps_and_never_breaks_a_word():
    text = Fruit().table(40)
    assert text.splitlines()[:5] == [
        "two <kinds> of fruit & more",
        "",
        "name  weight note",
        "apple   10.5 red",
        f"fig        7 {URL}",
    ]
    assert "source\na < b\n  c" in text
    assert max(map(len, as_text([Line("word " * 50)], 30).splitlines())) <= 30


def test_titles_wrap_too():
    title = "a title of a section that is " + "long " * 20
    said = as_text(
        [
            Section(title, (Line("text"),)),
            Section(title, (Grid(("line", "us", "source"), (("1", "2", "x"),), (), (1.0,)),)),
        ],
        60,
    )
    assert max(map(len, said.splitlines())) <= 60


def test_html_says_the_same_and_is_well_formed():
    for text in (Fruit()._repr_html_(), page("Fruit", Fruit().parts())):
        checker = Checker()
        checker.feed(text)
        assert not checker.open
        assert not checker.links, "a page holds everything it shows"
        shown = " ".join(checker.texts)
        for words in ("two <kinds> of fruit & more", "apple", "10.5", URL, "a < b\n  c"):
            assert words in shown


def _parsed(drawing):
    tree = ElementTree.fromstring(drawing.svg)
    hints = [e.text for e in tree.iter() if e.tag.endswith("title")]
    return tree, hints


def test_bars_are_as_wide_as_their_values():
    drawing = charts.bars([("fused", (3.0, 1.0)), ("dense", (8.0, 0.0))], ("a", "b"), "us", "t")
    tree, _ = _parsed(drawing)
    widths = [float(e.get("width")) for e in tree.iter() if e.get("height") == "18"]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert widths[2] == pytest.approx(2 * (widths[0] + widths[1]), rel=0.01)


def test_gains_begin_at_one_and_twice_is_as_long_as_half():
    rows = [("a", 2.0, True), ("b", 0.5, True), ("c", 1.05, False)]
    tree, _ = _parsed(charts.gain_bars(rows, "t"))
    drawn = [one for one in tree.iter() if one.tag.endswith("rect") and one.get("height") == "18"]
    left, wide = ([float(one.get(name)) for one in drawn] for name in ("x", "width"))
    assert left[0] == left[2] == pytest.approx(left[1] + wide[1], abs=0.02)
    assert wide[0] == pytest.approx(wide[1], abs=0.02)
    assert wide[2] < wide[0] / 5
    assert [one.get("fill") for one in drawn] == ["var(--a)", "var(--a)", "var(--h)"]


def test_what_stands_beside_a_bar_is_inside_of_the_picture():
    rows = [
        ("model.layers.0.mlp.down_proj", (12_345_678.0, 1.0)),
        ("q", (4.0, 2.0)),
    ]
    tree, _ = _parsed(charts.bars(rows, ("kept", "removed"), "parameters", "t"))
    labels = {
        e.text: float(e.get("x"))
        for e in tree.iter()
        if e.tag.endswith("text") and e.text.endswith("parameters")
    }
    assert set(labels) == {"12,345,679 parameters", "6 parameters"}
    assert all(x + 6.5 * len(text) <= charts.WIDTH for text, x in labels.items())


def test_a_graph_draws_arcs_only_between_what_is_shown():
    nodes = [
        GraphNode("x", "input"),
        GraphNode("turned", "t", ("x", "elsewhere"), "transpose"),
        GraphNode("y", "mm", ("turned", "x"), "fused"),
    ]
    tree, hints = _parsed(graph(nodes, "a graph"))
    assert len([e for e in tree.iter() if e.tag.endswith("path")]) == 3
    assert "turned = t (transpose)" in hints


def test_a_listing_shows_every_line_on_a_page_and_the_costly_ones_as_text():
    rows = [(1, "", "import nki"), (2, "3.5", "  f(a < b)")]
    listing = Grid.of(("line", "us", "source"), rows, right=("line", "us"), shares=(0, 1))
    assert as_text([listing]).splitlines() == ["line   us  source", "   2  3.5  f(a < b)"]
    shown = as_html([listing])
    assert "import nki" in shown
    assert "f(a &lt; b)" in shown
    assert shown.count("--share:1.000") == 1


# The one sentence of demo, reports and commands.

BOTH = [(1.19, "per token"), (1.12, "to first token")]


@pytest.mark.parametrize(
    ("gains", "more", "said"),
    [
        (BOTH, {"error": 0.03, "quality": "perplexity 9.1 -> 9.3"},
         "predicted 1.19x per token and 1.12x to first token (batch 1) on trn2 over our dense "
         "kernels; perplexity 9.1 -> 9.3"),
        ([(1.004, "per token"), (0.9, "a pass")], {"error": 0.03, "remedy": "more tokens help"},
         "does not pay: predicted 1.00x per token and 0.90x a pass (batch 1) on trn2 over our "
         "dense kernels; more tokens help"),
        ([(1.006, "per token")], {"error": 0.0},
         "predicted 1.01x per token (batch 1) on trn2 over our dense kernels"),
    ],
)  # fmt: skip
def test_the_sentence_has_gains_setting_baseline_and_quality_or_what_would_help(gains, more, said):
    assert headline(gains, "(batch 1) on trn2", **{"remedy": "x"} | more) == said


@pytest.mark.parametrize(
    ("gain", "could", "start"),
    [
        (1.3, False, "predicted 1.30x"),
        (1.3, True, "could gain 1.30x"),
        (1.02, False, "not told apart from dense (error 3 %): predicted 1.02x"),
        (1.02, True, "not told apart from dense (error 3 %): could gain 1.02x"),
        (0.9, False, "does not pay: predicted 0.90x"),
        (0.9, True, "would not pay: predicted 0.90x"),
    ],
)
def test_a_gain_is_said_to_be_reached_only_by_what_reached_it(gain, could, start):
    said = headline([(gain, "a pass")], "on trn2", error=0.03, could=could, remedy="try more")
    assert said.startswith(start)
    assert ("try more" in said) == (gain < 1.03)
