"""Hypothesis without chance and without a clock: a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")
