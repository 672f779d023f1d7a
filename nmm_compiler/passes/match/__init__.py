"""Matches and refusals: what a rule found, and what it left alone and why."""

from nmm_compiler.passes.match.base import Declined, Match, Rule, rule
from nmm_compiler.passes.match.obstacles import refuse
from nmm_compiler.passes.match.stages import Refusal

__all__ = ["Declined", "Match", "Refusal", "Rule", "refuse", "rule"]
