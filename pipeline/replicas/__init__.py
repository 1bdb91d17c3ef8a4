"""Exchanges between data-parallel replicas, and the average of their gradients."""
