"""The op of family `experts`."""

OPS = ()
