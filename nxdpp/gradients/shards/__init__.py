"""Parameters, gradients and optimizer state sharded over the data-parallel replicas, unit by unit."""
