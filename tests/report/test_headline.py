"""The one sentence of demo, reports and commands."""

import pytest

from nmm_compiler.report.headline import headline

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
