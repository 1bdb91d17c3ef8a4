"""Tests of tools/loops."""
