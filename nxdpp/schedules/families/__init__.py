"""Schedule families, one a file."""
