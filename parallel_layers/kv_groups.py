"""Groups of neighbouring tensor-parallel ranks that hold copies of the same key and value heads.

With 2 key-value heads on 8 ranks, 4 copies of each::

    tensor group      0 1 2 3 4 5 6 7
    key-value head    0 0 0 0 1 1 1 1        groups [0 1 2 3] and [4 5 6 7]
"""

import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.transfer_groups import own_group

# By number of copies: the tensor group for which the group was made, and this rank's group.
_groups: dict[int, tuple[ProcessGroup, ProcessGroup]] = {}


def kv_shared_group(copies: int) -> ProcessGroup | None:
    """This rank's group of ``copies`` ranks; ``None`` for one copy, and in the debug mode.

    The first call with a number is collective over all ranks: each builds the same model.
    """
    if copies == 1 or parallel_state.is_debug():
        return None
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    made_for, group = _groups.get(copies, (None, None))
    if group is None or made_for is not tensor_group:
        lists = parallel_state.get_tensor_model_parallel_group(as_list=True)
        members = [ranks[first : first + copies] for ranks in lists for first in range(0, len(ranks), copies)]
        group = own_group(members, dist.get_backend(tensor_group))
        _groups[copies] = tensor_group, group
    return group
