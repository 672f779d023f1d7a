"""The gallery of spellings: its cases, one file for each kind, and how they are tried."""
