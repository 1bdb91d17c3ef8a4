"""Optimizers whose state is sharded over the data-parallel replicas, or kept in float32."""
