"""Commands for checkpoints: ``python -m nxdpp checkpoint``."""
