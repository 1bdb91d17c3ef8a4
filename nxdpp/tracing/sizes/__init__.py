"""Sizes, dtypes and numbers of dimensions that code asks for while it is traced."""
