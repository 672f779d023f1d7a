"""The rewrite rules, one file each, named as the rule; `base.py` says what a rule is.

A rule of your own needs `Rule` or `rule`, `Match`, `Refusal`, and the safety checks of the built-in
rules: `unsafe` for any replacement, `refuse` for one by a kernel.
"""

from nmm_compiler.passes.chains.safety import Refusal, refuse, unsafe
from nmm_compiler.passes.patterns import rule
from nmm_compiler.passes.rules.base import Declined, Match, Rule

__all__ = ["Declined", "Match", "Refusal", "Rule", "refuse", "rule", "unsafe"]
