"""nnScaler's import path ``nnscaler.runtime``."""

from nxdpp.nnscaler.runtime import f16_optimizer as f16_optimizer
