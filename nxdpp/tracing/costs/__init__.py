"""Costs of the nodes of a graph: counted on fake tensors, or measured on a device."""
