"""Reads a graph and changes nothing: capture, canonical forms, views, effects, metadata."""
