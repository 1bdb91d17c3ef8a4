"""Names of ``nxdpp.nnscaler`` that need torch."""

from nxdpp.doors.nnscaler.deduped import broadcast_weights as broadcast_weights
from nxdpp.doors.nnscaler.deduped import deduped_state_dict as deduped_state_dict
from nxdpp.doors.nnscaler.deduped import deduped_state_dicts as deduped_state_dicts
from nxdpp.doors.nnscaler.deduped import load_deduped_state_dict as load_deduped_state_dict
from nxdpp.doors.nnscaler.merged import load_merged_state_dict as load_merged_state_dict
from nxdpp.doors.nnscaler.merged import load_merged_state_dicts as load_merged_state_dicts
from nxdpp.doors.nnscaler.merged import merge_state_dicts as merge_state_dicts
from nxdpp.doors.nnscaler.optimizer import build_optimizer as build_optimizer
from nxdpp.doors.nnscaler.parallel_module import ParallelModule as ParallelModule
from nxdpp.doors.nnscaler.parallel_optimizer import ParallelOptimizer as ParallelOptimizer
from nxdpp.doors.nnscaler.parallelization import parallelize as parallelize
