"""The one sentence of demo, reports and commands."""

from nmm_compiler.report.headline import headline

BOTH = [(1.19, "per token"), (1.12, "to first token")]


def test_the_sentence_has_gains_setting_baseline_and_quality():
    assert headline(BOTH, "(batch 1) on trn2", quality="perplexity 9.1 -> 9.3", remedy="x") == (
        "predicted 1.19x per token and 1.12x to first token (batch 1) on trn2 over our dense "
        "kernels; perplexity 9.1 -> 9.3"
    )


def test_what_does_not_pay_says_so_and_what_would():
    said = headline([(1.004, "per token"), (0.9, "a pass")], "on trn1", remedy="more tokens help")
    assert said.startswith("does not pay: predicted 1.00x per token and 0.90x a pass on trn1")
    assert said.endswith("; more tokens help")
    assert "pay" not in headline([(1.006, "per token")], "on trn1", remedy="more tokens help")
