"""Faults of ranks: what each rank is in, and how the failure of one ends all."""
