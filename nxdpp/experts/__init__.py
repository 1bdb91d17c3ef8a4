"""Mixtures of experts whose experts are divided over data-parallel ranks."""
