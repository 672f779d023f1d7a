"""Finds a kernel in a file, a text or a function, and runs its code under stand-in modules."""
