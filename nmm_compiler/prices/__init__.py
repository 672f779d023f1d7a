"""What a computation takes, fused, in smaller calls and dense: `ways`, the one price of a call."""
