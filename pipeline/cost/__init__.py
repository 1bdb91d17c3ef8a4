"""Cost of layers: counted on fake tensors, or measured on a device."""
