"""The rewrite rules, one file each, named as the rule; `base.py` says what a rule is.

What a rule of your own needs: `Rule` or `rule`, `Match`, `Refusal`, and `refuse`, which holds the
safety checks of the built-in rules.
"""

from nmm_compiler.passes.chains.linear_map import Refusal
from nmm_compiler.passes.chains.safety import refuse
from nmm_compiler.passes.rules.base import Declined, Match, Rule, rule

__all__ = ["Declined", "Match", "Refusal", "Rule", "refuse", "rule"]
