"""The sentence that says what low rank gains: one function, for every report and command."""

from __future__ import annotations

from collections.abc import Sequence


def headline(
    gains: Sequence[tuple[float, str]],
    where: str,
    *,
    over: str = "our dense kernels",
    quality: str = "",
    remedy: str = "",
) -> str:
    """Return "predicted 1.19x per token and 1.12x to first token (batch 1) on trn2 over ...".

    gains: (how many times faster than dense, of what). where: setting and target. Where nothing is
    faster, the sentence begins with that and ends with `remedy`, what would help.
    """
    said = " and ".join(f"{gain:.2f}x {what}" for gain, what in gains)
    text = f"predicted {said} {where} over {over}"
    if all(round(gain, 2) <= 1.0 for gain, _ in gains):
        text = f"does not pay: {text}" + (f"; {remedy}" if remedy else "")
    return text + (f"; {quality}" if quality else "")
