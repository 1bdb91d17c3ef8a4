"""nnScaler's import path ``nnscaler.cli.trainer``."""

from nxdpp.doors.nnscaler.cli.trainer import Trainer as Trainer
from nxdpp.doors.nnscaler.cli.trainer import TrainStatus as TrainStatus
