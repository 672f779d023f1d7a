"""The sentence that reports begin with: what low rank gains, predicted, or that it does not pay."""

from __future__ import annotations

from collections.abc import Sequence


def headline(
    gains: Sequence[tuple[float, str]],
    where: str,
    *,
    error: float,
    over: str = "our dense kernels",
    could: bool = False,
    quality: str = "",
    remedy: str = "",
) -> str:
    """Return "predicted 1.19x per token and 1.12x to first token (batch 1, stack own) on trn2 over ...".

    gains: (how many times faster than dense, of what). where: setting and target. error: how far a
    gain has to be from 1 to be told from none. could: of a dense model, which has not reached the
    gains. Where nothing is faster, the sentence begins with that and ends with `remedy`, what would
    help.
    """
    said = " and ".join(f"{gain:.2f}x {what}" for gain, what in gains)
    most = max(gain for gain, _ in gains)
    pays = round(most, 2) > 1.0
    text = f"{'could gain' if could and pays else 'predicted'} {said} {where} over {over}"
    if not pays:
        text = f"{'would not pay' if could else 'does not pay'}: {text}"
    elif most < 1.0 + error:
        text = f"not told apart from dense (error {100 * error:.0f} %): {text}"
    if most < 1.0 + error and remedy:
        text += f"; {remedy}"
    return text + (f"; {quality}" if quality else "")
