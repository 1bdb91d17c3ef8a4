"""The trace of a model: one graph in which transformer layers are single nodes, and its checks."""
