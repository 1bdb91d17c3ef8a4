"""Saves and loads of checkpoints, measured."""
