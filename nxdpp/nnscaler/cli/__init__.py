"""nnScaler's import path of its trainer; importing it imports torch."""

from nxdpp.doors.nnscaler.cli.aggregated_outputs import AggregatedOutputs as AggregatedOutputs
from nxdpp.doors.nnscaler.cli.configs import CheckpointConfig as CheckpointConfig
from nxdpp.doors.nnscaler.cli.configs import DataloaderConfig as DataloaderConfig
from nxdpp.doors.nnscaler.cli.configs import DatasetConfig as DatasetConfig
from nxdpp.doors.nnscaler.cli.configs import DatasetSamplerConfig as DatasetSamplerConfig
from nxdpp.doors.nnscaler.cli.configs import HookConfig as HookConfig
from nxdpp.doors.nnscaler.cli.configs import HookMapConfig as HookMapConfig
from nxdpp.doors.nnscaler.cli.configs import LogConfig as LogConfig
from nxdpp.doors.nnscaler.cli.configs import LRSchedulerConfig as LRSchedulerConfig
from nxdpp.doors.nnscaler.cli.configs import ModelConfig as ModelConfig
from nxdpp.doors.nnscaler.cli.configs import OptimizerConfig as OptimizerConfig
from nxdpp.doors.nnscaler.cli.trainer import Trainer as Trainer
from nxdpp.doors.nnscaler.cli.trainer_args import TrainerArgs as TrainerArgs
from nxdpp.doors.nnscaler.compute_config import ComputeConfig as ComputeConfig
