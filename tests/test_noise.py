"""Warnings of other libraries that no user of this package can act on stay away."""

import logging
import subprocess
import sys

import pytest

PROGRAM = """
import torch
import nmm_compiler as nmm
from transformers import LlamaForCausalLM, LlamaConfig
import transformers.quantizers.auto
nmm.compress
"""


def test_a_program_that_uses_transformers_says_nothing_of_torchao():
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_level_that_the_user_has_set_stays():
    from nmm_compiler import _quiet_libraries

    logger = logging.getLogger("torchao")
    before = logger.level
    try:
        logger.setLevel(logging.INFO)
        _quiet_libraries()
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)
