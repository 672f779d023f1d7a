"""See docs/layout.md for what this room does."""
