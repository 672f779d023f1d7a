"""Adds `--update-golden`: write the golden sources anew instead of comparing with them.

And `--triton-viz DIR`: run emitted Beta 1 kernels in the interpreter of that clone;
`--neuron-docs DIR`: compare them with the stubs of SDK 2.26.
"""


def pytest_addoption(parser):
    parser.addoption("--triton-viz", help="a clone of triton-viz, whose NKI interpreter is used")
    parser.addoption(
        "--update-golden", action="store_true", default=False, help="rewrite tests/golden/*.py"
    )
    parser.addoption("--neuron-docs", help="a clone of aws-neuron-sdk, for its stubs of Beta 1")
