"""Gradients over data-parallel replicas: average, norm, scaler, and optimizers with sharded state."""
