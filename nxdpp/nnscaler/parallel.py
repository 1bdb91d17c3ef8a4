"""nnScaler's import path ``nnscaler.parallel``, and all names of ``nxdpp.nnscaler``; importing it imports torch."""

from nxdpp.doors.nnscaler.compute_config import ComputeConfig as ComputeConfig
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy as BroadcastGenFilesStrategy
from nxdpp.doors.nnscaler.enums import ReuseType as ReuseType
from nxdpp.doors.nnscaler.optimizer import build_optimizer as build_optimizer
from nxdpp.doors.nnscaler.optimizer import sync_grad_when as sync_grad_when
from nxdpp.doors.nnscaler.parallel_module import ParallelModule as ParallelModule
from nxdpp.doors.nnscaler.parallel_optimizer import ParallelOptimizer as ParallelOptimizer
from nxdpp.doors.nnscaler.parallelization import parallelize as parallelize
from nxdpp.doors.nnscaler.registered_functions import register_op as register_op
from nxdpp.doors.nnscaler.start import init as init
from nxdpp.doors.nnscaler.start import uninit as uninit
from nxdpp.doors.nnscaler.state_dicts.deduped import broadcast_weights as broadcast_weights
from nxdpp.doors.nnscaler.state_dicts.deduped import deduped_state_dict as deduped_state_dict
from nxdpp.doors.nnscaler.state_dicts.deduped import deduped_state_dicts as deduped_state_dicts
from nxdpp.doors.nnscaler.state_dicts.deduped import load_deduped_state_dict as load_deduped_state_dict
from nxdpp.doors.nnscaler.state_dicts.merged import load_merged_state_dict as load_merged_state_dict
from nxdpp.doors.nnscaler.state_dicts.merged import load_merged_state_dicts as load_merged_state_dicts
from nxdpp.doors.nnscaler.state_dicts.merged import load_sharded_state_dict as load_sharded_state_dict
from nxdpp.doors.nnscaler.state_dicts.merged import merge_state_dicts as merge_state_dicts
