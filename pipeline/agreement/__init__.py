"""Verification that all ranks run the same program."""
