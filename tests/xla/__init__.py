"""Tests on XLA devices. `.ci/xla` runs them in an environment with torch_xla; others do not collect them."""
