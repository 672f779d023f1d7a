"""The sentence that reports begin with: what low rank gains, predicted, or that it does not pay."""

from __future__ import annotations

from collections.abc import Sequence


def told_apart(gain: float, error: float) -> bool:
    """Return whether a gain, how many times faster, differs from 1 by more than its error."""
    return abs(gain - 1.0) > error


def not_told(gain: float, error: float, other: str) -> str:
    """Return the words before a gain that is not told apart from `other`; "" if it is."""
    if told_apart(gain, error):
        return ""
    return f"not told apart from {other} (error {100 * error:.0f} %): "


def headline(
    gains: Sequence[tuple[float, str]],
    where: str,
    *,
    error: float,
    could: bool = False,
    quality: str = "",
    remedy: str = "",
) -> str:
    """Return "predicted 1.19x per token and 1.12x to first token (batch 1, stack own) on trn2 ...".

    gains: (how many times faster than dense, of what). where: setting and target. error: how far a
    gain has to be from 1 to be told from none. could: of a dense model, which has not reached the
    gains. Where nothing is faster, the sentence begins with that and ends with `remedy`, what would
    help.
    """
    said = " and ".join(f"{gain:.2f}x {what}" for gain, what in gains)
    most = max(gain for gain, _ in gains)
    pays = round(most, 2) > 1.0
    text = (
        f"{'could gain' if could and pays else 'predicted'} {said} {where} over our dense kernels"
    )
    if not pays:
        text = f"{'would not pay' if could else 'does not pay'}: {text}"
    else:
        text = not_told(most, error, "dense") + text
    if remedy and not (pays and told_apart(most, error)):
        text += f"; {remedy}"
    return text + (f"; {quality}" if quality else "")
