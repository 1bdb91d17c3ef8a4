"""nnScaler's import path ``nnscaler.cli.train_hook``."""

from nxdpp.doors.nnscaler.cli.train_hook import TrainHook as TrainHook
