"""Kernel families, and the NKI functions that compute them.

FAMILIES is the list: a name of specs, and the family that computes them. A family is one folder:
what is computed with its float64 reference and error bound, schedule.py (how, and which schedules
are legal), kernel.py (the NKI kernel for any spec) and op.py (the torch ops). pieces/ holds the
stages of kernels, and NKI code that they share.
"""

from nmm_compiler.kernels.attention.schedule import ATTENTION
from nmm_compiler.kernels.base import Family
from nmm_compiler.kernels.experts.schedule import EXPERTS
from nmm_compiler.kernels.linear.schedule import LINEAR

FAMILIES: dict[str, Family] = {family.name: family for family in (*LINEAR, ATTENTION, EXPERTS)}
