"""State that a step can change or depend on besides tensors: Python objects."""
