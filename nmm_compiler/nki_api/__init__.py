"""The NKI language as data, per version, and the lint that checks a kernel file against it."""
