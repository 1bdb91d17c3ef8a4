"""Construction of models without memory, and the initial weights of the parameters that a rank holds."""
