"""nnScaler's import path ``nnscaler.runtime``."""
