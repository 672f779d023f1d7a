"""`python -m nmm_compiler` is `nmm`."""

from nmm_compiler.cli.main import main

main()
