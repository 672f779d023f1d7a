"""Warnings of other libraries that no user of this package can act on stay away."""

import pytest
from processes import ran

PROGRAM = """
import torch
import nmm_compiler as nmm
from transformers import LlamaForCausalLM, LlamaConfig
import transformers.quantizers.auto
nmm.compress
"""
LEVEL = """
import logging
logger = logging.getLogger("torchao")
logger.setLevel(logging.INFO)
import nmm_compiler as nmm
nmm.compress
assert logger.level == logging.INFO
"""


def test_a_program_that_uses_transformers_says_nothing_of_torchao():
    pytest.importorskip("transformers")
    assert ran("-c", PROGRAM).stderr == ""


def test_a_level_that_the_user_has_set_stays():
    ran("-c", LEVEL)
