"""The kernel cache: emitted sources on disk, keyed by everything that can change them.

key.py       named entries -> digest; what differs between two keys
entry.py     one entry and its manifest `meta.json`, which checks itself byte by byte
trust.py     which directories and files may be believed, since entries are code
foreign.py   what a source from elsewhere may contain
disk.py      staged and renamed: an entry is whole or absent; the least recently used go first
archive.py   entries as a tar archive
remote.py    a shared store at a declared fsspec URL
explain.py   what made a miss; whether an entry is still what would be built
store.py     the public class: get, get_or_build, entries, show, verify, prune
"""
