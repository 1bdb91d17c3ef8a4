"""Recording of steps and their Chrome trace."""
