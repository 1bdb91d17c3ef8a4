"""Backward passes on autograd's own graph, full or split."""
