"""Adds `--neuronmm DIR`: run the paper's kernels of a clone of github.com/dinghongsong/NeuronMM."""


def pytest_addoption(parser):
    parser.addoption("--neuronmm", help="a clone of dinghongsong/NeuronMM")
