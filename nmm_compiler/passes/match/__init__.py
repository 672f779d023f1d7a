"""Matches and refusals: what a rule found, and what it left alone and why."""

from nmm_compiler.passes.match.base import Declined, Match, Rule, rule

__all__ = ["Declined", "Match", "Rule", "rule"]
