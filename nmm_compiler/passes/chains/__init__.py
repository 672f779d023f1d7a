"""Linear maps, chains of them, and what may move past what."""
