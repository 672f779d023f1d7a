"""The stand-in `nki.isa`: one file per family of instructions; `names.py` lists them all."""
