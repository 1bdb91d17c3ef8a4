"""Hypothesis profile with fixed seeds and without deadlines, since the machine may be busy."""

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")
