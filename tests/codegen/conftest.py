"""Adds `--update-golden`: write the golden sources anew instead of comparing with them."""


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", default=False, help="rewrite tests/golden/*.py"
    )
