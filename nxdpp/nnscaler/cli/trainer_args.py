"""nnScaler's import path ``nnscaler.cli.trainer_args``."""

from nxdpp.nnscaler.cli import *
