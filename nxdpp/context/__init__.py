"""Sequences whose tokens are divided over ranks that have the same parameters."""
