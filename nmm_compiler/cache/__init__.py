"""The kernel cache: emitted sources on disk, keyed by everything that can change them.

key.py       named entries -> digest; diff of two keys
entry.py     one entry and its manifest `meta.json`, which checks itself byte by byte
trust.py     which directories and files may be believed, since entries are code
disk.py      staged, fsynced, renamed: an entry is whole or absent
evict.py     the size bound, least recently used first, and leftovers of killed processes
archive.py   tar export and import
remote.py    second level at a declared fsspec URL
foreign.py   what a source from elsewhere may contain
checked.py   marks of the entries whose sources passed foreign.py
signing.py   signatures of entries, as minisign makes them
explain.py   which named entry made a miss; what `verify` found
memory.py    entries this process has verified    scratch.py  their files, when not on disk
locks.py     one builder per key, to save work
levels.py    memory, disk, remote: looks up and keeps entries, handles each level's failures
store.py     the public class: get, get_or_build, list, show, explain, verify, prune, clear
"""
