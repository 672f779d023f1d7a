"""Adds `--update-golden`: write the golden sources anew instead of comparing with them.

And `--triton-viz DIR`: run emitted Beta 1 kernels in the interpreter of that clone.
"""


def pytest_addoption(parser):
    parser.addoption("--triton-viz", help="a clone of triton-viz, whose NKI interpreter is used")
    parser.addoption(
        "--update-golden", action="store_true", default=False, help="rewrite tests/golden/*.py"
    )
